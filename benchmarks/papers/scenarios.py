"""The bars of ExeGPT's Figures 6 and 8, found one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.papers.settings import (
    BOUND_QUANTILES,
    LARGE,
    LARGE_TASKS,
    SMALL,
    SMALL_TASKS,
    best,
    faster_transformer,
    problem,
    workload_of,
)


class Scenario(NamedTuple):
    """One bar, in requests a second.

    Attributes:
        quantile: of FasterTransformer's latencies that is the bound; None: no bound.
        ft: FasterTransformer as the paper ran it.
        static: static batches at their own best placement; None: none keeps the bound.
        ours: the best of rra and waa; of the large models rra's, as in the paper.
        seconds: what the search for ours took.
    """

    large: bool
    model: str
    cluster: str
    task: str
    quantile: float | None
    bound_s: float | None
    ft: float
    static: float | None
    ours: float | None
    policy: str | None
    seconds: float

    @property
    def over_ft(self) -> float | None:
        return None if self.ours is None or not self.ft else self.ours / self.ft

    @property
    def over_static(self) -> float | None:
        return None if self.ours is None or self.static is None else self.ours / self.static


def names(large: bool) -> Iterator[tuple[str, str, str]]:
    """Model, cluster and task of each group of bars."""
    for model, cluster in LARGE if large else SMALL:
        for task in LARGE_TASKS if large else SMALL_TASKS:
            yield model, cluster, task


def find(large: bool, model: str, cluster: str, task: str) -> list[Scenario]:
    """A bar for each bound."""
    workload = workload_of(task, model)
    baseline = faster_transformer(problem(model, cluster, workload))
    found = []
    for quantile, bound_s in zip(BOUND_QUANTILES, baseline.bounds(), strict=True):
        of = problem(model, cluster, workload, bound_s)
        ours, static = best(of, ["rra"] if large else ["rra", "waa"]), best(of, ["static"])
        found.append(
            Scenario(
                large,
                model,
                cluster,
                task,
                quantile,
                bound_s,
                baseline.at(bound_s),
                None if static is None else static.estimate.throughput_rps,
                None if ours is None else ours.estimate.throughput_rps,
                None if ours is None else ours.policy.kind,
                0.0 if ours is None else ours.search.seconds,
            )
        )
    return found
