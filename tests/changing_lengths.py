"""Run requests whose lengths change during a run with re-planning, on the simulated clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from xgpt.core import policies
from xgpt.core.schema import Decision, Plan, Profile, Workload
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import quantile, sample
from xgpt.observation.observer import Observer
from xgpt.observation.windows import Seen
from xscheduler.replanning.replanner import propose
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.measures import Measured, measure
from xsimulator.run import clock_of, outstanding_requests

PLANNING_S = 1.0
"""Simulated time from an observation to the new plan, as long as planning takes beside a busy engine."""


class Phase(NamedTuple):
    workload: Workload
    num_requests: int


@dataclass
class Run:
    """The results of a run.

    Attributes:
        changes: (number of ended requests, decision) for each time that the plan was judged.
        num_lost: number of requests without an answer, or with another output length than requested.
    """

    log: list[StepRecord]
    changes: list[tuple[int, Decision]] = field(default_factory=list)
    num_lost: int = 0

    def tail(self, plan: Plan, workload: Workload, skip: int, count: int) -> Measured:
        q = plan.constraint.quantile
        return measure(
            self.log, quantile=q, quantile_output=quantile(workload.output, q), skip_requests=skip, num_requests=count
        )


def requests_of(phases: Sequence[Phase], rng: np.random.Generator) -> Iterator[SimulatedRequest]:
    """Yield the requests of all phases in order. The maximum output of a request is the longest output of its phase."""
    id_ = 0
    for workload, count in phases:
        for input_, output in zip(*sample(workload, count, rng, stratified=False), strict=True):
            yield SimulatedRequest(id_, int(input_), workload.output.lengths[-1], int(output))
            id_ += 1


class _SimulatedWatch:
    """Does on the simulated clock what `xrunner.server.observe.watch` does in a server.

    Args:
        slowdown: ratio of the simulated machine's step times to the profile's.
    """

    def __init__(self, plan: Plan, profile: Profile, slowdown: float) -> None:
        self.decided: list[tuple[int, Decision]] = []
        self._observer = Observer(plan)
        self._profile = profile
        self._slowdown = slowdown
        self._seen: dict[int, Seen] = {}
        self._num_ended = 0
        self._due: tuple[float, Plan | None] | None = None

    def note(self, record: StepRecord, engine: SimulatedEngine) -> None:
        observer = self._observer
        for arrival in record.arrivals:
            self._seen[arrival.id] = observer.window.arrive(
                arrival.arrival_ns / 1e9, arrival.input_length, arrival.max_output
            )
        ended = [id_ for id_, start, n in record.encode if start + n == self._seen[id_].input_length]
        for id_ in (*ended, *record.decode):
            self._seen[id_].generated += 1
        now_s = record.end_ns / 1e9
        step_s = (record.end_ns - record.start_ns) / 1e9
        if observer.pace.wants_step(step_s):
            observer.pace.note(now_s, step_s, step_s / self._slowdown * observer.plan.profile.slowdown)
        if self._due is not None and now_s >= self._due[0]:
            plan, self._due = self._due[1], None
            if plan is not None:
                assert engine.schedule.apply(policies.build(plan)), "only swaps can be simulated"
                observer.go_over_to(plan)
        for id_ in record.finished:
            observer.end(self._seen.pop(id_))
            self._num_ended += 1
        if self._due is None and observer.is_due(now_s):
            now = observer.snapshot()
            if now is not None and (observation := observer.look(now)) is not None:
                decision, plan = propose(observer.plan, self._profile, observation)
                self.decided.append((self._num_ended, decision))
                self._due = now_s + PLANNING_S, plan


def simulated(
    plan: Plan,
    profile: Profile,
    phases: Sequence[Phase],
    rng: np.random.Generator,
    *,
    replan: bool = True,
    slowdown: float = 1.0,
) -> Run:
    """Run a closed loop that keeps the engine saturated, on the simulated clock."""
    schedule = policies.build(plan)
    requests = requests_of(phases, rng)
    engine = SimulatedEngine(schedule, clock_of(plan, profile.slowed(slowdown), schedule), [])
    for request in islice(requests, outstanding_requests(plan)):
        engine.submit(request)
    watch = _SimulatedWatch(plan, profile, slowdown) if replan else None
    log = []
    while (record := engine.step()) is not None:
        log.append(record)
        for _ in record.finished:
            if (further := next(requests, None)) is not None:
                engine.submit(further._replace(arrival_ns=record.end_ns))
        if watch is not None:
            watch.note(record, engine)
    ended = {id_ for record in log for id_ in record.finished}
    num_lost = sum(phase.num_requests for phase in phases) - len(ended)
    return Run(log, [] if watch is None else watch.decided, num_lost)
