"""Waiting requests, how fast they are taken up, and which of too many requests a server takes in."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.rings import few
from xgpt.core import policies
from xgpt.core.schema import ANYONE, Plan
from xgpt.core.workload import sample
from xrunner.server.observe.backlog import Backlog
from xscheduler.schedule import Scheduler
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.run import clock_of

OF = problem("opt-13b", "h200x1", "summarization", 6.0)


def phases(backlog: Backlog, first: int, count: int, start_s: float, step_s: float, each: int) -> float:
    """Run steps, every eighth of which takes up `each` waiting requests; return when the last has ended."""
    for i in range(count):
        begun = range(first + i // 8 * each, first + (i // 8 + 1) * each) if i % 8 == 7 else ()
        backlog.begin(begun, start_s, start_s + step_s)
        start_s += step_s
    return start_s


def test_the_rate_is_told_by_steps_that_leave_requests_waiting() -> None:
    backlog = Backlog(memory_s=20.0)
    for id_ in range(2000):
        backlog.join(id_, 10, 0.0)
    assert backlog.rate_per_s(0.0) is None
    end_s = phases(backlog, 0, 24, 0.0, 0.25, 8)
    assert backlog.rate_per_s(end_s) is None  # two spans of two seconds
    end_s = phases(backlog, 24, 160, end_s, 0.25, 8)
    assert backlog.rate_per_s(end_s) == pytest.approx(40.0)
    end_s = phases(backlog, 184, 400, end_s, 0.5, 8)
    assert backlog.rate_per_s(end_s) == pytest.approx(20.0, rel=0.01)
    assert backlog.rate_per_s(end_s + 41.0) is None


def test_who_comes_while_a_step_runs_has_not_been_left_by_it() -> None:
    backlog = Backlog(memory_s=10.0)
    for i in range(400):  # each step lets in the one that is there; the next one comes meanwhile
        backlog.join(i, 10, i + 0.5)
        backlog.begin([i - 1], float(i), i + 1.0)
        assert len(backlog) == 1
    assert backlog.rate_per_s(400.0) is None


def test_who_has_left_does_not_wait() -> None:
    backlog = Backlog(memory_s=10.0)
    backlog.join(1, 10, 0.0)
    backlog.leave(1)
    backlog.leave(1)
    assert len(backlog) == 0


@functools.cache
def plan() -> Plan:
    return Scheduler(replace(OF, constraint=OF.constraint.model_copy(update={"headroom": 0.1}))).best(("rra",))


def overloaded(slowness: float, promised_s: float, times: float, num_requests: int) -> tuple[float, list[float]]:
    """Let requests arrive at `times` times the rate that the engine can serve; return (requests begun a second, seconds
    to the answer of each that was taken in). The engine takes `slowness` times as long as planned.
    """
    rate = plan().estimate.throughput_rps / slowness
    inputs, outputs = sample(plan().workload, num_requests, np.random.default_rng(0))
    longest = plan().workload.output.lengths[-1]
    lengths = zip(inputs.tolist(), outputs.tolist(), strict=True)
    coming: Iterator[SimulatedRequest] = (
        SimulatedRequest(i, n, longest, m, round(i / (times * rate) * 1e9)) for i, (n, m) in enumerate(lengths)
    )
    schedule = policies.build(plan())
    request = next(coming)
    engine = SimulatedEngine(schedule, clock_of(plan(), OF.profile.slowed(slowness), schedule), [request])
    backlog = Backlog(max(10.0, 8 * plan().estimate.latency_s))
    came, answers = {0: (0.0, promised_s)}, []
    backlog.join(0, request.input_length, 0.0)
    upcoming = next(coming, None)
    while (record := engine.step()) is not None:
        begun = [chunk[0] for chunk in record.encode]
        while upcoming is not None and upcoming.arrival_ns <= record.end_ns:
            now_s = upcoming.arrival_ns / 1e9
            expected_s = backlog.answer_s(now_s, ANYONE, 1, plan(), slowness, begun)
            if backlog.caution * expected_s <= promised_s:
                came[upcoming.id] = now_s, expected_s
                backlog.join(upcoming.id, upcoming.input_length, now_s)
                engine.submit(upcoming)
            upcoming = next(coming, None)
        backlog.begin(begun, record.start_ns / 1e9, record.end_ns / 1e9)
        for id_ in record.finished:
            came_s, expected_s = came[id_]
            answers.append(record.end_ns / 1e9 - came_s)
            backlog.note_answer(expected_s, promised_s, answers[-1])
    return len(answers) / engine.now_ns * 1e9 / rate, answers


@pytest.mark.parametrize("slowness", few([1.3, 1.0]))
def test_more_than_can_be_served(slowness: float) -> None:
    """Nearly as many are taken in as can be served, and nearly all of them have their answer in the promised time."""
    promised_s = 2 * 6.0
    share, answers = overloaded(slowness, promised_s, 3.0, 3000)
    assert share > 0.9
    assert np.mean(np.asarray(answers) <= promised_s) >= 0.99
