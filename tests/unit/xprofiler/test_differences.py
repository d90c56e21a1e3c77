"""One line says how a machine differs from what it was when it was profiled."""

from __future__ import annotations

import pytest

from tests.contract.scenarios import problem
from xgpt.core.machine import num_cores
from xprofiler import others
from xprofiler.others import differences

PROFILE = problem("opt-125m", "v100x1", "summarization").profile.model_copy(update={"gflops": 200.0})


@pytest.mark.parametrize(
    ("rate", "taken", "words"),
    [
        (205.0, 0.05, []),
        (120.0, 0.05, ["it computed 200 GFLOP/s and now computes 120"]),
        (240.0, 0.0, ["now computes 240"]),
        (200.0, 0.6, ["other processes used 0 of its 2 cores and now use 0.6"]),
        (120.0, 1.0, ["now computes 120", "now use 1"]),
    ],
)
def test_what_differs_is_said(rate: float, taken: float, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("gflops", rate), ("cores_taken", taken), ("num_cores", 2)):
        monkeypatch.setattr(others, name, lambda value=value: value)
    line = differences(PROFILE)
    assert (line is None) == (not words)
    assert all(word in (line or "") for word in words)


def test_a_profile_that_does_not_say_is_not_compared() -> None:
    assert differences(PROFILE.model_copy(update={"gflops": None})) is None


def test_the_rate_is_measured() -> None:
    assert 0.1 < others.gflops() < 1e5 * num_cores()
