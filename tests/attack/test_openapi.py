"""What /openapi.json says, held by schemathesis: requests of every shape that it allows and of many that it does not.

schemathesis stands in an environment of its own, which `make attack` makes: its plugin would load with every test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.client import ADMIN_KEY
from tests.attack.target import FAKE_VLLM, FLAVOURS, REAL_VLLM, VLLM, attacked

PROGRAM = os.environ.get("XGPT_SCHEMATHESIS") or shutil.which("schemathesis", path=Path(sys.executable).parent)
"""What runs it: named, or next to this Python."""

SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", "504"]
"""
"""A deadline of 1e-300 s is one that no answer keeps."""

CASES = [
    ("one", "coverage", 50),
    ("one", "fuzzing", 50),
    *((flavour, "fuzzing", 20) for flavour in (*FLAVOURS, FAKE_VLLM) if flavour != "one"),
    pytest.param(VLLM, "fuzzing", 20, marks=REAL_VLLM.marks),
]
"""Placements, a phase, and examples of each operation. The front checks requests before any engine sees them, so one
device gets all of them, which take minutes, and the other placements some."""

CHECKS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance")
"""Fields that contradict each other, and prompts that do not fit, are refused: a schema cannot say so."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.point(2)
@pytest.mark.skipif(PROGRAM is None, reason="needs schemathesis: name its program in XGPT_SCHEMATHESIS")
@pytest.mark.parametrize(("flavour", "phase", "num_examples"), CASES)
def test_answers_keep_to_the_schema(
    flavour: str,
    phase: str,
    num_examples: int,
    checkpoint: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Status, type and shape of each; no error of the server's, no answer that does not come, none without the key."""
    assert PROGRAM is not None
    (tmp_path / "settings.toml").write_text(SETTINGS)
    with attacked(flavour, checkpoint, tmp_path, "--request-timeout", "30", "--max-max-tokens", "64") as target:
        before = target.probe()
        command = [PROGRAM, "--config-file", "settings.toml", "run", f"{target.url}/openapi.json", *CHECKS]
        command += ["--header", f"Authorization: Bearer {ADMIN_KEY}", "--phases", phase, "--seed", "1"]
        command += [
            f"--max-examples={num_examples}",
            "--continue-on-failure",
            "--request-timeout",
            "45",
            "--workers",
            "2",
        ]
        command += ["--report", "ndjson", "--report-ndjson-path", "cases.ndjson", "--no-color"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stdout[-8000:]
        (counted,) = (line.strip() for line in ended.stdout.splitlines() if " generated, " in line)
        record_property("case", "answers keep to the schema")
        record_property("flavour", flavour)
        record_property("note", f"{phase}: {counted}")
        assert json.loads(target.ask("GET", "/openapi.json")[1])["components"]["securitySchemes"]
        assert target.probe() == before
        assert not [line for line in target.served.lines if '"traceback"' in line]
