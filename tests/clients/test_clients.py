"""Others' clients, unmodified, against a running server: `make test-clients`, which makes their environments."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.target import Target, attacked, save_checkpoint

CLIENTS = Path(os.environ.get("XGPT_CLIENTS", ""))
"""A directory with an environment for each client."""
SCRIPTS = {
    "openai": "openai_client.py",
    "langchain-openai": "langchain_client.py",
    "openai-agents": "agents_client.py",
    "pydantic-ai-slim": "pydantic_client.py",
}
pytestmark = pytest.mark.skipif(not os.environ.get("XGPT_CLIENTS"), reason="XGPT_CLIENTS names no environments")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("served")
    with attacked("one", checkpoint, directory, key=False) as running:
        yield running


def run(client: str, *words: str, **variables: str) -> str:
    """What a program of a client's environment says; its exit status is 0."""
    program = CLIENTS.resolve() / client / "bin" / words[0]
    if not program.exists():
        pytest.skip(f"{client} is not installed")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"} | variables
    ran = subprocess.run(
        [program, *words[1:]], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.parametrize("client", SCRIPTS)
def test_a_library(client: str, target: Target) -> None:
    script = Path(__file__).parent / SCRIPTS[client]
    assert "done" in run(client, "python", str(script), f"{target.url}/v1", target.model)


def test_guidellm(target: Target, checkpoint: Path, tmp_path: Path) -> None:
    data, found = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    data.write_text("".join(json.dumps({"prompt": f"hello {number}"}) + "\n" for number in range(4)))
    backend = f"kind=openai_http,target={target.url},model={target.model}"
    words = ["guidellm", "run", "--backend", backend, "--profile", "kind=concurrent,streams=2"]
    words += ["--constraint", "kind=max_requests,count=4", "--data", f"kind=json_file,path={data}"]
    words += ["--tokenizer", f"kind=hf_auto,model={checkpoint}", "--output", f"kind=json,path={found}"]
    run("guidellm", *words, "--disable-progress")
    totals = json.loads(found.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 4 and totals["errored"] == 0, totals


def test_lm_eval(target: Target, tmp_path: Path) -> None:
    """Tasks that generate; those that score given answers ask for log probabilities of prompts, which get 400."""
    (tmp_path / "sums.jsonl").write_text('{"q": "1+1=", "a": "2"}\n{"q": "2+2=", "a": "4"}\n')
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    model = f"model={target.model},base_url={target.url}/v1/completions,tokenizer_backend=None,max_retries=1"
    words = ["lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks", "sums"]
    assert "exact_match" in run("lm-eval", *words, "--include_path", str(tmp_path))
