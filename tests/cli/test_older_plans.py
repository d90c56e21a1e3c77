"""A plan is simulated with the profile that it was made from, although profiles have gained a field since."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from pydantic_core import to_json

from tests.cli.commands import PROBLEM, Xgpt
from xgpt.core.io import cache_dir


@pytest.fixture
def older(xgpt: Xgpt) -> str:
    """Write plan.json and profile.json as a version without the field `devices_per_node` would have; return the hash of
    that profile."""
    assert xgpt("profile", *PROBLEM[:4], "-o", "profile.json").code == 0
    assert xgpt("plan", "--latency-bound", "4", *PROBLEM, "--policy", "orca", "--profile", "profile.json").code == 0
    profile, plan = json.loads(Path("profile.json").read_text()), json.loads(Path("plan.json").read_text())
    del profile["devices_per_node"]
    plan["profile"]["sha256"] = hashlib.sha256(to_json(profile)).hexdigest()
    Path("profile.json").write_text(json.dumps(profile))
    Path("plan.json").write_text(json.dumps(plan))
    return str(plan["profile"]["sha256"])


def test_its_profile_is_found_in_the_cache(xgpt: Xgpt, older: str) -> None:
    kept = cache_dir() / "profiles" / f"{older}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy("profile.json", kept)
    assert xgpt("simulate", "plan.json", "--requests", "20").code == 0


def test_its_profile_is_given(xgpt: Xgpt, older: str) -> None:
    assert xgpt("simulate", "plan.json", "--profile", "profile.json", "--requests", "20").code == 0


def test_another_profile_is_refused(xgpt: Xgpt, older: str) -> None:
    other = json.loads(Path("profile.json").read_text()) | {"spread": 0.25}
    Path("other.json").write_text(json.dumps(other))
    error = xgpt.fails(2, "simulate", "plan.json", "--profile", "other.json")
    assert "the plan was made from" in error
