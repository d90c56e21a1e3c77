"""What the command line does while a user types: suggestions, completion, and a look at the machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import jsonschema
import pytest
from click.shell_completion import ShellComplete

from tests.cli.commands import Xgpt, once
from tools.make_schema import FOLDER
from xgpt.cli import COMMANDS, GROUPS, cli, commands, in_options


def test_a_misspelt_command_is_told_the_nearest(xgpt: Xgpt) -> None:
    assert "Did you mean plan?" in xgpt.fails(2, "plna")
    assert "Did you mean --latency-bound?" in xgpt.fails(2, "plan", "--latency-bund", "3")
    assert "Did you mean" not in xgpt.fails(2, "plan", "--latency-bound", "3", "--gpy", "4")
    assert "Give --fix tp=N." in xgpt.fails(2, "plan", "--latency-bound", "3", "--tensor-parallel-size", "8")
    asked = ("plan", "--latency-bound", "3", "--cluster")
    assert "did you mean h200x1 or h200x32 or h200x8? Otherwise give a path or one of" in xgpt.fails(2, *asked, "H200")
    assert "These commands have it: `xgpt fleet`." in xgpt.fails(2, "plan", "--attain", "0.99")
    assert "The commands are plan, check, serve, export, " in xgpt.fails(2, "zzz")


def test_the_first_page_has_four_verbs_and_the_rest_by_group(xgpt: Xgpt) -> None:
    page = xgpt("--help").out
    first = [name for name in GROUPS[""] if name in COMMANDS]
    head, _, more = page.partition("More (xgpt COMMAND --help):")
    assert [line.split()[0] for line in head.partition("Commands:")[2].splitlines() if re.match(r"  \w", line)] == first
    assert all(name in more for name in COMMANDS if name not in first) and len(page.splitlines()) < 35
    for option in ("--sla", "--maximise", "--order", "--search"):
        page = xgpt("plan", "--help").out
        assert page.index("Research options:") < page.index(f"  {option} ")


def test_an_error_about_a_flag_shows_no_value() -> None:
    says = in_options("reuse: False is not accepted; give `port=1`", commands.serve.params)
    assert says == "--no-reuse is not accepted; give --port 1"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script(shell: str, xgpt: Xgpt) -> None:
    ran = xgpt("completion", shell)
    assert ran.code == 0 and f"_XGPT_COMPLETE={shell}_complete" in ran.out


def test_words_are_completed() -> None:
    asked = {"COMP_WORDS": "xgpt pl", "COMP_CWORD": "1", "_XGPT_COMPLETE": "bash_complete"}
    answer = subprocess.check_output([sys.executable, "-m", "xgpt"], env=os.environ | asked, text=True)
    assert "plain,plan" in answer.splitlines()
    completes = ShellComplete(cli, {}, "xgpt", "_XGPT_COMPLETE")
    for begun, expected in (
        ("plan --latency", "--latency-bound"),
        ("plan --model llama-3.1-7", "llama-3.1-70b"),
        ("plan --workload azure-co", "azure-conv"),
    ):
        *before, last = begun.split()
        assert expected in [item.value for item in completes.get_completions(before, last)]


def test_doctor_tells_of_the_machine(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGPT_VLLM_PYTHON", "/no/such/python")
    once(monkeypatch, "doctor")
    ran = xgpt("doctor", "--json")
    assert ran.code == 0
    jsonschema.validate(json.loads(ran.out), json.loads((FOLDER / "doctor.json").read_text()))
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("plan --latency-bound 3 --dtype fp8", "did you mean float8?"),
        ("plan --latency-bound 3 --quantile 99", "it is a share: 0.99 for 99%"),
        ("plan --latency-bound 3 --headroom 5", "it is a share: 0.99 for 99%"),
        ("plan --latency-bound 3 --cluster h100x1 --devices 3", "h100x1 has 1: give auto, a smaller"),
        ("plan --latency-bound 3 --model x.json", "it has neither model_type, as a config.json has, nor name"),
        ("bench localhost:8000", "a URL begins with http://"),
        ("replan plan.json", "Missing option '--lengths'; `xgpt replan --help` has an example"),
        ("replan plan.json --workload x.csv", "No such option '--workload'. Give --lengths."),
        ("fleet --trace day.csv --quantile 0.9", "No such option '--quantile'. Give --attain."),
        ("fleet log.csv", "Missing option"),
        ("report plan.json x", "Got unexpected extra argument (x); `xgpt report --help` has an example"),
    ],
)
def test_mistakes_are_told_the_way_out(xgpt: Xgpt, arguments: str, says: str) -> None:
    Path("x.json").write_text('{"x": 1}')
    assert says in xgpt.fails(2, *arguments.split())


def test_a_config_is_a_model(xgpt: Xgpt) -> None:
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 32768}
    Path("config.json").write_text(json.dumps(config))
    asked = ("plan", "--latency-bound", "inf", "--objective", "saturated", "--model", "config.json")
    assert xgpt(*asked, "--cluster", "h200x1", "--workload", "azure-conv").code == 0


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_closed_standard_streams_are_open_in_what_is_started(closed: tuple[int, ...]) -> None:
    """A server without standard error never answered: its engine had none either, and ended at once."""
    code = """if True:
        import subprocess, sys
        from xgpt.cli import set_up_process
        set_up_process()
        child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
        sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)"""

    def close() -> None:
        for number in closed:
            os.close(number)

    assert subprocess.run([sys.executable, "-c", code], preexec_fn=close, check=False).returncode == 0
