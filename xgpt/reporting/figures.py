"""Compute what a page draws: the steps of each stage, the memory use of each device, and each policy's trade-off
between latency and throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.schema import Plan, PolicySettings
from xscheduler.space import Space
from xsimulator.clock import Span as StageSpan

CYCLES = 4
"""Number of each micro-batch's encode phases in a timeline."""
MIN_STEPS, MAX_STEPS = 20, 120
"""Smallest and largest number of each stage's steps in a timeline."""
GIB = 2.0**30


class StepBar(NamedTuple):
    """A step of a stage: its row, its times in seconds from the timeline's left edge, and its kind (encode means
    prefill).
    """

    row: int
    start_s: float
    end_s: float
    kind: str


class TimelineFigure(NamedTuple):
    """A part of a simulated run.

    Attributes:
        rows: names of the stages, one for each row.
        decoding: for each step with decodes in the first stage: (its start in seconds from the left edge, requests in
            decode).
    """

    rows: tuple[str, ...]
    bars: tuple[StepBar, ...]
    decoding: tuple[tuple[float, int], ...]


class MemoryFigure(NamedTuple):
    """The memory use of each device of a replica, in GiB.

    Attributes:
        usable: memory of a device that plans may use.
        rest: memory for weights, activations and workspace on each device.
        kv: memory for keys and values on each device.
    """

    usable: float
    rest: tuple[float, ...]
    kv: tuple[float, ...]


def timeline(plan: Plan, spans: Sequence[StageSpan]) -> TimelineFigure:
    """Return a part from the middle of a simulated run, where the state is steady. It contains several prefill
    steps.
    """
    spans = sorted(spans, key=lambda span: span.start_ns)
    encodes = sorted({span.start_ns for span in spans if span.step.encode and span.stage == 0})
    middle = len(encodes) // 2
    origin = encodes[middle]
    end = encodes[min(middle + CYCLES * getattr(plan.policy, "microbatches", 1), len(encodes) - 1)]
    seen = [span for span in spans if span.start_ns >= origin]
    least = MIN_STEPS * len(plan.stages)
    shown = [span for i, span in enumerate(seen) if span.start_ns < end or i < least][: MAX_STEPS * len(plan.stages)]

    rows: dict[tuple[str, int], int] = {}
    for stage in plan.stages:
        rows[stage.lane, sum(lane == stage.lane for lane, _ in rows)] = len(rows)
    bars = tuple(
        StepBar(
            rows[span.lane, span.stage],
            (span.start_ns - origin) / 1e9,
            (span.end_ns - origin) / 1e9,
            " and ".join(name for name, part in (("encode", span.step.encode), ("decode", span.step.decode)) if part),
        )
        for span in shown
    )
    decodes = [span for span in shown if span.step.decode and span.stage == 0]
    return TimelineFigure(
        tuple(("stage" if lane == "both" else lane) + f" {number + 1}" for lane, number in rows),
        bars,
        tuple(((span.start_ns - origin) / 1e9, len(span.step.decode)) for span in decodes),
    )


def memory(plan: Plan) -> MemoryFigure:
    kv: list[float] = []
    for stage in plan.stages:
        layers = (stage.decode_layers[1] - stage.decode_layers[0]) / plan.model.num_layers
        share = layers * (max(1 / stage.tp, 1 / plan.model.num_kv_heads) if plan.model.latent is None else 1.0)
        bytes_ = stage.kv_blocks * plan.block_size * plan.model.kv_bytes_per_token(plan.precision.kv) * share
        kv += [bytes_ / GIB] * stage.tp
    rest = tuple(total / GIB - of_kv for total, of_kv in zip(plan.estimate.memory_bytes, kv, strict=True))
    device = plan.cluster.device
    return MemoryFigure(device.memory_bytes * device.usable_memory / GIB, rest, tuple(kv))


NUM_POINTS = 1000
"""Approximate number of settings that are predicted for each placement."""
NUM_PLACEMENTS = 40
"""Largest number of placements to search. Those with the highest bounds come first."""


class TradeOff(NamedTuple):
    """A schedule on the trade-off: no other evaluated schedule has both a lower latency and a higher throughput."""

    latency_s: float
    throughput_rps: float
    settings: PolicySettings


def frontier(spaces: Sequence[Space]) -> list[TradeOff]:
    """Return the trade-off between latency and throughput over all spaces, from the lowest latency to the highest
    throughput.

    Schedules are evaluated on a grid of each placement's settings. Each of them is attainable, but better ones may
    exist between grid points. Only the search proves how good a schedule is.
    """
    points = [
        point for space in sorted(spaces, key=lambda space: -space.bound)[:NUM_PLACEMENTS] for point in of_space(space)
    ]
    best: list[TradeOff] = []
    for point in sorted(points, key=lambda point: (point.latency_s, -point.throughput_rps)):
        if not best or point.throughput_rps > best[-1].throughput_rps:
            best.append(point)
    return best


def of_space(space: Space) -> list[TradeOff]:
    columns = space.grid_points(NUM_POINTS)
    evaluation = space.evaluate(columns)
    latency, throughput = evaluation.performance.latency, evaluation.throughput
    order = np.lexsort((-throughput, latency))
    order = order[evaluation.feasible[order]]
    if not len(order):
        return []
    best = np.maximum.accumulate(throughput[order])
    rises = np.concatenate([[True], best[1:] > best[:-1]])
    return [TradeOff(float(latency[i]), float(throughput[i]), space.settings(columns, int(i))) for i in order[rises]]
