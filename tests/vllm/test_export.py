"""What we export: vLLM's own parser takes it, and the script starts a vLLM that follows the plan."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.vllm.offline import Requests
from tests.vllm.plans import exportable, here, plan_with, waa_plan
from xgpt.app.exporting import PORT, export
from xgpt.app.serving_vllm import free_port
from xgpt.schema import OrcaSettings, RraSettings
from xrunner.vllm.command import SERVER
from xrunner.vllm.process import environment, package_path

HOST = "127.0.0.1"
RRA = plan_with(RraSettings(encode_batch=6, decode_iterations=5))
SINGLE = {"on a GPU": RRA, "on CPUs": here(RRA), "quantile": plan_with(OrcaSettings(max_batch=40), kv="quantile")}


def parsed(words: list[str]) -> AsyncEngineArgs:
    """What vLLM's server makes of a command line of ours."""
    assert words[:3] == ["python3", "-m", SERVER]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])
    validate_parsed_serve_args(arguments)
    return AsyncEngineArgs.from_cli_args(arguments)


def command_of(script: str) -> list[str]:
    return [word for word in shlex.split(script.rpartition("exec ")[2]) if word not in ("\n", "$@")]


@pytest.mark.parametrize("name", SINGLE)
def test_vllms_parser_takes_the_script(name: str, checkpoint: Path) -> None:
    given = parsed(command_of(export(exportable(SINGLE[name], str(checkpoint)), "vllm")["serve.sh"]))
    assert given.additional_config == {"xgpt": {"plan": "plan.json"}}
    assert given.model == str(checkpoint)


def test_vllms_parser_takes_both_lanes_of_waa(checkpoint: Path) -> None:
    files = export(exportable(waa_plan(), str(checkpoint)), "vllm")
    for lane, role in (("encode", "kv_producer"), ("decode", "kv_consumer")):
        config = parsed(command_of(files[f"{lane}.sh"])).kv_transfer_config
        assert config is not None and config.kv_role == role


def test_vllms_parser_takes_the_container(checkpoint: Path) -> None:
    objects = yaml.safe_load_all(export(exportable(RRA, str(checkpoint)), "k8s")["xgpt.yaml"])
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    assert parsed(deployment["spec"]["template"]["spec"]["containers"][0]["command"]).model == "/model"


def test_the_script_starts_it(checkpoint: Path, requests: Requests, expected: list[list[int]], tmp_path: Path) -> None:
    port = free_port(HOST)
    for name, text in export(exportable(here(RRA), str(checkpoint)), "vllm").items():
        (tmp_path / name).write_text(text.replace(f"--port {PORT}", f"--port {port}"))
    with package_path() as packages, (tmp_path / "log").open("w") as log:
        own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        variables = environment(packages, {}) | own
        with subprocess.Popen(["sh", tmp_path / "serve.sh"], env=variables, stdout=log, stderr=log) as process:
            try:
                while process.poll() is None:
                    try:
                        httpx.get(f"http://{HOST}:{port}/health", trust_env=False).raise_for_status()
                        break
                    except httpx.HTTPError:
                        time.sleep(0.5)
                body = {
                    "model": RRA.model.name,
                    "prompt": requests.prompts[0],
                    "max_tokens": requests.outputs[0],
                    "ignore_eos": True,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                url = f"http://{HOST}:{port}/v1/completions"
                answer = httpx.post(url, json=body, trust_env=False, timeout=60).raise_for_status().json()
            finally:
                process.terminate()
    assert answer["choices"][0]["token_ids"] == expected[0]
    assert "scheduling by plan.json" in (tmp_path / "log").read_text()
