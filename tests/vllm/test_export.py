"""What we export starts a vLLM that follows the plan, behind our endpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.exports import export
from tests.vllm.offline import Requests
from tests.vllm.plans import exportable, here, plan_with
from xgpt.core.schema import RraSettings
from xrunner.vllm.process import PYTHON_VARIABLE

RRA = plan_with(RraSettings(encode_batch=6, decode_iterations=5))


def test_the_script_starts_it(checkpoint: Path, requests: Requests, expected: list[list[int]], tmp_path: Path) -> None:
    for name, text in export(exportable(here(RRA), str(checkpoint)), "shell").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("port=8000", "port=0"))
    program = tmp_path / "xgpt"  # as installing the wheel would make it
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m xgpt "$@"\n')
    program.chmod(0o755)
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(path)}
    environment = {name: value for name, value in os.environ.items() if name != PYTHON_VARIABLE} | variables
    command = ["sh", str(tmp_path / "serve.sh")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(line.split()[-1] for line in process.stderr if "listening on" in line)
            body = {
                "model": RRA.model.name,
                "prompt": requests.prompts[0],
                "max_tokens": requests.outputs[0],
                "ignore_eos": True,
                "temperature": 0,
            }
            asked = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)
            answer = asked.raise_for_status().json()
            running = httpx.get(f"{url}/plan", trust_env=False).json()["plan"]
        finally:
            process.terminate()
    assert answer["choices"][0]["token_ids"] == expected[0]
    assert running["policy"]["kind"] == "rra"
