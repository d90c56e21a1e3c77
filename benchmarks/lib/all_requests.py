"""Run the scheduler benchmark's scenarios under a bound on all requests (`benchmarks.scheduler --sla request`).

For each task, bounds go from the 10% to the 70% quantile of FasterTransformer's latencies. The table shows the chosen
plan, the number of simulated plans, seconds and processor seconds. Throughput must not fall from a bound to the next
looser one, and no bound may be infeasible if a tighter one is kept. The last line counts violations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import click
import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, Plan
from xscheduler.objectives.best_plans import plan_each
from xscheduler.problem import Problem

NUM_BOUNDS = 7


def rows(problem: Problem, latencies: Sequence[float]) -> tuple[list[str], int]:
    """Return a line for each bound of one task, the tightest first, and how often a looser bound had a worse result."""
    subject = problem
    lines, fallen, best_rps = [], 0, 0.0
    for bound_s in np.geomspace(*np.quantile(latencies, (0.1, 0.7)), NUM_BOUNDS).tolist():
        constraint = Constraint(latency_bound_s=bound_s, sla="request")
        started, on_processor = time.perf_counter(), time.process_time()
        best: Plan | None = None
        with suppress(InfeasibleError):
            best = next(iter(plan_each(subject.under(constraint)).values()))
        seconds = time.perf_counter() - started, time.process_time() - on_processor
        rps = 0.0 if best is None else best.estimate.throughput_rps
        fallen += rps < best_rps * (1 - 1e-9)
        best_rps = max(best_rps, rps)
        what = "no schedule keeps it" if best is None else _found(best)
        where = f"{problem.model.name:10} {problem.cluster.name:8} {problem.workload.name:15}"
        lines.append(f"{where} {bound_s:7.2f}  {what:62} {seconds[0]:6.2f} {seconds[1]:6.2f}")
    return lines, fallen


def _found(plan: Plan) -> str:
    e, values = plan.estimate, "/".join(str(getattr(plan.policy, variable.name)) for variable in plan.policy.variables)
    error = 100 * (e.latency_error or 0.0)
    return (
        f"{plan.policy.kind:8} {values:12} {e.throughput_rps:8.3f} {e.latency_s:7.2f} {error:6.2f}% "
        f"{plan.search.simulations:6}"
    )


def show(tasks: Sequence[tuple[Problem, Sequence[float]]]) -> None:
    click.echo(
        "model      cluster  workload          bound  policy   settings        req/s latency   error simulated"
        "           s  cpu s"
    )
    total = 0
    for problem, latencies in tasks:
        lines, fallen = rows(problem, latencies)
        total += fallen
        click.echo("\n".join(lines))
    click.echo(f"bounds under which less is served than under a tighter one: {total} of {NUM_BOUNDS * len(tasks)}")
