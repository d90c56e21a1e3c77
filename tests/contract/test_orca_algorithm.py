"""Micro-batches beside ORCA's Algorithm 1 to the letter, which forms every batch anew from all requests.

Of P batches under way one returns at a time, and all requests but its own and the waiting ones are running then. So a
batch is formed of the same requests whether or not they belong to it, unless fewer than P batches are under way.
"""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from xgpt.core.policies import LaneSettings, OneLane, Pool, Step
from xsimulator.events import SimulatedEngine, SimulatedRequest


class Pipeline:
    """Equal stages: a step takes as long on each, and enters one when the step before has left it."""

    def __init__(self, num_stages: int) -> None:
        self.free_ns = [0] * num_stages

    def pass_through(self, start_ns: int, tokens: int) -> int:
        for stage, free_ns in enumerate(self.free_ns):
            start_ns = max(start_ns, free_ns) + (40_000 + 320 * tokens) // len(self.free_ns)
            self.free_ns[stage] = start_ns
        return start_ns

    def __call__(self, start_ns: int, step: Step) -> int:
        return self.pass_through(start_ns, sum(chunk.length for chunk in step.encode) + len(step.decode))


def scheduled(requests: list[SimulatedRequest], num_stages: int, max_batch: int) -> dict[int, int]:
    """Return when each request ends under our schedule."""
    settings = LaneSettings(mix=True, max_batch=max_batch * num_stages, microbatches=num_stages)
    log = SimulatedEngine(OneLane(settings, Pool(10**6, 16)), Pipeline(num_stages), requests).run()
    return {id_: record.end_ns for record in log for id_ in record.finished}


def by_algorithm_1(requests: list[SimulatedRequest], num_stages: int, max_batch: int) -> dict[int, int]:
    """Return when each request ends under ORCA's Algorithm 1: at most `max_batch` of all that are not running."""
    pipeline, pool, running = Pipeline(num_stages), list[SimulatedRequest](), set[int]()
    coming, under_way = list(requests), list[tuple[int, int, list[SimulatedRequest]]]()
    left, end, now, number = {r.id: r.output_length for r in requests}, dict[int, int](), 0, 0
    while len(end) < len(requests):
        batch = [r for r in pool if r.id not in running][:max_batch]
        if batch and len(under_way) < num_stages:
            tokens = sum(r.input_length if left[r.id] == r.output_length else 1 for r in batch)
            heapq.heappush(under_way, (pipeline.pass_through(now, tokens), number, batch))
            running |= {r.id for r in batch}
            number += 1
        elif coming and (not under_way or coming[0].arrival_ns <= under_way[0][0]):
            now = max(now, coming[0].arrival_ns)
            while coming and coming[0].arrival_ns <= now:
                pool.append(coming.pop(0))
        else:
            now, _, batch = heapq.heappop(under_way)
            for r in batch:
                running.discard(r.id)
                left[r.id] -= 1
                if not left[r.id]:
                    end[r.id] = now
                    pool.remove(r)
    return end


@pytest.mark.parametrize(("num_stages", "load", "within"), [(2, 9, 0), (4, 9, 0), (2, 0.5, 0), (4, 0.3, 0.05)])
def test_batches_are_those_of_algorithm_1(num_stages: int, load: float, within: float) -> None:
    rng = np.random.default_rng(1)
    inputs, outputs = rng.integers(1, 500, 300), rng.integers(1, 60, 300)
    arrivals = np.cumsum(rng.exponential(170_000 / load / num_stages**0.7, 300)) * (load < 1)
    requests = [
        SimulatedRequest(i, int(a), 60, int(b), int(at))
        for i, (a, b, at) in enumerate(zip(inputs, outputs, arrivals, strict=True))
    ]
    ours, theirs = scheduled(requests, num_stages, 8), by_algorithm_1(requests, num_stages, 8)
    latencies = [np.mean([end[r.id] - r.arrival_ns for r in requests]) for end in (ours, theirs)]
    if within:
        assert latencies[0] == pytest.approx(latencies[1], rel=within)
    else:
        assert ours == theirs
