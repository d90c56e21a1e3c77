"""Simulate sessions on one replica of a plan: whose turns wait how long, and what they find in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import PlanDraft, Profile, StageLane
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.turns import FIRST, Floats, Ints
from xgpt.core.workload import TraceLengths
from xsimulator.costs.step_cost import LaneCost, lanes_of
from xsimulator.counts.arrivals import TURN, Stream, TurnStream
from xsimulator.counts.counted_run import counted_run, is_counted
from xsimulator.counts.one_lane_arrivals import OneLaneRun
from xsimulator.counts.routed import RoutedRun
from xsimulator.forecast import FORECASTS
from xsimulator.lengths import decoded
from xsimulator.run import run_requests


@dataclass(frozen=True, eq=False)
class TurnTimes:
    """What happened to the turns of a run. # [turns] each

    Attributes:
        arrived_s, first_s, end_s: times at which a client sends a turn, and gets its first and its last token.
        cached: number of prompt tokens that were found in the cache, -1 for a turn that did not begin.
    """

    trace: TraceLengths
    arrived_s: Floats
    first_s: Floats
    end_s: Floats
    cached: Ints

    @property
    def every(self) -> npt.NDArray[np.bool_]:
        """A mask of all turns."""
        return np.ones(len(self.end_s), bool)

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> Floats:
        return (self.end_s - self.first_s) / np.maximum(self.trace.output - 1, 1)

    @property
    def whole_s(self) -> Floats:
        return self.end_s - self.arrived_s

    @property
    def paused_s(self) -> Floats:
        return self.trace.turns.pause_s

    @property
    def kept_token_s(self) -> Floats:
        """Tokens that each turn found of those that the turn before it computed, times the seconds they were kept."""
        sessions = self.trace.turns
        later = sessions.after != FIRST
        kept = np.where(later, self.cached - shared_tokens(self.trace), 0)
        since = np.where(later, self.arrived_s - self.end_s[sessions.after], 0.0)
        return np.maximum(kept, 0) * since

    def of_sessions(self, values: Floats) -> Floats:
        return np.bincount(self.trace.turns.session, values).astype(float)

    @property
    def reused_share(self) -> float:
        return self._share_found(self.cached >= 0)

    def reused_by_turn(self, most: int = 10) -> list[float]:
        """Return the share of prompt tokens that the first, second, ... turn of sessions finds."""
        place, began = places_in_sessions(self.trace), self.cached >= 0
        return [self._share_found(each) for i in range(most) if (each := began & (place == i)).any()]

    def _share_found(self, turns: npt.NDArray[np.bool_]) -> float:
        return float(self.cached[turns].sum() / max(1, self.trace.input[turns].sum()))


def places_in_sessions(trace: TraceLengths) -> Ints:
    """Return for each turn how many turns it follows, one after the other. # [turns]"""
    place = np.zeros(len(trace.input), np.int64)
    for turn, after in enumerate(trace.turns.after.tolist()):
        place[turn] = 0 if after == FIRST else place[after] + 1
    return place


def run_sessions(
    plan: PlanDraft, profile: Profile, trace: TraceLengths, *, lanes: Mapping[StageLane, LaneCost] | None = None
) -> TurnTimes:
    """Run sessions whose first turns arrive at the trace's times: by counts if possible, else on the simulated
    engine.
    """
    counted = counted_turns(plan, lanes or lanes_of(plan, profile), trace)
    return (
        logged_turns(plan, trace, run_requests(plan, profile, trace, int(trace.output.max())))
        if counted is None
        else counted
    )


def counts_turns(plan: PlanDraft) -> bool:
    """Return whether turns of sessions that do not fork can be run by counts."""
    return plan.shares_prompts and FORECASTS[plan.policy.kind].stations.admits_each_step and is_counted(plan)


def counted_turns(
    plan: PlanDraft,
    lanes: Mapping[StageLane, LaneCost],
    trace: TraceLengths,
    route: int | None = None,
    slack: float = 0.0,
    *,
    from_host: bool = False,
) -> TurnTimes | None:
    """Run sessions by counts, on one replica or, with a router, on all (`xsimulator.counts.routed`). Return None if the
    plan or the sessions cannot be counted.

    Args:
        from_host: whether turns find all K/V of their sessions in host memory.
    """
    sessions = trace.turns
    assert trace.timestamp_s is not None
    if not counts_turns(plan) or not sessions.is_plain:
        return None
    outputs = decoded(trace.output, plan.speculation, np.random.default_rng(0))
    turns = np.zeros(len(trace.input), TURN)
    path_ns = round(1e9 * plan.request_path_s)
    after = sessions.after != FIRST
    turns["input"], turns["output"], turns["tokens"] = trace.input, outputs, trace.output
    turns["most"], turns["session"], turns["common"] = outputs.max(), sessions.session, sessions.common
    turns["arrival_ns"] = (1e9 * trace.timestamp_s).astype(int)
    turns["pause_ns"], turns["child"] = path_ns + (1e9 * sessions.pause_s).astype(int), -1
    turns["child"][sessions.after[after]] = np.flatnonzero(after)
    stream = Stream(trace.input, outputs, int(outputs.max()), turns["arrival_ns"])
    runs = list[OneLaneRun]()
    for _ in range(1 if route is None else plan.replicas + 1):
        one = counted_run(plan, lanes, stream)
        assert isinstance(one, OneLaneRun)
        runs.append(one)
    turn_stream = TurnStream(turns, shared_tokens(trace), from_host)
    run = runs[0] if route is None else RoutedRun(runs, turn_stream, route, slack)
    if isinstance(run, OneLaneRun):
        run.in_sessions(turn_stream)
    run.run()
    arrived, first, end = (1e-9 * run.of_turns(name).astype(float) for name in ("arrival_ns", "first_ns", "end_ns"))
    return TurnTimes(trace, arrived, first + plan.request_path_s, end + plan.request_path_s, run.of_turns("found"))


def shared_tokens(trace: TraceLengths) -> int:
    """Return the length of the prefix that all sessions share."""
    return int(trace.turns.common[trace.turns.after == FIRST].min())


def logged_turns(plan: PlanDraft, trace: TraceLengths, log: Sequence[StepRecord]) -> TurnTimes:
    count = len(trace.input)
    arrived, first, end = (np.full(count, np.nan) for _ in range(3))
    cached = np.full(count, -1)
    for record in log:
        for arrival in record.arrivals:
            arrived[arrival.id] = 1e-9 * arrival.arrival_ns
        for id_, start, length in record.encode:
            if cached[id_] < 0:
                cached[id_] = start
            if start + length >= trace.input[id_] and np.isnan(first[id_]):
                first[id_] = 1e-9 * record.end_ns
        for id_ in record.finished:
            end[id_] = 1e-9 * record.end_ns
    return TurnTimes(trace, arrived, first + plan.request_path_s, end + plan.request_path_s, cached)
