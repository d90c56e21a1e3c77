"""A day in intervals, and the load factor: the day, simulated, says how many replicas a load takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xgpt.core.errors import InfeasibleError
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_model
from xscheduler.fleet import planning
from xscheduler.fleet.day_load import Day, cut
from xscheduler.fleet.replica_counts import FleetProblem, solve_fleet
from xscheduler.fleet.replica_kinds import WORTH, candidates
from xsimulator.fleet import Requests


@pytest.mark.parametrize(
    ("seconds", "lengths"),
    [(110, [110]), (150, [100, 50]), (200, [100, 100]), (230, [100, 130]), (30, [30]), (200.001, [100, 100.001])],
)
def test_a_steady_load_is_as_high_in_a_last_interval_of_another_length(seconds: float, lengths: list[float]) -> None:
    arrivals_s = np.arange(0, seconds, 0.01)
    ones = np.ones(len(arrivals_s), int)
    found = cut(Day("day", Requests(ones, ones, arrivals_s), seconds), 100.0, load_model("llama-3.1-8b")[0])
    assert (found.of_requests == np.minimum(arrivals_s // 100, len(lengths) - 1)).all()
    assert found.seconds == pytest.approx(lengths)
    assert found.rates == pytest.approx([100.0] * len(lengths), rel=0.01)
    assert found.peaks == pytest.approx([100.0] * len(lengths), rel=0.01)


def test_a_trace_that_ends_with_its_last_request_is_a_whole_day() -> None:
    assert planning._day_s(86399.7, 86400, 900) == 86400
    assert planning._day_s(86000, 86400, 900) == 86000


def settled(monkeypatch: pytest.MonkeyPatch, enough: int) -> tuple[float, int]:
    """Return the load factor, and the replicas, of a load of 6.5 where `enough` replicas keep the share."""
    monkeypatch.setattr(planning, "share_kept", lambda model, share: share)
    simulated: Any = lambda replicas, interval_s: 1.0 if replicas.max() >= enough else 0.5  # noqa: E731
    model: Any = SimpleNamespace(day=SimpleNamespace(requests=range(10)), simulate=simulated)
    problem = FleetProblem(np.asarray([6.5]), np.ones((1, 1)), np.ones(1), np.ones(1), np.ones(1))
    factor, solution, _ = planning._settled(model, problem, solve_fleet(problem), 0.99, 60.0)
    return factor, int(solution.replicas[0, 0])


@pytest.mark.parametrize(("enough", "factor"), [(6, 0.9), (7, 1.0), (8, 1.125), (9, 1.2375)])
def test_the_factor_is_the_highest_of_those_that_come_to_the_fewest_replicas(
    monkeypatch: pytest.MonkeyPatch, enough: int, factor: float
) -> None:
    """A recommender that multiplied a growing load by a lower one would ask for the next replica too late."""
    assert settled(monkeypatch, enough) == (pytest.approx(factor), enough)


def test_a_share_that_no_factor_keeps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleError, match=r"only 50\.00% of the requests keep the bounds"):
        settled(monkeypatch, 10**6)


def test_a_constant_fleet_has_no_more_than_what_keeps_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It served the peak times the factor of a fleet that follows the load: 4 devices where 3 kept the bounds."""
    monkeypatch.setattr(planning, "share_kept", lambda model, share: share)
    constraint = SimpleNamespace(quantile=0.99)
    kind = SimpleNamespace(kind=SimpleNamespace(plan=SimpleNamespace(constraint=constraint)))
    simulated: Any = lambda replicas, interval_s: 1.0 if replicas.max() >= 7 else 0.5  # noqa: E731
    model: Any = SimpleNamespace(
        intervals=SimpleNamespace(peaks=np.asarray([6.5])), candidates=[kind], simulate=simulated
    )
    problem = FleetProblem(np.asarray([1.5 * 6.5]), np.ones((1, 1)), np.ones(1), np.ones(1), np.ones(1))
    found = planning._constant(model, problem, 60.0, "day")
    assert found is not None and found[0].replicas.tolist() == [[7]]
    monkeypatch.setattr(planning, "share_kept", lambda *_: 0.5)
    assert planning._constant(model, problem, 60.0, "day") is None


@pytest.mark.long
def test_a_replica_has_as_many_devices_as_serve_more_than_smaller_ones_together() -> None:
    """Six devices as three stages of two serve more than replicas of two and four: powers of two missed them."""
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "workload": "azure-conv", "engine": "vllm"}
    bounds = {"latency_bound_s": None, "ttft_s": 2.0, "tpot_s": 0.06, "quantile": 0.9}
    problem = resolve(plan_request(**asked, **bounds))
    found = candidates(problem, "auto", [problem.workload], 60.0)
    rates = {one.kind.num_devices: one.kind.rates_per_s[0] for one in found}
    assert 6 in rates
    together = [0.0]
    for size in range(1, 9):
        if size in rates:
            assert rates[size] > WORTH * max((together[n] + together[size - n] for n in range(1, size)), default=0.0)
        together.append(max(rates.get(n, 0.0) + together[size - n] for n in range(1, size + 1)))
