"""How often the declared directions hold (ExeGPT Table 5), over all policies, tasks and a spread of placements.

    python -m benchmarks.monotonicity [--only gpt3-39b]

Each variable is swept on a logarithmic grid with all others fixed, on points that fit in memory. A step counts as
broken where throughput, or latency, goes against its declared direction by more than the tolerance: a share of the best
throughput reached, and of the bottom 70% of the policy's latencies, as in the paper. Where a variable has no declared
direction, what would break a rising one is shown with a star and left out of the total. Predicted, from the datasheets.
Writes results/monotonicity.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.scheduler import LARGE, SMALL, task_problem
from xgpt.core.io import write_atomic
from xgpt.core.schema.policy import Direction
from xscheduler.placement import Placement
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES, Evaluation, Space

RESULTS = Path("results/monotonicity.json")
MODELS = (
    ("t5-11b", "a40x8", SMALL),
    ("opt-13b", "a40x4", SMALL),
    ("gpt3-39b", "a40x16", SMALL),
    ("gpt3-101b", "a100x16", LARGE),
)
TOLERANCES = (0.02, 0.05, 0.10)
NUM_PLACEMENTS = 8
NUM_POINTS = 400


class Counts:
    """Steps along one variable: how many there are, and how many go against its direction, by tolerance."""

    def __init__(self, directions: tuple[Direction, Direction]) -> None:
        self.directions = directions
        """[throughput, latency]"""
        self.steps = 0
        self.broken = np.zeros((2, len(TOLERANCES)), int)  # [throughput, latency]

    def add(self, figure: int, steps: np.ndarray, scale: float) -> None:
        """Add steps of the throughput (0) or the latency (1); the scale is what tolerances are shares of."""
        self.steps += (figure == 0) * len(steps)
        against = steps if self.directions[figure] == "falls" else -steps
        self.broken[figure] += [int((against > tolerance * scale).sum()) for tolerance in TOLERANCES]

    def cell(self, tolerance: int) -> str:
        """(latency, throughput) in percent, as in the paper."""
        parts = [
            f"{100 * self.broken[j, tolerance] / max(self.steps, 1):.1f}{'*' if self.directions[j] == 'none' else ''}"
            for j in (1, 0)
        ]
        return f"({', '.join(parts)})"


def count(space: Space, counts: dict[str, Counts]) -> None:
    """Add a placement's grid to the counts of its policy's variables."""
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
"""Adds what a policy's placements show to the counts of its variables."""


def count_swept(spaces: Sequence[Space], counts: dict[str, Counts]) -> None:
    """Sweep each variable on some of the placements."""
    for i in np.unique(np.linspace(0, len(spaces) - 1, NUM_PLACEMENTS).astype(int)):
        count(spaces[i], counts)


def count_waa_uncapped(spaces: Sequence[Space], counts: dict[str, Counts]) -> None:
    """Compare WAA's encode batches, and its placements that differ in one variable, as the paper has them.

    As many requests decode as its B_D = B_E S_D gives: our own variable, a cap on them, is at its most. More devices in
    tensor-parallel groups, and more micro-batches, lower latency and throughput (ExeGPT sec. 4.2).
    """

    def microbatches(where: Placement) -> int:
        return int(where.fixed["decode_microbatches"])

    def shape(where: Placement) -> tuple[object, ...]:
        return where.replicas, where.layouts[0], where.layouts[1].num_devices, where.layouts[1].tp.degree

    def add(name: str, directions: tuple[Direction, Direction], less: Evaluation, more: Evaluation) -> None:
        fits = less.fits & more.fits
        if fits.any():
            seen = counts.setdefault(f"waa.{name}", Counts(directions))
            throughput, latency = less.throughput[fits], less.performance.latency[fits]
            seen.add(0, more.throughput[fits] - throughput, float(throughput.max()))
            seen.add(1, more.performance.latency[fits] - latency, float(np.quantile(latency, 0.7)))

    def uncapped(*compared: Space) -> dict[str, np.ndarray]:
        columns = min(compared, key=lambda space: space.num_points).grid_points(NUM_POINTS)
        at = columns["max_decode_batch"] == columns["max_decode_batch"].max()
        return {name: values[at] for name, values in columns.items()}

    for space in spaces:
        columns = uncapped(space)
        less, more = ({name: values[part] for name, values in columns.items()} for part in (slice(-1), slice(1, None)))
        if len(less["encode_batch"]):
            add("encode_batch", ("rises", "rises"), space.evaluate(less), space.evaluate(more))
    for name, value, rest in (
        (
            "tp_devices",
            lambda where: where.layouts[1].tp.devices,
            lambda where: (*shape(where), microbatches(where) > 1),
        ),
        ("decode_microbatches", microbatches, lambda where: (*shape(where), where.layouts[1])),
    ):
        groups: dict[object, list[Space]] = {}
        for space in spaces:
            groups.setdefault(rest(space.placement), []).append(space)
        for group in groups.values():
            for pair in pairwise(sorted(group, key=lambda space: value(space.placement))):
                columns = uncapped(*pair)
                add(name, ("falls", "falls"), *(space.evaluate(columns) for space in pair))


class Monotone(NamedTuple):
    """Steps along declared directions, and those that go against them.

    Attributes:
        rows: of each task and variable.
        steps: in throughput and in latency. # [2]
        broken: by tolerance. # [2, tolerances]
    """

    rows: list[dict[str, object]]
    steps: np.ndarray
    broken: np.ndarray

    def share(self, tolerance: int) -> np.ndarray:
        """Percent that keep their direction: throughput, latency. # [2]"""
        return np.asarray(100 * (1 - self.broken[:, tolerance] / np.maximum(self.steps, 1)))


def count_all(
    only: str | None = None,
    show: Callable[[str], None] = lambda line: None,
    how: Mapping[str, Count] = dict.fromkeys(POLICIES, count_swept),
) -> Monotone:
    """Count the steps of every task, or of one model's.

    Args:
        how: what counts each policy's.
    """
    rows: list[dict[str, object]] = []
    steps, broken = np.zeros(2, int), np.zeros((2, len(TOLERANCES)), int)
    for model, cluster, workloads in MODELS:
        if only not in (None, model):
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
                cells = "  ".join(f"{t:.0%}: {seen.cell(k)}" for k, t in enumerate(TOLERANCES))
                show(f"{model:10} {workload:15} {name:26} {seen.steps:7d} steps  {cells}")
                rows.append({"model": model, "workload": workload, "variable": name, "steps": seen.steps})
                rows[-1] |= {"broken_throughput": seen.broken[0].tolist(), "broken_latency": seen.broken[1].tolist()}
    return Monotone(rows, steps, broken)


@click.command()
@click.option("--only", help="One model.")
def main(only: str | None) -> None:
    found = count_all(only, click.echo)
    throughput, latency = found.share(1)
    click.echo("each cell: (latency, throughput) that break their direction, in percent of the steps; *: none declared")
    click.echo(
        f"monotone at 5%: {throughput:.2f}% of {found.steps[0]} steps in throughput, {latency:.2f}% of "
        f"{found.steps[1]} in latency (paper: 97, 96)"
    )
    write_atomic(RESULTS, json.dumps(found.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
