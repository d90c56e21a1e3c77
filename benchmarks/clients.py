"""Clients that users have, against a served checkpoint: openai's, and a load generator of the field, guidellm.

    python -m benchmarks.clients [--venv DIR]

The model is a seeded one of three million parameters with a byte tokenizer. guidellm and what it
needs go into an environment of their own (made in DIR where it is not there yet). Ends with 1 where a client complains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import openai

from benchmarks.lib.tiny_server import SPEC, TEMPLATE, codec, running
from xgpt.core.io import write_atomic

RESULTS = Path("results/clients.json")
GUIDELLM = "guidellm==0.8.1"
GUIDELLM_TIMEOUT_S = 150
NUM_REQUESTS, OUTPUT_TOKENS = 64, 32


def with_openai(url: str) -> dict[str, int]:
    """Completions and chats, whole and streamed, models, and an error: what of each came."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        whole = client.completions.create(model=model.id, prompt="hello", max_tokens=8, temperature=0)
        parts = list(
            client.completions.create(model=model.id, prompt="hello", max_tokens=8, temperature=0, stream=True)
        )
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        messages: Any = [{"role": "user", "content": "hello"}]
        chat = client.chat.completions.create(model=model.id, messages=messages, max_tokens=8, temperature=0)
        assert chat.choices[0].message.role == "assistant" and chat.usage is not None
        chunks = list(
            client.chat.completions.create(model=model.id, messages=messages, max_tokens=8, temperature=0, stream=True)
        )
        refused = 0
        try:
            client.completions.create(model="another", prompt="hello")
        except openai.NotFoundError:
            refused = 1
    return {"tokens": whole.usage.completion_tokens if whole.usage else 0, "chunks": len(chunks), "refused": refused}


def tokenizer_directory(directory: Path) -> Path:
    """What a client's tokenizer loads: the byte tokenizer, and a config that names it."""
    codec().tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": SPEC.max_context}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory


def install(venv: Path) -> Path:
    """guidellm's program, in an environment of its own."""
    program = venv / "bin" / "guidellm"
    if not program.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin" / "pip"), "install", "-q", GUIDELLM], check=True)
    return program


def with_guidellm(program: Path, url: str, directory: Path, kind: str) -> dict[str, Any]:
    """A synthetic benchmark with 8 requests at once, streamed; what it reports.

    Args:
        kind: completions or chat/completions.
    """
    name = kind.replace("/", "-")
    report, config = directory / f"{name}-report.json", directory / f"{name}.json"
    spec = {
        "backend": {"kind": "openai_http", "target": url, "model": SPEC.name, "request_format": f"/v1/{kind}"},
        "profile": {"kind": "concurrent", "streams": 8},
        "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(directory)},
        "data": [{"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": OUTPUT_TOKENS}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }
    config.write_text(json.dumps({"spec": spec}))
    command = [str(program), "run", "--config", str(config), "--disable-progress"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=GUIDELLM_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"guidellm ended with {done.returncode}: {done.stderr[-2000:] or done.stdout[-2000:]}")
    benchmark = json.loads(report.read_text())["benchmarks"][0]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    mean_output = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
    requests = benchmark["requests"]
    complaints = [entry["info"]["error"] for kind in ("errored", "incomplete") for entry in requests[kind]]
    return totals | {"mean_output_tokens": mean_output, "complaints": complaints}


@click.command()
@click.option("--venv", default="results/guidellm", show_default=True, help="Environment of guidellm.")
def main(venv: str) -> None:
    """Ask a server as users' programs do."""
    program = install(Path(venv).absolute())
    with running() as server, tempfile.TemporaryDirectory() as directory:
        url = f"http://127.0.0.1:{server.port}"
        found: dict[str, Any] = {"openai": with_openai(url)}
        click.echo(f"openai: {found['openai']}")
        tokenizer_directory(Path(directory))
        for kind in ("completions", "chat/completions"):
            found[kind] = with_guidellm(program, url, Path(directory), kind)
            click.echo(f"guidellm, {kind}: {found[kind]}")
    write_atomic(RESULTS, json.dumps(found, indent=1) + "\n")
    loads = [found[kind] for kind in ("completions", "chat/completions")]
    failed = any(load["errored"] or load["incomplete"] or load["successful"] != NUM_REQUESTS for load in loads)
    raise SystemExit(failed or found["openai"]["refused"] != 1)


if __name__ == "__main__":
    main()
