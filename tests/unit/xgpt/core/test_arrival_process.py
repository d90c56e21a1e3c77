"""When requests arrive: one rate, stages of rates, bursts."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.errors import InputError
from xgpt.core.workload import ArrivalProcess


def times(process: ArrivalProcess, n: int, share: float = 1.0) -> np.ndarray:
    return process.times(n, np.random.default_rng(0), share)


def test_each_stage_has_its_own_rate() -> None:
    process = ArrivalProcess.at([(10.0, 100.0), (100.0, 50.0), (5.0, None)])
    found = times(process, 8000)
    assert np.sum(found < 100) == pytest.approx(1000, rel=0.1)
    assert np.sum((found >= 100) & (found < 150)) == pytest.approx(5000, rel=0.05)
    assert np.mean(np.diff(found[found > 150])) == pytest.approx(1 / 5, rel=0.1)
    assert process.num_requests is None
    assert process.mean_rate(6000) == pytest.approx(6000 / 150)


def test_stages_with_an_end_say_how_many_requests_they_are() -> None:
    process = ArrivalProcess.at([(2.0, 60.0), (8.0, 30.0)])
    assert process.num_requests == 360
    assert np.diff(times(process, 5000))[-1000:].mean() == pytest.approx(1 / 8, rel=0.1)  # the last rate goes on


def test_a_replica_has_its_share_of_every_stage() -> None:
    found = times(ArrivalProcess.at([(10.0, 100.0), (100.0, None)]), 3000, share=0.5)
    assert np.sum(found < 100) == pytest.approx(500, rel=0.15)


@pytest.mark.parametrize("rates", [[(0.0, None)], [(1.0, -2.0)], [(1.0, None), (2.0, None)], [], float("nan")])
def test_what_is_no_process_is_refused(rates: list[tuple[float, float | None]]) -> None:
    with pytest.raises(InputError, match="arrival_rate_per_s"):
        ArrivalProcess.at(rates)
