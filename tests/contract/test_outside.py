"""No copy of plan.json with other settings serves more, through `xgpt simulate`, than the plan says is possible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.outside import attack, attack_outside, edited, planned
from tests.rings import few

MEMORY_BINDS = (
    "--model opt-13b --cluster a40x4 --workload summarization --policy rra --objective saturated --headroom 0 "
    "--latency-bound 11.5"
)


def test_the_ceiling_covers_settings_that_keep_memory_full(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = planned(path, MEMORY_BINDS.split()) or pytest.fail("the problem has a plan")
    assert plan["search"]["gap"] < 0.06
    settings = ({"encode_batch": 9, "decode_iterations": 6}, {"encode_batch": 20, "decode_iterations": 12})
    assert attack(path, plan, (edited(plan, **other) for other in settings)).excess == 0
    assert attack(path, plan, iter([edited(plan, **settings[0])]), scale=0.9).excess > 0, "the attack sees no excess"


@pytest.mark.parametrize("number", few(range(3)))
def test_random_problems(number: int) -> None:
    found = attack_outside(np.random.default_rng((1, number)))
    assert found is None or not found.excess, found
