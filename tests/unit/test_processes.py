"""Tests that run in several processes are reported as if one had run them, and a process that dies is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    "one": """
def test_passes(tmp_path):
    assert "process-" in str(tmp_path)

def test_fails():
    print("said")
    assert 1 == 2
""",
    "two": """
import os

def test_dies():
    os._exit(7)

def test_later():
    pass
""",
    "three": """
import pytest

def test_skips():
    pytest.skip("why")

@pytest.mark.parametrize("n", range(9))
def test(n):
    pass
""",
}


def test_each_test_is_reported_and_a_process_that_dies_is_a_failure(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "-p", "tests.processes", "--processes", "2", "-p", "no:cacheprovider"]
    command += ["-c", str(tmp_path / "pytest.ini"), f"--rootdir={tmp_path}", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "2 failed, 10 passed, 1 skipped" in ran.stdout
    assert "its process ended with 7; the rest of the file did not run" in ran.stdout
    assert "assert 1 == 2" in ran.stdout and "said" in ran.stdout
