"""What is compiled is kept on disk until a source of it changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import xgpt
from xgpt.core.compiled_code import ROOMS, sources
from xrunner.cpu import decodes
from xsimulator.costs import step_tables

ROOT = Path(xgpt.__file__).parents[1]
COMMAND = "import os; {}; import numba; print(numba.config.CACHE_DIR == os.environ['NUMBA_CACHE_DIR'], end='')"


@pytest.mark.parametrize("module", [decodes, step_tables])
def test_code_is_compiled_anew_where_a_helper_in_another_file_has_changed(
    monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    before, read = sources(), Path.read_bytes
    changed = Path(module.__file__)  # type: ignore[attr-defined]
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"# changed" if path == changed else b""))
    assert sources() != before


def test_nothing_is_compiled_outside_the_rooms_that_are_looked_at() -> None:
    for package in ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner"):
        for file in (ROOT / package).rglob("*.py"):
            if "njit" in file.read_text():
                assert file.relative_to(ROOT).as_posix().startswith(ROOMS), file


@pytest.mark.parametrize("first", ["import xrunner.cpu.panels", "import xsimulator", "import numba, xsimulator"])
def test_numba_keeps_its_code_there(tmp_path: Path, first: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-c", COMMAND.format(first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "True"
    assert len(list((tmp_path / "xgpt" / "compiled").iterdir())) == 1


def test_a_directory_that_the_user_names_is_taken(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "import os, xsimulator; print(os.environ['NUMBA_CACHE_DIR'], end='')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == str(tmp_path)
