"""Every policy at its own best under one bound, predicted and, where the devices are here, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xgpt.schema import BenchReport, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


def measure_each(
    plans: dict[str, Plan],
    num_requests: int,
    rng: np.random.Generator,
    on_start: Callable[[Plan], None] = lambda plan: None,
) -> dict[str, BenchReport]:
    """Bench each plan on the same engine, one after the other.

    Args:
        on_start: told each plan before it runs, so that its prediction is on record first.
    """
    from xgpt.app.bench import bench_plan

    reports = {}
    for kind, plan in plans.items():
        on_start(plan)
        reports[kind] = bench_plan(plan, plan.workload, num_requests, rng)
    return reports
