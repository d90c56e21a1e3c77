"""What the command line does while a user types: suggestions, completion, and a look at the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from tests.cli.commands import Xgpt
from xgpt.cli import COMMANDS, commands


def test_a_misspelt_command_is_told_the_nearest(xgpt: Xgpt) -> None:
    assert "Did you mean 'plan'?" in xgpt.fails(2, "plna")
    assert "Did you mean --latency-bound?" in xgpt.fails(2, "plan", "--latency-bund", "3")
    assert "It is one of `xgpt fleet`." in xgpt.fails(2, "plan", "--attain", "0.99")
    assert "There are plan, fleet, profile," in xgpt.fails(2, "zzz")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script(shell: str, xgpt: Xgpt) -> None:
    ran = xgpt("completion", shell)
    assert ran.code == 0 and f"_XGPT_COMPLETE={shell}_complete" in ran.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("xgpt pl", "plain,plan"),
        ("xgpt plan --latency", "plain,--latency-bound"),
        ("xgpt plan --model llama-3.1-7", "plain,llama-3.1-70b"),
        ("xgpt plan --workload azure-co", "plain,azure-conv"),
    ],
)
def test_words_are_completed(words: str, expected: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_XGPT_COMPLETE": "bash_complete"}
    answer = subprocess.check_output([sys.executable, "-m", "xgpt"], env=os.environ | asked, text=True)
    assert expected in answer.splitlines()


def test_doctor_tells_of_the_machine(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGPT_VLLM_PYTHON", "/no/such/python")
    ran = xgpt("doctor", "--json")
    assert ran.code == 0
    found = {finding["name"]: finding for finding in json.loads(ran.out)}
    assert "torch" in found["versions"]["value"] and "GiB" in found["devices"]["value"]
    assert "none measured" in found["profiles"]["value"]
    assert "/no/such/python is not a program" in found["vLLM"]["advice"]
    assert {name: finding["value"] for name, finding in found.items()}.keys() <= {
        line.split("  ")[0] for line in xgpt("doctor").out.splitlines()
    }


def test_every_option_has_a_help_text() -> None:
    for name in COMMANDS:
        command = getattr(commands, name)
        silent = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
        assert not silent, f"xgpt {name}: {silent}"
