"""Files of strangers: none takes all memory, ends in an internal error, or commands the terminal."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from xgpt.checkpoints import files
from xgpt.cli import cli, main
from xgpt.core import io
from xgpt.core.errors import InputError

DOUBLED = "a0: &a0 {x: y}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))
LENGTHS = "input: {{kind: uniform, min: 1, max: {}}}\noutput: {{kind: uniform, min: 1, max: 2}}\n"
PLAN = ["plan", "--model", "llama-3.1-8b", "--cluster", "h200x1", "--latency-bound", "8", "--objective", "saturated"]


def workload(directory: Path, text: str) -> list[str]:
    path = directory / "w.yaml"
    path.write_text(text)
    return [*PLAN, "--workload", str(path), "-o", str(directory / "plan.json")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: " + "[" * 20_000 + "]" * 20_000, "nests too deeply"),
        ("a: &a {b: *a}", "contains itself"),
        (DOUBLED, "over 250,000 values"),
        ("name: x\nsource: here\n" + LENGTHS.format(2**31), "at most 1048576 lengths"),
    ],
)
def test_files_that_would_take_all_memory_or_the_stack(text: str, says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, workload(tmp_path, text))
    assert isinstance(result.exception, InputError)
    assert says in str(result.exception)


@pytest.mark.parametrize("option", ["--workload", "--model x/y --config", "--cluster", "--model"])
def test_a_pipe_to_which_nothing_is_written(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waited for ever."""
    monkeypatch.setattr(io, "PIPE_S", 0.1)
    os.mkfifo(tmp_path / "pipe.yaml")
    result = CliRunner().invoke(cli, [*PLAN, *option.split(), str(tmp_path / "pipe.yaml")])
    assert isinstance(result.exception, InputError)
    assert "nothing was written to this pipe" in str(result.exception)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")

    def write() -> None:
        with (tmp_path / "pipe.yaml").open("w") as pipe:
            for part in ("name: x\nsource: here\n", LENGTHS.format(100)):
                time.sleep(0.2)
                pipe.write(part)
                pipe.flush()

    with ThreadPoolExecutor(1) as apart:
        apart.submit(write)
        assert io.load_yaml(tmp_path / "pipe.yaml", "workload")["output"]["max"] == 2


def test_names_command_no_terminal(tmp_path: Path) -> None:
    """Brackets were taken for markup, and ended in an internal error; an escape sequence reached the terminal."""
    name = "[red]x[/nothing] \x1b[31m :smile:"
    text = f"name: {json.dumps(name)}\nsource: here\n" + LENGTHS.format(100)
    asked = [*workload(tmp_path, text), "--policy", "orca"]
    assert "\x1b" not in CliRunner().invoke(cli, asked).output
    result = CliRunner().invoke(cli, [*asked, "--explain"])  # only the explanation names the workload
    assert result.exit_code == 0, result.exception
    assert "\x1b" not in result.output
    assert "[red]x[/nothing] \\x1b[31m :smile:" in result.output


def test_a_header_of_five_gibibytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file has any length, and takes no place."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 5 << 30))
        file.truncate((5 << 30) + 8)
    assert list(files._headers(tmp_path)) == [""]


@pytest.mark.parametrize(
    ("name", "code", "says"), [("n" * 300, 3, "File name too long"), ("\udcff.json", 2, "is not text in UTF-8")]
)
def test_names_that_no_file_has(name: str, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They were internal errors."""
    with pytest.raises(SystemExit) as end:
        main([*PLAN, "-o", name])
    assert end.value.code == code
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(("words", "streams", "code"), [("--version", "1>", 3), ("plan --nothing", "2>", 2)])
def test_a_full_standard_stream(words: str, streams: str, code: int) -> None:
    """A full disk behind standard output was an internal error."""
    done = subprocess.run(
        f"{sys.executable} -m xgpt {words} {streams}/dev/full",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert code == 2 or done.stderr == "xgpt: cannot read or write: No space left on device\n"
