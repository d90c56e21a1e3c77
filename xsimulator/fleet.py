"""Simulate a day's requests on a fleet whose number of replicas changes.

Each request goes to the replica with the fewest outstanding requests relative to its rate, as with a gateway that
balances by outstanding requests. A request takes the plan's TTFT and the plan's mean gap for each output token, as in a
fleet that keeps its bounds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import PlanDraft, StageLane
from xgpt.core.schema.fleet import ReplicaKind
from xsimulator.capacity import run_of
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.arrivals import Stream
from xsimulator.counts.compiled import kept
from xsimulator.measures import RequestTimes

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Replica:
    """A replica that serves for a part of the day.

    Attributes:
        from_s, to_s: times between which the replica accepts requests. Accepted requests are always finished.
    """

    kind: int
    from_s: float
    to_s: float = inf


@dataclass(frozen=True)
class Requests:
    """Requests in order of arrival. # each [requests]"""

    inputs: Ints
    outputs: Ints
    arrivals_s: Array

    def __len__(self) -> int:
        return len(self.inputs)


def replicas_of(counts: Ints, interval_s: float) -> list[Replica]:
    """Return replicas that give each interval the required number of each kind. The newest replicas end first."""
    found = []
    for kind, of_kind in enumerate(counts.T):
        since: list[float] = []
        for i, count in enumerate(of_kind):
            now_s = i * interval_s
            while len(since) > count:
                found.append(Replica(kind, since.pop(), now_s))
            since += [now_s if i else 0.0] * (int(count) - len(since))
        found += [Replica(kind, start_s) for start_s in since]
    return sorted(found, key=lambda replica: replica.from_s)


def route(requests: Requests, replicas: Sequence[Replica], kinds: Sequence[ReplicaKind]) -> Ints:
    """Return the replica of each request: the accepting replica with the fewest outstanding relative to its rate.

    If no replica accepts requests, a request goes to the next replica that starts. # [requests]
    """
    plans = [kinds[replica.kind].plan.estimate for replica in replicas]
    times_s = np.asarray([(replica.from_s, replica.to_s) for replica in replicas])
    return _routed(
        np.array(requests.arrivals_s, float),  # copies: a writable array and one that is not have code of their own
        np.array(requests.outputs, np.int64),
        times_s,
        np.argsort(times_s[:, 0], kind="mergesort")[::-1].copy(),
        np.asarray([1 / max(max(kinds[replica.kind].rates_per_s), 1e-9) for replica in replicas]),
        np.asarray([(plan.ttft_s, plan.tpot_s) for plan in plans], float),
    )


@kept
def _routed(arrivals_s, outputs, times_s, to_come, weights, paces_s):
    num_to_come, num_open, closes_s = len(to_come), 0, inf
    open_, outstanding = np.empty(len(to_come), np.int64), np.zeros(len(to_come), np.int64)
    leaving = [(inf, np.int64(0))]
    homes = np.empty(len(arrivals_s), np.int64)
    for i, now_s in enumerate(arrivals_s):
        while leaving[0][0] <= now_s:
            outstanding[heappop(leaving)[1]] -= 1
        while num_to_come and (times_s[to_come[num_to_come - 1], 0] <= now_s or not num_open):
            num_to_come -= 1
            open_[num_open] = to_come[num_to_come]
            closes_s = min(closes_s, times_s[open_[num_open], 1])
            num_open += 1
        if closes_s <= now_s:
            last, num_kept = open_[num_open - 1], 0
            for number in open_[:num_open]:
                if times_s[number, 1] > now_s:
                    open_[num_kept] = number
                    num_kept += 1
            if not num_kept and num_to_come:
                num_to_come -= 1
                open_[0], num_kept = to_come[num_to_come], 1
            closes_s = inf
            for number in open_[:num_kept]:
                closes_s = min(closes_s, times_s[number, 1])
            if not num_kept:
                open_[0], num_kept = last, 1
            num_open = num_kept
        home, least = open_[0], inf
        for number in open_[:num_open]:
            load = (outstanding[number] + 1) * weights[number]
            if load < least:
                home, least = number, load
        outstanding[home] += 1
        heappush(leaving, (now_s + paces_s[home, 0] + paces_s[home, 1] * outputs[i], home))
        homes[i] = home
    return homes


def simulate_fleet(
    requests: Requests,
    replicas: Sequence[Replica],
    kinds: Sequence[ReplicaKind],
    lanes: Sequence[Mapping[StageLane, LaneCost]],
) -> RequestTimes:
    """Simulate the requests, and return each request's times from its arrival, in order of arrival."""
    homes = route(requests, replicas, kinds)
    ttft, tpot, whole = (np.empty(len(requests)) for _ in range(3))
    longest = int(requests.outputs.max(initial=1))
    order = np.argsort(homes, kind="stable")
    edges = np.searchsorted(homes[order], np.arange(len(replicas) + 1))

    def run(number: int) -> None:
        chosen = order[edges[number] : edges[number + 1]]
        if not len(chosen):
            return
        replica = replicas[number]
        plan = kinds[replica.kind].plan
        arrivals_s, outputs = requests.arrivals_s[chosen], requests.outputs[chosen]
        # A request that arrived before its replica was ready has waited for the replica.
        entered_ns = (np.maximum(arrivals_s, replica.from_s) * 1e9).astype(int)
        stream = Stream(requests.inputs[chosen], outputs, _longest(plan, longest), entered_ns)
        done = run_of(plan, lanes[replica.kind], stream)
        done.run()
        first, end = (np.asarray(times, float) / 1e9 for times in (done.first_ns, done.end_ns))
        ttft[chosen], whole[chosen] = first - arrivals_s, end - arrivals_s
        tpot[chosen] = (end - first) / np.maximum(outputs - 1, 1)

    largest_first = np.argsort(-np.diff(edges), kind="stable")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # compiled code releases the interpreter's lock
        for done in [pool.submit(run, number) for number in largest_first.tolist()]:
            done.result()
    path_s = np.asarray([kinds[replica.kind].plan.request_path_s for replica in replicas])[homes]
    return RequestTimes(ttft + path_s, tpot, whole + path_s)


def _longest(plan: PlanDraft, longest: int) -> int:
    return max(plan.workload.output.lengths[-1], longest)
