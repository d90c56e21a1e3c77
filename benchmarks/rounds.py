"""Compare the closed form for rounds of steps with random times with the recursion that it replaces.

    python -m benchmarks.rounds [--lanes 2000] [--seed 1] [--fit]

Lanes have 2 to 20 equal stages and up to 40 micro-batches, drawn at random. A step that encodes takes 1.15 to 12 times
as long as another step, with a coefficient of variation of up to 0.9 for the additional time. `--fit` fits the
coefficients of `xsimulator.forecast.pipeline.SHARE` again. Verify them with another seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import click
import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from xsimulator.forecast import pipeline
from xsimulator.forecast.pipeline import RandomSteps

Array = npt.NDArray[np.float64]

LANES_A_SHAPE = 24
NUM_VALUES = 8
"""Number of different times of steps that encode."""
MOST_FITTED = 6.0
"""The fit uses only lanes whose long steps take at most this many times as long as others."""


class Lanes(NamedTuple):
    """Lanes with their stages and micro-batches, and the seconds of a round by the recursion. # [lanes]"""

    stages: int
    microbatches: int
    steps: RandomSteps
    ratio: Array
    """Mean time of a step that encodes, divided by the time of another step."""
    simulated: Array


def recursion(cost: Array, stages: int, microbatches: int) -> Array:
    """Return the seconds of a round. # [lanes, steps] -> [lanes]"""
    count = cost.shape[1]
    free, ends = np.zeros((stages, len(cost))), np.zeros((count, len(cost)))
    for step in range(count):
        now = ends[step - microbatches].copy() if step >= microbatches else np.zeros(len(cost))
        for stage in range(stages):
            np.maximum(now, free[stage], out=now)
            now += cost[:, step]
            free[stage] = now
        ends[step] = now
    first = count // 6
    return microbatches * (ends[-1] - ends[first]) / (count - 1 - first)


def draw(rng: np.random.Generator, num_lanes: int) -> Iterator[Lanes]:
    size = LANES_A_SHAPE
    for _ in range(-(-num_lanes // size)):
        stages = int(np.exp(rng.uniform(np.log(2), np.log(20.9))))
        m = int(np.clip(round(stages * rng.choice([0.5, 1, 1, 1, 2, rng.uniform(0.3, 3)])), 2, 40))
        long = 0.97 * np.exp(rng.uniform(np.log(0.02), 0, size))
        ratio = np.exp(rng.uniform(np.log(1.15), np.log(12), size))
        shape = 1 / np.maximum(rng.uniform(0, 0.9, size), 0.01) ** 2
        beyond = np.sort(rng.gamma(shape[:, None], 1 / shape[:, None], (size, 500 * NUM_VALUES)), axis=1)
        beyond = beyond.reshape(size, NUM_VALUES, -1).mean(axis=2)
        seconds = np.concatenate([np.ones((size, 1)), 1 + (ratio - 1)[:, None] * beyond], axis=1)
        probability = np.column_stack([1 - long, *[long / NUM_VALUES] * NUM_VALUES])
        count = 4000 + 20 * m
        # Each kind of step occurs as often as its probability says, in random order.
        uniform = (np.argsort(rng.random((size, count)), axis=1) + 0.5) / count
        index = (uniform[:, :, None] > np.cumsum(probability, axis=1)[:, None, :-1]).sum(axis=2)
        cost = np.take_along_axis(seconds, index, axis=1)
        steps = RandomSteps(stages * seconds.T, seconds.T, probability.T[None], np.full(size, float(m)))
        yield Lanes(stages, m, steps, ratio, recursion(cost, stages, m))


def fit(lanes: list[Lanes]) -> tuple[float, ...]:
    """Set and return the coefficients with the least mean fourth power of the relative error."""
    bounds = [group.steps.bounds() for group in lanes]
    least, reached = (np.concatenate([bound[i][0] for bound in bounds]) for i in range(2))
    simulated = np.concatenate([group.simulated for group in lanes])
    known = np.concatenate([group.ratio for group in lanes]) <= MOST_FITTED

    def loss(x: Array) -> float:
        pipeline.SHARE = (x[0], x[1], (x[2], x[3]), x[4])
        share = np.concatenate([group.steps.share()[0] for group in lanes])
        return float(np.mean(((least + share * (reached - least)) / simulated - 1)[known] ** 4) ** 0.25)

    found = minimize(loss, [0.7, -0.1, 0.0, 0.0, -0.2], method="Powell")
    loss(found.x)
    return tuple(found.x.round(3).tolist())


@click.command()
@click.option("--lanes", "num_lanes", default=2000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--fit", "fits", is_flag=True, help="fit the coefficients again")
def main(num_lanes: int, seed: int, fits: bool) -> None:
    """Compare, and print the errors with fewer micro-batches than stages, as many, and more."""
    lanes = list(draw(np.random.default_rng(seed), num_lanes))
    if fits:
        click.echo(f"coefficients: {fit(lanes)}")
    for name, group in (
        ("fewer micro-batches than stages", [g for g in lanes if g.microbatches < g.stages]),
        ("as many", [g for g in lanes if g.microbatches == g.stages]),
        ("more", [g for g in lanes if g.microbatches > g.stages]),
    ):
        if not group:
            continue
        error = np.concatenate([g.steps.round()[0] / g.simulated - 1 for g in group])
        mild = np.concatenate([g.ratio for g in group]) < MOST_FITTED
        for what, chosen in (("", mild | True), (f", long steps under {MOST_FITTED:g} times", mild)):
            size = np.abs(error[chosen])
            click.echo(
                f"{name + what:62}{chosen.sum():5} lanes: median {np.median(size):.1%}, "
                f"90% below {np.quantile(size, 0.9):.1%}, worst {size.max():.1%}, bias {error[chosen].mean():+.1%}"
            )


if __name__ == "__main__":
    main()
