"""A plan that version 0.1 made is simulated by this one, with the profile that it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cli.commands import Xgpt
from xgpt.core.io import cache_dir

FILES = Path(__file__).parent / "version_0_1"


def test_its_profile_is_found_in_the_cache(xgpt: Xgpt) -> None:
    kept = cache_dir() / "profiles" / f"{json.loads((FILES / 'plan.json').read_text())['profile']['sha256']}.json"
    kept.parent.mkdir(parents=True)
    shutil.copy(FILES / "profile.json", kept)
    assert xgpt("simulate", str(FILES / "plan.json"), "--requests", "20").code == 0


def test_its_profile_is_given(xgpt: Xgpt) -> None:
    ran = xgpt("simulate", str(FILES / "plan.json"), "--profile", str(FILES / "profile.json"), "--requests", "20")
    assert ran.code == 0


def test_another_profile_is_refused(xgpt: Xgpt, tmp_path: Path) -> None:
    other = json.loads((FILES / "profile.json").read_text())
    other["spread"] = 0.25
    (tmp_path / "other.json").write_text(json.dumps(other))
    error = xgpt.fails(2, "simulate", str(FILES / "plan.json"), "--profile", str(tmp_path / "other.json"))
    assert "the plan was made from" in error
