"""Predicted against measured on this machine: every policy at its best under a tight, a middle and no bound.

    python -m benchmarks.prediction [--requests 300] [--model opt-125m] [--workload summarization] [--chosen-only]

The machine is profiled afresh; then each plan is made, its hash printed, and only then is it served and measured.
Nothing is fitted afterwards. Writes results/prediction.WORKLOAD.json and .md; the last is
docs/results/prediction.md.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click
import numpy as np

from xgpt.app.bench import Load
from xgpt.app.comparing import measure_each
from xgpt.app.plan_text import settings_text
from xgpt.app.planning import plan_each
from xgpt.app.problems import resolve
from xgpt.app.profiles import obtain_profile
from xgpt.app.request import PolicyChoice, plan_request
from xgpt.cli.render import progress_bar
from xgpt.errors import InfeasibleError
from xgpt.io import sha256, write_atomic
from xgpt.schema import BenchReport, Constraint, Plan, Profile
from xscheduler.problem import Problem
from xscheduler.space import runnable

RESULTS = Path("results/prediction.json")
COLUMNS = (
    "bound s", "policy", "settings", "plan", "req/s", "measured", "error", "latency s", "measured", "error",
    "ttft s", "measured", "itl p99 s", "measured", "bound kept", "GFLOP/s",
)  # fmt: skip


@click.command()
@click.option("--requests", "num_requests", default=300, show_default=True)
@click.option("--model", default="opt-125m", show_default=True)
@click.option("--workload", default="summarization", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--chosen-only", is_flag=True, help="Measure only the best plan under each bound.")
def main(num_requests: int, model: str, workload: str, seed: int, chosen_only: bool) -> None:
    """Profile, plan for three bounds, then measure each policy's plan."""
    asked = plan_request(model=model, workload=workload)
    with progress_bar() as progress:
        subject = resolve(asked, progress)
        checkpoint = None if subject.checkpoint is None else Path(subject.checkpoint)
        profile = obtain_profile(subject.model, checkpoint, subject.cluster, progress, refresh=True)
    subject = resolve(asked)
    assert subject.profile == profile
    nearest = _nearest_bound(subject)
    bounds = (round(2 * nearest, 1), round(5 * nearest, 1), None)
    click.echo(f"profile {sha256(profile)[:12]}, spread {100 * profile.spread:.1f}%; bounds {bounds}")

    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for bound in bounds:
        plans = plan_each(subject.under(Constraint(latency_bound_s=bound)))
        if chosen_only:
            plans = dict(list(plans.items())[:1])
        reports = measure_each(plans, profile, Load(num_requests), rng, on_start=_announce)
        for kind, report in reports.items():
            rows.append({"plan": plans[kind].model_dump(mode="json"), "report": report.model_dump(mode="json")})
            click.echo("  " + " | ".join(_row(plans[kind], report)))
        _write(rows, num_requests, profile)


def _nearest_bound(subject: Problem) -> float:
    """The tightest bound that every policy keeps."""
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


def _announce(plan: Plan) -> None:
    bound = plan.constraint.latency_bound_s
    click.echo(f"bound {bound}: {plan.policy.kind}: {settings_text(plan)}: plan {sha256(plan)}")


def _row(plan: Plan, report: BenchReport) -> list[str]:
    figures = {figure.metric: figure for figure in report.figures}
    throughput, latency = figures["throughput_rps"], figures["latency_s"]
    kept = {None: "-", True: "yes", False: "NO"}[report.bound_kept]
    return [
        "none" if report.latency_bound_s is None else f"{report.latency_bound_s:g}",
        plan.policy.kind,
        settings_text(plan),
        report.plan_sha256[:8],
        f"{throughput.predicted:.3f}",
        f"{throughput.measured:.3f}",
        f"{100 * throughput.error:+.1f}%",
        f"{latency.predicted:.2f}",
        f"{latency.measured:.2f}",
        f"{100 * latency.error:+.1f}%",
        f"{figures['ttft_s'].predicted:.2f}",
        f"{figures['ttft_s'].measured:.2f}",
        f"{figures['itl_p99_s'].predicted:.3f}",
        f"{figures['itl_p99_s'].measured:.3f}",
        kept,
        "/".join(f"{rate:.0f}" for rate in report.calibration_gflops),
    ]


def _write(rows: list[dict[str, object]], num_requests: int, profile: Profile) -> None:
    """The table so far: a long run that is cut short leaves what it has."""
    plan = Plan.model_validate(rows[0]["plan"])
    write_atomic(RESULTS.with_suffix(f".{plan.workload.name}.json"), json.dumps(rows, indent=1) + "\n")
    pairs = [(Plan.model_validate(row["plan"]), BenchReport.model_validate(row["report"])) for row in rows]
    lines = [
        "# Predicted against measured",
        "",
        f"`python -m benchmarks.prediction --requests {num_requests} --model {plan.model.name} "
        f"--workload {plan.workload.name}`, {datetime.date.today()}, {plan.cluster.device.name}, "
        f"{plan.profile.num_threads} threads, " + ", ".join(f"{k} {v}" for k, v in profile.environment.items()) + ".",
        "",
        "Each plan was made from one fresh profile, its hash printed, then served and measured over HTTP; nothing was",
        "fitted afterwards. Errors are predicted over measured. Latency: from admission to the last token of a request",
        f"whose output has the {plan.constraint.quantile:g} quantile's length. The planner kept "
        f"{100 * plan.constraint.headroom:.1f}% headroom, the profile's own spread. GFLOP/s: a fixed matrix product",
        "before and after each run, which shows the state of a shared machine's clock.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(_row(plan, report)) + " |" for plan, report in pairs),
        "",
    ]
    write_atomic(RESULTS.with_suffix(f".{plan.workload.name}.md"), "\n".join(lines))


if __name__ == "__main__":
    main()
