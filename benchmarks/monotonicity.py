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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.scheduler import LARGE, SMALL, task_problem
from xgpt.core.io import write_atomic
from xgpt.core.schema.policy import Direction
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES, Space

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
        count_of = counts.setdefault(f"{space.kind}.{axis.variable.name}", Counts(directions))
        count_of.steps += int(both_fit.sum())
        for j, (values, scale, direction) in enumerate(zip((throughput, latency), scales, directions, strict=True)):
            steps = np.diff(np.moveaxis(values, i, -1), axis=-1)[both_fit]
            against = steps if direction == "falls" else -steps
            count_of.broken[j] += [int((against > tolerance * scale).sum()) for tolerance in TOLERANCES]


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


def count_all(only: str | None = None, show: Callable[[str], None] = lambda line: None) -> Monotone:
    """Count the steps of every task, or of one model's."""
    rows: list[dict[str, object]] = []
    steps, broken = np.zeros(2, int), np.zeros((2, len(TOLERANCES)), int)
    for model, cluster, workloads in MODELS:
        if only not in (None, model):
            continue
        for workload in workloads:
            scheduler = Scheduler(task_problem(model, cluster, workload, None))
            counts: dict[str, Counts] = {}
            for kind in POLICIES:
                spaces = scheduler.candidates.spaces(kind)
                if spaces:
                    for i in np.unique(np.linspace(0, len(spaces) - 1, NUM_PLACEMENTS).astype(int)):
                        count(spaces[i], counts)
            for name, axis_counts in counts.items():
                declared = np.asarray([direction != "none" for direction in axis_counts.directions])
                steps += declared * axis_counts.steps
                broken += declared[:, None] * axis_counts.broken
                cells = "  ".join(f"{t:.0%}: {axis_counts.cell(k)}" for k, t in enumerate(TOLERANCES))
                show(f"{model:10} {workload:15} {name:26} {axis_counts.steps:7d} steps  {cells}")
                rows.append({"model": model, "workload": workload, "variable": name, "steps": axis_counts.steps})
                rows[-1] |= {
                    "broken_throughput": axis_counts.broken[0].tolist(),
                    "broken_latency": axis_counts.broken[1].tolist(),
                }
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
