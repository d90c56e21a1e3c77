"""Run sessions by counts on all replicas of a plan, with a router that sends each turn to one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.policies.routing import BLOCKS_A_KEY
from xgpt.core.turns import Ints
from xsimulator.costs.step_tables import NUM_PARTS
from xsimulator.counts.arrivals import NONE, RunState, TurnStream
from xsimulator.counts.compiled import borrowed, helper, kept
from xsimulator.counts.counting import take_in
from xsimulator.counts.one_lane_arrivals import OneLaneRun, issue, settle
from xsimulator.counts.turns import FOREVER, expect, next_arrival_ns, take_due, unlink

BY_SESSION, BY_PREFIX, BY_LOAD = range(3)


class RoutedRun:
    """All replicas of a plan. Turns wait in the heap of the last run, which serves none, until they are routed.

    Args:
        runs: one run for each replica, and one more.
        slack: as in `xgpt.core.policies.routing.ReplicaRouter`.
    """

    def __init__(self, runs: Sequence[OneLaneRun], stream: TurnStream, route: int, slack: float) -> None:
        for run in runs:
            run.in_sessions(stream)
            run.state.lane["last_counted"] = run.state.lane["num_left"] = len(stream.turns)
        for run in runs[:-1]:
            run.state.lane["num_due"] = 0
        self._states = RunState(*(np.stack(each) for each in zip(*(run.state for run in runs), strict=True)))
        self._tables, self._free_ns = runs[0].tables, np.stack([run.free_ns for run in runs])
        self._route, self._slack = route, slack

    def run(self) -> None:
        homes = np.full((len(self._states.sessions[0]), 2), NONE)
        run_routed(self._states, self._tables, self._free_ns, homes, self._route, self._slack)

    def of_turns(self, name: str) -> Ints:
        found = np.full(self._states.turns.shape[1], NONE)
        for lane, requests in zip(self._states.lane[:-1, 0], self._states.requests, strict=False):
            mine = requests[: lane["tail"]]
            found[mine["turn"]] = mine[name]
        return found


@helper
def replica(states, i):
    return RunState(
        states.lane[i],
        states.requests[i],
        states.batches[i],
        states.ends[i],
        states.grows[i],
        states.steps[i],
        states.pieces[i],
        states.moved[i],
        states.goals[i],
        states.broken[i],
        states.log[i],
        states.turns[0],
        states.due[i],
        states.sessions[i],
        states.chains[i],
        states.firsts[i],
        states.keys[i],
        states.keyed[i],
    )


@kept
def run_routed(states, tables, free_ns, homes, route, slack):
    go_on(borrowed(states), borrowed(tables), free_ns, homes, route, slack)


@helper
def go_on(states, tables, free_ns, homes, route, slack):
    count, now_ns, last = len(states.lane) - 1, 0, NONE
    outside, entrance = replica(states, count), states.lane[count, 0]
    scratch, costs_ns = np.zeros((tables.num_groups, NUM_PARTS)), np.zeros(len(tables.kinds), np.int64)
    may_issue = np.zeros(count, np.bool_)
    while True:
        while next_arrival_ns(outside, entrance) <= now_ns:
            turn = take_due(outside, entrance)
            last = choose(states, homes, outside.turns[turn], last, route, slack)
            s, lane = replica(states, last), states.lane[last, 0]
            lane.now_ns = now_ns
            forget_apart(states, last, outside.turns[turn])
            expect(s, lane, turn)
            take_in(s, lane)
            may_issue[last] = True
        first, end_ns = NONE, FOREVER
        for i in range(count):
            lane = states.lane[i, 0]
            if may_issue[i]:
                s = replica(states, i)
                while issue(s, lane, tables, free_ns[i], scratch, costs_ns, None):
                    pass
                may_issue[i] = False
            if lane.first_step < lane.end_step:
                ends_ns = states.steps[i, lane.first_step % states.steps.shape[1]].end_ns
                if ends_ns < end_ns:
                    first, end_ns = i, ends_ns
        now_ns = min(end_ns, next_arrival_ns(outside, entrance))
        if now_ns == FOREVER:
            return
        if end_ns == now_ns:
            s, lane = replica(states, first), states.lane[first, 0]
            lane.now_ns = now_ns
            settle(s, lane)
            while lane.num_due:
                expect(outside, entrance, take_due(s, lane))
            may_issue[first] = True


@helper
def forget_apart(states, number, turn):
    """On the other replicas, forget blocks of the session that this turn does not continue."""
    for i in range(len(states.lane) - 1):
        lane, session = states.lane[i, 0], states.sessions[i, turn.session]
        more = session.kept - max(turn.common // lane.block_size - lane.shared, 0)
        if i != number and more > 0:
            if more == session.kept:
                unlink(replica(states, i), lane, turn.session)
            else:
                session.kept -= more
                lane.num_kept -= more


@helper
def load_of(lane):
    return lane.tail - (lane.last_counted - lane.num_left)


@helper
def choose(states, homes, turn, last, route, slack):
    """Choose a replica as `ReplicaRouter` does. Keys of the prefix that all share lead to where the last turn went."""
    least = 0
    for i in range(1, len(states.lane) - 1):
        if load_of(states.lane[i, 0]) < load_of(states.lane[least, 0]):
            least = i
    size = BLOCKS_A_KEY * states.lane[0, 0].block_size
    home, found, most = homes[turn.session, 0], np.int64(1), np.int64(1)
    if route == BY_PREFIX:
        found, most = min(turn.common, homes[turn.session, 1]) // size, turn.input // size
        if found < 1:
            home, found = last, min(turn.common, states.lane[0, 0].shared * states.lane[0, 0].block_size) // size
    number = least
    if route != BY_LOAD and home != NONE and found > 0:
        excess = load_of(states.lane[home, 0]) - load_of(states.lane[least, 0])
        if route == BY_SESSION or excess <= slack * (found / most) ** 2:
            number = home
    homes[turn.session, 0], homes[turn.session, 1] = number, turn.input
    return number
