"""What is compiled is kept on disk until a source of it changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import xgpt
from tests.rings import ALL, few
from xgpt.core import compiled_code, compiled_files
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


@pytest.mark.parametrize("first", few(["import numba, xsimulator", "import xsimulator", "import xrunner.cpu.panels"]))
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


def test_installations_with_equal_sources_share_their_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each clone and each environment compiled all runs and kernels anew, a minute of a core."""
    found, of_others = set(), set()
    for root in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr(compiled_files, "ROOT", root)
        (root / "xrunner" / "cpu").mkdir(parents=True)
        file = root / "xrunner" / "cpu" / "threads.py"
        file.write_text("1")
        os.utime(file, (root.name == "a", 1))
        locator = compiled_files.Locator(run, str(file))
        found.add((locator.get_cache_path(), locator.get_source_stamp()))
        of_others.add(compiled_files.Locator.get_suitable_cache_subpath(str(root / "other" / "threads.py")))
    assert len(found) == 1 and len(of_others) == 2, "what other packages compile may differ with what they call"
    file.write_text("2")
    assert locator.get_source_stamp() not in {stamp for _, stamp in found}


FUNCTION = """
from numba import njit
@njit(cache=True)
def twice(x):
    return 2 * x
"""
RUN = """
import sys
from xgpt.core.compiled_code import set_directory
set_directory()
sys.path.insert(0, sys.argv[1])
import compiled
print(compiled.twice(21), end="")
"""


def run(directory: Path, cache: Path) -> tuple[str, str]:
    """Return what a process that runs a compiled function prints, and its warnings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    (directory / "compiled.py").write_text(FUNCTION)
    command = [sys.executable, "-c", RUN, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
def test_code_that_was_cut_short_is_compiled_anew(tmp_path: Path) -> None:
    """One such file ended every command until someone deleted it."""
    cache = tmp_path / "cache"
    assert run(tmp_path, cache) == ("42", "")
    files = [file for file in cache.rglob("*.nb[ic]") if "twice" in file.name]
    assert len(files) == 2
    wholes = [file.read_bytes() for file in files]
    cuts = [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"no pickle"]
    for i, cut in enumerate(cuts if ALL else cuts[:1]):
        for file, whole in list(zip(files, wholes, strict=True))[slice(None) if ALL else slice(i, i + 1)]:
            file.write_bytes(cut(whole))
            answer, said = run(tmp_path, cache)
            assert answer == "42" and str(file) in said and len(said.splitlines()) == 1
            assert file.read_bytes() == whole or file.suffix == ".nbc"
    assert run(tmp_path, cache) == ("42", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("owned", few(["files", "directory"]))
def test_code_of_another_user_is_not_run(owned: str, tmp_path: Path) -> None:
    """What lies in the directory is unpickled, and so run: XDG_CACHE_HOME may point anywhere."""
    ran = tmp_path / "ran"
    evil = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    cache = tmp_path / owned
    run(tmp_path, cache)
    for file in cache.rglob("*.nb[ic]"):
        file.write_bytes(evil)
        os.chown(file, 65534, 65534)
    if owned == "directory":
        os.chown(cache / "xgpt" / "compiled", 65534, 65534)
    answer, said = run(tmp_path, cache)
    assert answer == "42" and "belongs to another user" in said and str(cache) in said
    assert not ran.exists()


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, and no directory")
    answer, said = run(tmp_path, tmp_path / "cache")
    assert answer == "42" and "cannot be written" in said


def test_only_its_owner_writes_to_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in (tmp_path / "cache" / "xgpt", tmp_path / "cache" / "xgpt" / "compiled"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    assert compiled_code._directory().is_relative_to(tmp_path)
    assert not any(path.stat().st_mode & 0o022 for path in (tmp_path / "cache").rglob("*"))
