"""Others' clients, unmodified, against a running server: `make test-clients`, which makes their environments."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.attack.target import Target, attacked, save_checkpoint

CLIENTS = Path(os.environ.get("XGPT_CLIENTS", ""))
"""A directory with an environment for each client."""
SCRIPTS = {
    "openai": "openai_client.py",
    "langchain-openai": "langchain_client.py",
    "openai-agents": "agents_client.py",
    "pydantic-ai-slim": "pydantic_client.py",
    "anthropic": "anthropic_client.py",
    "litellm": "litellm_client.py",
}
FURTHER = {
    "instructor": "instructor",
    "smolagents": "smolagents",
    "llama-index-llms-openai-like": "llama_index",
    "haystack-ai": "haystack",
    "dspy": "dspy",
    "inspect-ai": "inspect_ai",
    "outlines": "outlines",
    "semantic-kernel": "semantic_kernel",
    "autogen-ext": "autogen",
}
"""By client, its function in further_clients.py."""
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


@pytest.mark.parametrize("client", FURTHER)
def test_a_tool_and_a_schema(client: str, target: Target) -> None:
    script = Path(__file__).with_name("further_clients.py")
    assert "done" in run(client, "python", str(script), f"{target.url}/v1", target.model, FURTHER[client])


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


def lm_eval(target: Target, directory: Path, task: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    """What lm-eval finds in a task of its own data: samples, with what the server answered."""
    data = directory / "documents.jsonl"
    data.write_text('{"q": "1+1=", "a": "2"}\n{"q": "2+2=", "a": "4"}\n')
    loaded = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (directory / "sums.yaml").write_text(json.dumps({"task": "sums", "doc_to_text": "{{q}}", **loaded, **task}))
    model = f"model={target.model},base_url={target.url}/v1/completions,max_retries=1,{tokenizer}"
    words = ["lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks", "sums"]
    run("lm-eval", *words, "--include_path", str(directory), "--log_samples", "--output_path", str(directory / "found"))
    (written,) = (directory / "found").rglob("samples_sums_*.jsonl")
    return {each["doc"]["q"]: each for each in map(json.loads, written.read_text().splitlines())}


def test_lm_evals_tasks_that_generate(target: Target, tmp_path: Path) -> None:
    task = {
        "output_type": "generate_until",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    found = lm_eval(target, tmp_path, task, "tokenizer_backend=None")
    assert all("exact_match" in sample for sample in found.values()) and len(found) == 2


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_evals_tasks_that_score(target: Target, checkpoint: Path, tmp_path: Path, tokenized: bool) -> None:
    """Answers' log probabilities, of token ids and of texts, are those that Hugging Face's model gives."""
    import transformers

    choices = ["2", "4", " or so"]
    task = {
        "output_type": "multiple_choice",
        "doc_to_choice": choices,
        "doc_to_target": "{{a}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    arguments = f"tokenizer_backend=huggingface,tokenizer={checkpoint},tokenized_requests={tokenized}"
    found = lm_eval(target, tmp_path, task, arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    encode = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode
    for question, sample in found.items():
        for choice, (scored, is_greedy) in zip(choices, sample["filtered_resps"], strict=True):
            ids = torch.tensor(encode(question + choice).ids)
            with torch.inference_mode():
                scores = model(ids[None]).logits[0, :-1].log_softmax(dim=-1)[len(question) - 1 :]
            answer = ids[len(question) :]
            expected = scores.gather(-1, answer[:, None]).sum().item()
            assert float(scored) == pytest.approx(expected, abs=1e-3)
            assert str(is_greedy) == str(bool((scores.argmax(dim=-1) == answer).all()))
