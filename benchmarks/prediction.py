"""Compare predictions with measurements on this machine: three workloads, at saturation and at three arrival rates.

    python -m benchmarks.prediction [--quick] [--workload tcb ...] [--policy chunked] [--dtype int8]
                                    [--every-policy]

First the machine is profiled. Each plan's hash is printed before the plan is served and measured. The simulation has
exactly the requests that were sent. Nothing is fitted afterwards. The aims refer to the raw error. The table also shows
the error at the machine's pace (measured divided by predicted time of the executed steps), and how many figures are
within their stated ranges. `--quick` ends within 11 minutes and names the loads that were not measured. `--kept` uses
the stored profile of this machine, so that many short loads can be measured (`--seconds 12`). Writes
results/prediction.json, with the workload and the dtype in the name if they are given.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import numpy as np

from benchmarks.lib.aims import AIMS, checked, summary
from benchmarks.lib.results import table
from xgpt import api
from xgpt.benchmark import Load, bench_plan
from xgpt.cli.render import progress_bar
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import sha256, write_atomic
from xgpt.core.schema import SERVED, BenchReport, Constraint, Plan, Profile, RunDType
from xgpt.core.schema.policy import PolicyChoice
from xgpt.core.workload import ArrivalProcess
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xscheduler.objectives.best_plans import plan_each
from xscheduler.problem import Problem
from xscheduler.space import runnable
from xsimulator.executed import Paces, paces
from xsimulator.run import outstanding_requests, requests_to_end

RESULTS = Path("results")
WORKLOADS = ("tcb", "summarization", "chat-short")
SHARES = (0.3, 0.6, 0.85)
"""Arrival rates, as shares of the plan's saturated throughput."""
SECONDS, QUICK_SECONDS = 90.0, 30.0
"""Approximate duration of the measurement of each load."""
QUICK_TOTAL_S = 600.0
"""With `--quick`, no load begins after this time."""
LEAST_REQUESTS, MOST_REQUESTS = 24, 300
BOUND_FACTOR = 2.0
"""Factor by which the plans' bound exceeds the nearest bound."""
SIZES = ((1, 4), (5, 16), (17, 63), (64, 10**6))
"""Ranges of a step's tokens with separate paces. If the paces are equal, the machine causes the error. If they differ,
the profile does."""


class Row(NamedTuple):
    """The result of one load of one plan.

    Attributes:
        by_size: the pace of the steps in each range of `SIZES`, or None if there were none.
    """

    plan: Plan
    report: BenchReport
    by_size: tuple[float | None, ...]

    @property
    def load(self) -> str:
        rate = self.report.arrival_rate_per_s
        return "saturated" if rate is None else f"{rate:.2f}/s"


@click.command()
@click.option("--model", default="opt-125m", show_default=True)
@click.option("--workload", "workloads", multiple=True, default=WORKLOADS, show_default=True)
@click.option("--policy", default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(get_args(RunDType)), help="Data type.  [default: as in `xgpt plan`]")
@click.option("--every-policy", is_flag=True, help="Measure each policy's plan at saturation, not only the best one.")
@click.option("--quick", is_flag=True, help="End within 11 minutes.")
@click.option("--kept", is_flag=True, help="Use the cached profile of this machine, if there is one.")
@click.option(
    "--seconds", type=float, help=f"Duration of each load.  [default: {SECONDS:g}; with --quick {QUICK_SECONDS:g}]"
)
@click.option("--seed", default=0, show_default=True)
def main(
    model: str,
    workloads: tuple[str, ...],
    policy: PolicyChoice,
    dtype: RunDType | None,
    every_policy: bool,
    quick: bool,
    kept: bool,
    seconds: float | None,
    seed: int,
) -> None:
    """Profile the machine, plan for each workload, and measure the plan under each load."""
    seconds = seconds or (QUICK_SECONDS if quick else SECONDS)
    started = time.perf_counter()
    asked = {"model": model, "dtype": dtype}
    with progress_bar() as progress:
        if not kept:
            api.profile(progress=progress, **asked)  # plans use this profile from now on
        profile = resolve(plan_request(**asked), progress).profile
    served = profile.provenance.get(SERVED, "timed one by one")
    click.echo(f"profile {sha256(profile)[:12]}, {served}, spread {100 * profile.spread:.1f}%")
    plans = [plan for name in workloads for plan in _plans(asked | {"workload": name}, policy, every=every_policy)]
    rows: list[Row] = []
    left_out: list[str] = []
    path = _results(workloads, dtype)
    for share in (0.0, *SHARES):
        for plan, is_best in plans:
            if share and not is_best:
                continue
            if quick and time.perf_counter() - started > QUICK_TOTAL_S:
                left_out.append(f"{plan.workload.name} at {share:g} of saturation")
                continue
            load = _load(plan, share, seconds)
            rows.append(_measured(plan, profile, load, seed))
            click.echo("  " + " | ".join(_cells(rows[-1])))
            _write(path, rows)
    click.echo("\n".join(table(_columns(), map(_cells, rows))))
    click.echo("\n".join(summary([checked(row.report) for row in rows])))
    if left_out:
        click.echo("left out, as the time was over: " + ", ".join(left_out))


def _results(workloads: tuple[str, ...], dtype: str | None) -> Path:
    names = ("prediction", *(() if workloads == WORKLOADS else workloads), *([] if dtype is None else [dtype]))
    return RESULTS / f"{'-'.join(names)}.json"


def _plans(asked: dict[str, Any], policy: PolicyChoice, *, every: bool) -> Iterator[tuple[Plan, bool]]:
    """Yield plans for a workload under a bound that leaves room for waiting, and whether each is the best one."""
    subject = resolve(plan_request(**asked))
    bound_s = round(BOUND_FACTOR * _nearest_bound(subject), 1)
    plans = plan_each(subject.under(Constraint(latency_bound_s=bound_s)), policy)
    for i, plan in enumerate(plans.values()):
        if not i or every:
            click.echo(f"{plan.workload.name}: {plan.policy.kind}: {settings_text(plan)}: plan {sha256(plan)}")
            yield plan, not i


def _nearest_bound(subject: Problem) -> float:
    nearest: list[float] = []
    policies: tuple[PolicyChoice, ...] = ("rra", "chunked", "orca", "static")
    able = runnable(policies, subject.model)
    for policy in (policy for policy in policies if policy in able):
        try:
            plan_each(subject.under(Constraint(latency_bound_s=1e-6)), policy)
        except InfeasibleError as error:
            assert error.nearest_bound_s is not None
            nearest.append(error.nearest_bound_s)
    return max(nearest)


def _load(plan: Plan, share: float, seconds: float) -> Load:
    """Return a load that lasts about `seconds`. A share of 0 means saturation."""
    rate = plan.estimate.throughput_rps * (share or 1.0)
    beside = outstanding_requests(plan) if share else requests_to_end(plan, 0)
    count = int(np.clip(round(seconds * rate) - beside, LEAST_REQUESTS, MOST_REQUESTS))
    return Load(count, arrivals=ArrivalProcess.at(rate) if share else None)


def _measured(plan: Plan, profile: Profile, load: Load, seed: int) -> Row:
    report, log = bench_plan(plan, load, np.random.default_rng(seed), profile=profile)
    return Row(plan, report, _by_size(paces(plan, profile, log)))


def _by_size(found: Paces | None) -> tuple[float | None, ...]:
    if found is None:
        return (None,) * len(SIZES)
    within = [found.where((found.tokens >= low) & (found.tokens <= high)) for low, high in SIZES]
    return tuple(paces.ratio if len(paces.tokens) else None for paces in within)


def _cells(row: Row) -> list[str]:
    def percent(error: float | None) -> str:
        return "-" if error is None else f"{100 * error:+.1f}%"

    def pace(ratio: float | None) -> str:
        return "-" if ratio is None else f"{ratio:.3f}"

    found = checked(row.report)
    cells = [row.plan.workload.name, row.load, f"{row.plan.policy.kind} {settings_text(row.plan)}"]
    cells += [row.report.plan_sha256[:8], str(row.report.num_requests), pace(row.report.pace)]
    for name in AIMS:
        measured, error, of_model = found[name][:3] if name in found else (None, None, None)
        cells += ["-" if measured is None else f"{measured:.3f}", percent(error), percent(of_model)]
    return [*cells, *map(pace, row.by_size)]


def _columns() -> list[str]:
    names = {"throughput_rps": "req/s", "latency_s": "latency s", "ttft": "ttft s", "itl_p99_s": "itl p99 s"}
    figures = [text for name in AIMS for text in (names.get(name, "whole s"), "raw", "at the pace")]
    sizes = [f"pace, {low} tokens and more" for low, _ in SIZES]
    return ["workload", "load", "plan", "hash", "requests", "pace", *figures, *sizes]


def _write(path: Path, rows: list[Row]) -> None:
    document = [
        {"plan": row.plan.model_dump(mode="json"), "report": row.report.model_dump(mode="json"), "pace": row.by_size}
        for row in rows
    ]
    write_atomic(path, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
