"""Count how often declared directions hold (ExeGPT Table 5), over policies, tasks and placements.

Each variable is swept on a logarithmic grid with all others fixed, on points that fit in memory. A step counts as
broken where throughput, or latency, goes against its declared direction by more than the tolerance: a share of the best
throughput reached, and of the bottom 70% of the policy's latencies, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.scheduler import LARGE, SMALL, task_problem
from xgpt.core.schema.policy import Direction
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES, Space

MODELS = (
    ("t5-11b", "a40x8", SMALL),
    ("opt-13b", "a40x4", SMALL),
    ("gpt3-39b", "a40x16", SMALL),
    ("gpt3-101b", "a100x16", LARGE),
)
TOLERANCES = (0.02, 0.05, 0.10)
NUM_PLACEMENTS = 8
NUM_POINTS = 400
MICROBATCHES = (1, 2, 4, 8, 16)
"""Numbers of micro-batches of WAA's decode lane."""


class Counts:
    """The number of steps along one variable, and how many of them go against its direction, by tolerance."""

    def __init__(self, directions: tuple[Direction, Direction]) -> None:
        self.directions = directions
        """[throughput, latency]"""
        self.steps = 0
        self.broken = np.zeros((2, len(TOLERANCES)), int)  # [throughput, latency]

    def add(self, figure: int, steps: np.ndarray, scale: float) -> None:
        """Add steps of the throughput (0) or the latency (1). Tolerances are shares of `scale`."""
        self.steps += (figure == 0) * len(steps)
        against = steps if self.directions[figure] == "falls" else -steps
        self.broken[figure] += [int((against > tolerance * scale).sum()) for tolerance in TOLERANCES]


def count(space: Space, counts: dict[str, Counts]) -> None:
    columns = space.grid_points(NUM_POINTS)
    shape = [len(np.unique(columns[axis.variable.name])) for axis in space.axes]
    evaluation = space.evaluate(columns)
    if not evaluation.fits.any():
        return
    fits = evaluation.fits.reshape(shape)
    latency, throughput = evaluation.performance.latency.reshape(shape), evaluation.throughput.reshape(shape)
    scales = (float(throughput[fits].max()), float(np.quantile(latency[fits], 0.7)))
    for i, axis in enumerate(space.axes):
        directions = (axis.variable.throughput, axis.variable.latency)
        both_fit = np.moveaxis(fits, i, -1)
        both_fit = both_fit[..., 1:] & both_fit[..., :-1]
        seen = counts.setdefault(f"{space.kind}.{axis.variable.name}", Counts(directions))
        for j, (values, scale) in enumerate(zip((throughput, latency), scales, strict=True)):
            seen.add(j, np.diff(np.moveaxis(values, i, -1), axis=-1)[both_fit], scale)


Count = Callable[[Sequence[Space], dict[str, Counts]], None]
"""A function that adds the steps on a policy's placements to the counts of the policy's variables."""


def count_swept(spaces: Sequence[Space], counts: dict[str, Counts]) -> None:
    for i in np.unique(np.linspace(0, len(spaces) - 1, NUM_PLACEMENTS).astype(int)):
        count(spaces[i], counts)


class WaaPoints(NamedTuple):
    """Settings of WAA on one placement with B_D = B_E S_D decoding requests (ExeGPT sec. 4.1).

    xgpt's variable, the cap on requests in both lanes, is B_D plus one encode batch.

    Attributes:
        encode_batch: # int [n]
        microbatches: number of micro-batches of the decode lane, the same in all settings.
    """

    space: Space
    encode_batch: np.ndarray
    microbatches: int

    @classmethod
    def on(cls, spaces: Sequence[Space], microbatches: int) -> list[WaaPoints]:
        largest = min(int(axis.values[-1]) for space in spaces for axis in space.axes)
        inside = spaces[0].lengths.mean_decodes + 1
        batches = np.unique(np.geomspace(1, max(1, largest / inside), NUM_POINTS).astype(int))
        fitting = batches[np.ceil(batches * inside) <= largest]
        return [cls(space, fitting, microbatches) for space in spaces]

    @property
    def is_busy(self) -> bool:
        """Whether there are as many micro-batches as stages, so that no stage is idle."""
        return self.microbatches >= self.space.placement.layouts[1].num_stages

    def part(self, part: slice) -> WaaPoints:
        return self._replace(encode_batch=self.encode_batch[part])

    def predicted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return throughput, latency and whether the requests fit in memory. # each [n]"""
        cap = np.ceil(self.encode_batch * (self.space.lengths.mean_decodes + 1)).astype(int)
        columns = {"encode_batch": self.encode_batch, "max_decode_batch": cap}
        many = np.full(len(cap), self.microbatches)
        found = self.space.forecast.evaluate(self.space.models.model, **columns, decode_microbatches=many)
        return found.throughput, found.latency, self.space.evaluate(columns).fits


def count_waa(spaces: Sequence[Space], counts: dict[str, Counts], *, busy: bool = False) -> None:
    """Sweep WAA's encode batch, partial tensor parallelism and micro-batches as in the paper.

    More devices in tensor-parallel groups, and more micro-batches, lower latency and throughput (ExeGPT sec. 4.2).

    Args:
        busy: whether to leave out steps that begin with fewer micro-batches than stages.
    """

    def add(name: str, less: WaaPoints, more: WaaPoints) -> None:
        if not len(less.encode_batch) or (busy and not less.is_busy):
            return
        (first, first_latency, fits), (then, then_latency, fits_then) = less.predicted(), more.predicted()
        fits = fits & fits_then
        if fits.any():
            direction: Direction = "rises" if name == "encode_batch" else "falls"
            seen = counts.setdefault(f"waa.{name}", Counts((direction, direction)))
            seen.add(0, (then - first)[fits], float(first[fits].max()))
            seen.add(1, (then_latency - first_latency)[fits], float(np.quantile(first_latency[fits], 0.7)))

    groups: dict[object, list[Space]] = {}
    for space in spaces:
        where = space.placement
        if where.fixed["decode_microbatches"] > 1:
            continue  # the same layout with another number of micro-batches, all of which are swept below
        points = [WaaPoints.on([space], count)[0] for count in MICROBATCHES]
        for each in points:
            add("encode_batch", each.part(slice(-1)), each.part(slice(1, None)))
        for few, many in pairwise(points):
            add("decode_microbatches", few, many)
        decode = where.layouts[1]
        groups.setdefault((where.replicas, where.layouts[0], decode.num_devices, decode.tp.degree), []).append(space)
    for group in groups.values():
        for pair in pairwise(sorted(group, key=lambda space: space.placement.layouts[1].tp.devices)):
            for count in MICROBATCHES:
                add("tp_devices", *WaaPoints.on(pair, count))


class Monotone(NamedTuple):
    """The number of steps along declared directions, and of the steps against them.

    Attributes:
        rows: a table row for each task and variable.
        steps: number of steps in throughput and in latency. # [2]
        broken: number of steps against the direction, by tolerance. # [2, tolerances]
    """

    rows: list[dict[str, Any]]
    steps: np.ndarray
    broken: np.ndarray

    def share(self, tolerance: int) -> np.ndarray:
        """Return the percentage of steps in the declared direction: throughput, latency. # [2]"""
        return np.asarray(100 * (1 - self.broken[:, tolerance] / np.maximum(self.steps, 1)))


def count_all(
    only: Collection[str] = tuple(model for model, *_ in MODELS),
    how: Mapping[str, Count] = dict.fromkeys(POLICIES, count_swept),
) -> Monotone:
    """Count the steps of every task of some models.

    Args:
        how: for each policy, the function that counts its steps.
    """
    rows: list[dict[str, Any]] = []
    steps, broken = np.zeros(2, int), np.zeros((2, len(TOLERANCES)), int)
    for model, cluster, workloads in MODELS:
        if model not in only:
            continue
        for workload in workloads:
            scheduler = Scheduler(task_problem(model, cluster, workload, None))
            counts: dict[str, Counts] = {}
            for kind, count_of in how.items():
                if spaces := scheduler.candidates.spaces(kind):
                    count_of(spaces, counts)
            for name, seen in counts.items():
                declared = np.asarray([direction != "none" for direction in seen.directions])
                steps += declared * seen.steps
                broken += declared[:, None] * seen.broken
                rows.append({"model": model, "workload": workload, "variable": name, "steps": seen.steps})
                rows[-1] |= {"broken_throughput": seen.broken[0].tolist(), "broken_latency": seen.broken[1].tolist()}
    return Monotone(rows, steps, broken)
