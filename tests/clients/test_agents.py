"""Agents' command lines, unmodified, against the endpoint with a model that calls a tool: `make test-clients`.

Claude Code is run if it is in build/clients/claude-code (npm install --prefix); its licence is not an open one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes import SPEC, VOCAB_SIZE, SayingExecutor, byte_tokenizer, fake_app, fake_engine, running
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import TextCodec

CLIENTS = Path(os.environ.get("XGPT_CLIENTS", ""))
pytestmark = pytest.mark.skipif(not os.environ.get("XGPT_CLIENTS"), reason="XGPT_CLIENTS names no environments")

TEMPLATE = """{% for tool in tools or () %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or () %}!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}<assistant>"""
"""As strict about system messages as those of Qwen 3.5."""


class Calling(SayingExecutor):
    """Calls a tool that runs a command, and answers when it sees the command's output."""

    def __init__(self, tool: str, argument: str) -> None:
        super().__init__(byte_tokenizer())
        self._call = json.dumps({"name": tool, "arguments": {argument: "echo MARK-$((40 + 2))"}})

    def says(self, prompt: str) -> str:
        return "All is well." if "MARK-42" in prompt else f"I look.<tool_call>\n{self._call}\n</tool_call>"


@contextmanager
def calling(tool: str, argument: str) -> Iterator[str]:
    """A server of model "fake", whose context holds what agents send."""
    codec = TextCodec(byte_tokenizer(), ChatTemplate(TEMPLATE))
    spec = SPEC.model_copy(update={"max_context": 1 << 20})
    engine = fake_engine(Calling(tool, argument), kv_blocks=200_000)
    with running(fake_app(engine, codec=codec, spec=spec, eos_token_ids=frozenset({VOCAB_SIZE - 1}))) as url:
        yield url


def run(client: str, program: str, *words: str, home: Path, **variables: str) -> str:
    """What an agent says; its exit status is 0."""
    path = CLIENTS.resolve() / client / "node_modules/.bin" / program
    if not path.exists():
        pytest.skip(f"{client} is not installed")
    environment = os.environ | {"HOME": str(home), "NO_PROXY": "*"} | variables
    ran = subprocess.run(
        [path, *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd=home,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


def test_codex(tmp_path: Path) -> None:
    with calling("exec_command", "cmd") as url:
        (tmp_path / "config.toml").write_text(
            'model = "fake"\nmodel_provider = "xgpt"\n[model_providers.xgpt]\nname = "xgpt"\n'
            f'base_url = "{url}/v1"\nwire_api = "responses"\n'
        )
        words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Look around.")
        assert "All is well." in run("codex", "codex", *words, home=tmp_path, CODEX_HOME=str(tmp_path))


def test_claude_code(tmp_path: Path) -> None:
    with calling("Bash", "command") as url:
        variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_SMALL_FAST_MODEL": "fake"}
        words = ("-p", "Look around.", "--allowedTools", "Bash", "--model", "fake")
        said = run(
            "claude-code", "claude", *words, home=tmp_path, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", **variables
        )
        assert "All is well." in said
