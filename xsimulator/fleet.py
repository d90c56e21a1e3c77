"""A day's requests on a fleet that changes: which replica each goes to, and what it takes there.

Requests go to the replica with the fewest outstanding ones for its rate, as the front of a fleet sends them
(`xrunner.front`). What is outstanding is told by the plan's own pace: a request leaves after the plan's time to the
first token and its mean gaps, which is what a front sees of a fleet that keeps its bounds. Each replica then runs its
own requests by counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
import numpy.typing as npt

from xgpt.schema import Plan, StageLane
from xgpt.schema.fleet import ReplicaKind
from xsimulator.arrivals import Stream
from xsimulator.capacity import run_of
from xsimulator.measures import RequestTimes
from xsimulator.step_cost import LaneCost

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Replica:
    """A replica of a day.

    Attributes:
        kind: its number.
        from_s, to_s: when it takes requests; what it has taken it finishes.
    """

    kind: int
    from_s: float
    to_s: float = inf


@dataclass(frozen=True)
class Requests:
    """Requests in the order of their arrival. # each [requests]"""

    inputs: Ints
    outputs: Ints
    arrivals_s: Array

    def __len__(self) -> int:
        return len(self.inputs)


def replicas_of(counts: Ints, interval_s: float) -> list[Replica]:
    """Return the replicas that make a number of each kind in each interval; the newest leave first.

    Args:
        counts: # [intervals, kinds]
    """
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
    """Return the replica of each request: of those that take any, the one with the fewest outstanding for its rate.

    One that arrives when none takes requests goes to the next that does. # [requests]
    """
    weights = [1 / max(max(kinds[replica.kind].rates_per_s), 1e-9) for replica in replicas]
    first = [kinds[replica.kind].plan.estimate.ttft_s for replica in replicas]
    gap = [kinds[replica.kind].plan.estimate.tpot_s for replica in replicas]
    to_come = sorted(range(len(replicas)), key=lambda i: replicas[i].from_s)[::-1]
    open_: list[int] = []
    outstanding = [0] * len(replicas)
    leaving: list[tuple[float, int]] = []
    heapify(leaving)
    closes_s = inf
    homes = np.empty(len(requests), int)
    for i, (now_s, output) in enumerate(zip(requests.arrivals_s.tolist(), requests.outputs.tolist(), strict=True)):
        while leaving and leaving[0][0] <= now_s:
            outstanding[heappop(leaving)[1]] -= 1
        while to_come and (replicas[to_come[-1]].from_s <= now_s or not open_):
            open_.append(to_come.pop())
            closes_s = min(closes_s, replicas[open_[-1]].to_s)
        if closes_s <= now_s:
            kept = [number for number in open_ if replicas[number].to_s > now_s]
            while not kept and to_come:
                kept.append(to_come.pop())
            open_ = kept or open_[-1:]
            closes_s = min((replicas[number].to_s for number in kept), default=inf)
        home = min(open_, key=lambda number: (outstanding[number] + 1) * weights[number])
        outstanding[home] += 1
        heappush(leaving, (now_s + first[home] + gap[home] * output, home))
        homes[i] = home
    return homes


def simulate_fleet(
    requests: Requests,
    replicas: Sequence[Replica],
    kinds: Sequence[ReplicaKind],
    lanes: Sequence[Mapping[StageLane, LaneCost]],
) -> RequestTimes:
    """Return what each request takes from its arrival on, in the order of arrival.

    Args:
        lanes: costs of the steps of each kind.
    """
    homes = route(requests, replicas, kinds)
    ttft, tpot, whole = (np.empty(len(requests)) for _ in range(3))
    longest = int(requests.outputs.max(initial=1))
    order = np.argsort(homes, kind="stable")
    edges = np.searchsorted(homes[order], np.arange(len(replicas) + 1))
    for number, replica in enumerate(replicas):
        chosen = order[edges[number] : edges[number + 1]]
        if not len(chosen):
            continue
        plan = kinds[replica.kind].plan
        arrivals_s, outputs = requests.arrivals_s[chosen], requests.outputs[chosen]
        # A request that came before the replica served has waited for it.
        entered_ns = (np.maximum(arrivals_s, replica.from_s) * 1e9).astype(int)
        stream = Stream(
            requests.inputs[chosen].tolist(), outputs.tolist(), _longest(plan, longest), entered_ns.tolist()
        )
        run = run_of(plan, lanes[replica.kind], stream)
        run.run()
        first, end = (np.asarray(of, float) / 1e9 for of in (run.first_ns, run.end_ns))
        ttft[chosen], whole[chosen] = first - arrivals_s, end - arrivals_s
        tpot[chosen] = (end - first) / np.maximum(outputs - 1, 1)
    path_s = np.asarray([kinds[replica.kind].plan.request_path_s for replica in replicas])[homes]
    return RequestTimes(ttft + path_s, tpot, whole + path_s)


def _longest(plan: Plan, longest: int) -> int:
    """The output for which memory is set aside."""
    return max(plan.workload.output.lengths[-1], longest)
