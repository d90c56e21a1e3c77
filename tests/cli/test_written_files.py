"""No command writes over a file that it reads, or over any file that xgpt did not write; each written file is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import click
import pytest

from tests.cli.commands import PROBLEM, Xgpt
from xgpt.cli import COMMANDS, commands
from xgpt.cli.options import WRITTEN
from xgpt.core.errors import InputError
from xgpt.core.output_files import OutputFile, check_step_log, is_recorded, record

NEEDED = {
    "plan": ("--latency-bound", "8"),
    "fleet": ("--latency-bound", "8", "--trace", "day.csv"),
    "profile": (),
    "simulate": ("plan.json",),
    "compare": ("--latency-bound", "8", "--current", "vllm serve m"),
    "serve": ("plan.json", "--dry-run"),
    "bench": ("plan.json",),
    "tune": ("--current", "vllm serve m", "--ttft", "1"),
    "calibrate": ("plan.json", "result.json"),
    "replan": ("plan.json", "--lengths", "day.csv"),
    "report": ("plan.json",),
    "export": ("plan.json", "--to", "shell"),
}
"""What each command that writes files must be given."""


def options_of(command: str) -> Iterator[click.Parameter]:
    yield from getattr(commands, command).params


def is_path(parameter: click.Parameter) -> bool:
    """Return whether a parameter takes a path: its metavar says so, or it takes shipped names or paths."""
    name = parameter.name or ""
    takes = (parameter.metavar or "").upper()
    return any(word in takes for word in ("FILE", "DIR", "FOLDER", "JSON", "CSV", "NAME.")) or name in (
        "model", "cluster", "workload", "engine", "among", "current",
    )  # fmt: skip


CASES = [
    (command, written, read)
    for command in NEEDED
    for written in options_of(command)
    if written.name in WRITTEN and command not in ("serve", "export")
    for read in options_of(command)
    if is_path(read) and read.name not in WRITTEN and not isinstance(read.type, click.Choice)
]


def words(parameter: click.Parameter, value: str) -> list[str]:
    return [value] if isinstance(parameter, click.Argument) else [max(parameter.opts, key=len), value]


def test_every_command_that_writes_is_tried() -> None:
    writing = {name for name in COMMANDS if any(option.name in WRITTEN for option in options_of(name))}
    assert writing == set(NEEDED)
    assert len(CASES) > 30


def test_one_name_has_one_direction() -> None:
    """A name of an option that is written by one command is read by none."""
    reads = {opt for name in COMMANDS for one in options_of(name) if one.name not in WRITTEN for opt in one.opts}
    writes = {opt for name in COMMANDS for one in options_of(name) if one.name in WRITTEN for opt in one.opts}
    assert not reads & writes


@pytest.mark.parametrize("command,written,read", CASES, ids=lambda case: getattr(case, "name", case))
def test_what_is_read_is_not_written(xgpt: Xgpt, command: str, written: click.Parameter, read: click.Parameter) -> None:
    """Even a file of xgpt's own is kept, under another name of the same file, too."""
    Path("mine.json").write_text("the only copy")
    record(Path("mine.json"))
    Path("link.json").symlink_to("mine.json")
    needed = list(NEEDED[command])
    if isinstance(read, click.Argument):
        needed = needed[1:]
    value = "mine.json=2" if read.name == "among" else "mine.json"
    for output in ("mine.json", "./link.json"):
        said = xgpt.fails(2, command, *needed, *words(read, value), *words(written, output))
        assert f"{max(written.opts, key=len)}: '{Path(output)}' is not accepted; this command reads" in said
        assert Path("mine.json").read_text() == "the only copy"


@pytest.mark.parametrize("command", [name for name in NEEDED if name not in ("serve", "export")])
def test_a_foreign_file_is_kept(xgpt: Xgpt, command: str) -> None:
    written = next(option for option in options_of(command) if option.name in WRITTEN)
    Path("mine.json").write_text("the only copy")
    said = xgpt.fails(2, command, *NEEDED[command], *words(written, "mine.json"))
    assert (
        "xgpt did not write that file, or it was changed since; give another file, or --force to overwrite it" in said
    )
    assert Path("mine.json").read_text() == "the only copy"


def test_no_file_is_named_like_standard_output(xgpt: Xgpt) -> None:
    assert "--json" in xgpt.fails(2, "plan", "--latency-bound", "8", "-o", "-")


def test_xgpt_overwrites_what_it_wrote_until_it_is_changed(xgpt: Xgpt) -> None:
    plan = ("plan", "--latency-bound", "8", *PROBLEM, "--policy", "orca", "--objective", "saturated")
    for _ in range(2):
        ran = xgpt(*plan)
        assert ran.code == 0 and "wrote plan.json\n" in ran.err
    Path("plan.json").write_text(Path("plan.json").read_text() + " ")
    assert "changed since" in xgpt.fails(2, *plan)
    assert xgpt(*plan, "--force").code == 0
    assert xgpt(*plan).code == 0

    day = "timestamp,input,output\n" + "".join(f"{second},200,50\n" for second in range(600))
    Path("day.csv").write_text(day)
    assert "--timeline" in xgpt.fails(2, "simulate", "plan.json", "--timeline", "day.csv")
    assert "No such option '--trace'. These commands have it: `xgpt fleet`." in xgpt.fails(
        2, "simulate", "plan.json", "--trace", "day.csv"
    )
    ran = xgpt("simulate", "plan.json", "--requests", "100", "--timeline", "steps.json")
    assert ran.err == "wrote steps.json\n" and json.loads(Path("steps.json").read_text())
    ran = xgpt("replan", "plan.json", "--lengths", "day.csv", "-o", "plan.json", "--force", "--json")
    assert (ran.code, ran.err) == (0, "wrote plan.json\n")
    ran = xgpt("report", "plan.json")
    assert (ran.code, ran.err) == (0, "wrote report.html\n")
    assert Path("day.csv").read_text() == day

    Path("serve.sh").write_text("echo mine")
    export = ("export", "plan.json", "--to", "shell")
    assert "'serve.sh' is not accepted" in xgpt.fails(2, *export)  # plan.json itself would be written as it is
    assert Path("serve.sh").read_text() == "echo mine"
    assert [xgpt(*export, "-o", "deploy").code for _ in range(2)] == [0, 0]


def test_a_plan_shows_by_itself_that_xgpt_wrote_it(xgpt: Xgpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container or home, there is no record of it."""
    plan = ("plan", "--latency-bound", "8", *PROBLEM, "--policy", "orca", "--objective", "saturated")
    assert xgpt(*plan).code == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert not is_recorded(Path("plan.json"))
    assert xgpt(*plan).code == 0
    text = Path("plan.json").read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    for edited in (
        text.replace('"max_batch": ', '"max_batch": 1'),
        text.replace("requests", "Requests", 1),
        text + " ",
    ):
        Path("plan.json").write_text(edited)
        assert edited != text and "changed since" in xgpt.fails(2, *plan)
    Path("plan.json").write_text(text)
    assert xgpt(*plan).code == 0


def test_a_step_log_replaces_only_a_step_log(xgpt: Xgpt, plan: Path) -> None:
    before = plan.read_bytes()
    for read in options_of("serve"):
        if is_path(read) and read.name not in WRITTEN and not isinstance(read, click.Argument) and read.metavar:
            said = xgpt.fails(2, "serve", "plan.json", *words(read, "plan.json"), "--step-log", "plan.json")
            assert "--step-log: 'plan.json' is not accepted; that file is not a step log; give another" in said
            assert plan.read_bytes() == before
    check_step_log(plan, force=True)
    Path("empty.jsonl").touch()
    check_step_log(Path("empty.jsonl"))


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is written to and stays one; a file that appears during the work is kept; records are by path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    OutputFile(Path("/dev/null")).write("text")
    assert Path("/dev/null").is_char_device()
    file = OutputFile(tmp_path / "late.json")
    file.check()
    file.path.write_text("the only copy")
    with pytest.raises(InputError, match="xgpt did not write that file"):
        file.write("text")
    mine = OutputFile(tmp_path / "a.json")
    mine.write("text")
    mine.path.rename(tmp_path / "b.json")
    assert not is_recorded(tmp_path / "b.json")
    assert not list(tmp_path.glob(".*"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    OutputFile(tmp_path / "c.json").write("text")
    with pytest.raises(InputError, match="xgpt did not write that file"):
        OutputFile(tmp_path / "c.json").write("other")


def test_a_file_below_a_thousand_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = OutputFile(tmp_path / Path("a/" * 1_100) / "plan.json")
    file.write("text")
    assert file.path.read_text() == "text"
    run(["rm", "-rf", tmp_path / "a"], check=True)  # shutil.rmtree calls itself for each directory
