"""xgpt plan"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import constraint_options, json_option, problem_options, search_options


@click.command("plan")
@constraint_options
@problem_options
@click.option(
    "--policy",
    type=click.Choice(["auto", "exegpt", "rra", "waa", "chunked", "orca", "static"]),
    default="auto",
    show_default=True,
    help="auto: the best of all; exegpt: of rra and waa.",
)
@search_options
@click.option(
    "--order",
    type=click.Choice(["fcfs", "sjf", "edf", "das"]),
    default="fcfs",
    show_default=True,
    help="Who of those who wait enters next: who came first, has the shortest prompt or the earliest deadline, or by "
    "prompt and deadline (TCB's DAS).",
)
@click.option("-o", "--output", default="plan.json", show_default=True, metavar="FILE")
@json_option
def command(
    latency_bound: float | None,
    quantile: float,
    sla: Any,
    ttft: float | None,
    tpot: float | None,
    model: str,
    cluster: str,
    workload: str,
    price: float | None,
    profile_path: str | None,
    policy: Any,
    search: str,
    kv: Any,
    order: Any,
    output: str,
    as_json: bool,
) -> None:
    """Find the schedule with the highest throughput under a latency bound, and write plan.json.

    \b
    Examples:
      xgpt plan --latency-bound 9.8
      xgpt plan --latency-bound inf --model llama-3.1-8b --cluster h200x1 --workload azure-conv
    """
    from pathlib import Path

    from xgpt.app.planning import plan_each, resolve
    from xgpt.app.wording import placement_in_words, proof_in_words, schedule_in_words
    from xgpt.cli import render
    from xgpt.io import dump_json, write_atomic
    from xgpt.schema import Constraint

    constraint = Constraint(latency_bound_s=latency_bound, quantile=quantile, sla=sla, ttft_s=ttft, tpot_s=tpot)
    with render.progress_bar() as progress:
        subject = resolve(model, cluster, workload, profile_path, progress, price)
    plans = plan_each(subject, constraint, policy, search, kv, order)
    best = next(iter(plans.values()))
    text = dump_json(best)
    write_atomic(Path(output), text)
    if as_json:
        click.echo(text, nl=False)
        return
    bound = "no latency bound" if latency_bound is None else f"latency bound {latency_bound:g} s"
    render.show(
        f"{subject.model.name} on {subject.cluster.name} ({subject.cluster.device.name}), workload "
        f"{subject.workload.name}, {bound}, headroom {100 * best.constraint.headroom:.1f}%",
        render.plans_table(plans),
        f"chosen: {best.policy.kind}: {schedule_in_words(best)}",
        *([f"placement: {placement_in_words(best)}"] if subject.cluster.num_devices > 1 else []),
        f"proof: {proof_in_words(best)}",
        f"profile: {best.profile.source}, sha256 {best.profile.sha256[:12]}",
        *(f"warning: {warning}" for warning in best.estimate.warnings),
        f"wrote {output}; next: xgpt serve {output}",
    )
