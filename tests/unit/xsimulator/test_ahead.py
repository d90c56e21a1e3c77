"""Scheduling ahead: a step is decided before the tokens of the one under way are known, on the simulated clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xgpt.core.policies import OneLane, Pool, Schedule, Step, lane_settings
from xgpt.core.schema import ChunkedSettings
from xgpt.core.schema.step_log import StepRecord
from xsimulator.events import SimulatedEngine, SimulatedRequest, replay

SECOND = 1_000_000_000


def schedule(*, ahead: bool, pool: Pool | None = None, max_batch: int = 8, budget: int = 64) -> OneLane:
    settings = lane_settings(ChunkedSettings(token_budget=budget, max_batch=max_batch), 0.0, 0.0)
    return OneLane(replace(settings, ahead=ahead), pool or Pool(1000, 16))


class Seconds:
    """Steps of a second, one behind the other."""

    def __init__(self) -> None:
        self.free_ns = 0

    def __call__(self, issue_ns: int, step: Step) -> int:
        self.free_ns = max(issue_ns, self.free_ns) + SECOND
        return self.free_ns


def run(rule: Schedule, requests: list[SimulatedRequest]) -> list[StepRecord]:
    return SimulatedEngine(rule, Seconds(), requests).run()


def first_token_s(log: list[StepRecord], id_: int) -> float:
    return next(r.end_ns for r in log if any(chunk.id == id_ for chunk in r.encode)) / SECOND


@pytest.mark.parametrize(("ahead", "first_s"), [(False, 4.0), (True, 5.0)])
def test_an_arrival_waits_for_the_step_that_is_decided_already(ahead: bool, first_s: float) -> None:
    requests = [SimulatedRequest(0, 8, 20, 20), SimulatedRequest(1, 8, 20, 3, int(2.5 * SECOND))]
    assert first_token_s(run(schedule(ahead=ahead), requests), 1) == first_s


def test_a_request_that_ends_early_has_a_row_in_one_step_more() -> None:
    requests = [SimulatedRequest(0, 8, 20, 20), SimulatedRequest(1, 8, 20, 3)]
    log = run(schedule(ahead=True), requests)
    rows = [n for n, record in enumerate(log) if 1 in record.decode]
    ended = next(n for n, record in enumerate(log) if 1 in record.finished)
    assert rows == [1, 2, 3] and ended == 2
    assert [record.finished for record in log if record.finished] == [(1,), (0,)]
    assert sum(0 in record.decode for record in log) == 19, "its maximum is known"


def test_a_freed_place_is_taken_a_step_later() -> None:
    requests = [SimulatedRequest(i, 8, 20, 3) for i in range(2)]
    begins = {}
    for ahead in (False, True):
        log = run(schedule(ahead=ahead, max_batch=1), requests)
        begins[ahead] = next(n for n, record in enumerate(log) if any(chunk.id == 1 for chunk in record.encode))
    assert begins == {False: 3, True: 4}


def test_where_memory_runs_out_nothing_is_decided_ahead() -> None:
    """No request of the step under way could be preempted."""
    pool = Pool(12, 16, kv="quantile", max_running=6)
    requests = [SimulatedRequest(i, 20, 60, 50, i * SECOND) for i in range(12)]
    log = run(schedule(ahead=True, pool=pool), requests)
    assert pool.num_preemptions > 0
    assert sorted(id_ for record in log for id_ in record.finished) == list(range(12))
    assert replay(schedule(ahead=True, pool=pool.fresh()), log) == log


def test_a_cancelled_request_gets_no_further_step() -> None:
    rule = schedule(ahead=True)
    engine_requests = [SimulatedRequest(0, 8, 20, 20), SimulatedRequest(1, 8, 20, 20)]
    engine = SimulatedEngine(rule, Seconds(), engine_requests)
    engine.step()
    rule.cancel(1)
    log = engine.run()
    assert [1 in record.decode for record in log[:3]] == [True, False, False], "the step that was decided already runs"
    assert rule.pool.is_idle
