"""xgpt compare"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import Whole, constraint_options, json_option, problem_options, read_constraint, search_options


@click.command("compare")
@constraint_options
@problem_options
@search_options
@click.option(
    "--current", metavar="COMMAND", help="The `vllm serve` command that runs today: scored in the same table."
)
@click.option("--measure", is_flag=True, help="Also run each plan on this machine.")
@click.option(
    "--requests",
    "num_requests",
    type=Whole(1),
    default=300,
    show_default=True,
    help="Number of requests a plan, with --measure.",
)
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="With --measure.")
@json_option
def command(
    latency_bound: float | None,
    objective: Any,
    quantile: float,
    sla: Any,
    ttft: float | None,
    tpot: float | None,
    headroom: float | None,
    model: str,
    cluster: str,
    dtype: Any,
    workload: str,
    price: float | None,
    profile_path: str | None,
    search: str | None,
    kv: Any,
    current: str | None,
    measure: bool,
    num_requests: int,
    seed: int,
    as_json: bool,
) -> None:
    """Compare every policy, each at its own best under the same bound.

    \b
    Examples:
      xgpt compare --latency-bound 9.8
      xgpt compare --latency-bound 9.8 --measure --requests 300
      xgpt compare --latency-bound 4 --model llama-3.1-8b --cluster h200x1 --price 3.5 \\
        --current 'vllm serve llama --max-num-seqs 128 --max-num-batched-tokens 2048'
    """
    import json

    import numpy as np

    from xgpt.app.arrivals import with_capacities
    from xgpt.app.comparing import gain_in_words, measure_each, relax, score_current
    from xgpt.app.current import read_vllm_command
    from xgpt.app.planning import plan_each, resolve
    from xgpt.app.wording import settings_text
    from xgpt.cli import render
    from xgpt.errors import InputError
    from xgpt.io import sha256

    bounds = {"latency_bound_s": latency_bound, "quantile": quantile, "ttft_s": ttft, "tpot_s": tpot}
    bounds |= {"headroom": headroom}
    constraint = read_constraint(bounds, objective, sla, search)
    search = search or "branch-and-bound"
    with render.progress_bar() as progress:
        subject = resolve(model, cluster, workload, profile_path, progress, price, dtype)
    if measure and not subject.cluster.is_local:
        raise InputError("--measure", cluster, "only plans for the machine at hand (--cluster local) can be measured")
    running = None if current is None else read_vllm_command(current, subject.cluster)
    scored = None if running is None else score_current(subject, constraint, running)
    plans = plan_each(subject, constraint, "auto", search, kv)
    plans = with_capacities(plans, subject.profile)
    best = next(iter(plans.values()))
    relaxed = relax(subject, constraint, "auto", search, kv)
    reports = {}
    if measure:
        reports = measure_each(
            plans,
            num_requests,
            np.random.default_rng(seed),
            on_start=lambda plan: click.echo(
                f"measuring {plan.policy.kind}: {settings_text(plan)}; plan {sha256(plan)[:12]}", err=True
            ),
        )
    if as_json:
        document = {
            "plans": {kind: plan.model_dump(mode="json") for kind, plan in plans.items()},
            "relaxed": [plan.model_dump(mode="json") for plan in relaxed.values()],
            "current": None if scored is None else scored.model_dump(mode="json"),
            "current_notes": [] if running is None else running.notes,
            "measured": {kind: report.model_dump(mode="json") for kind, report in reports.items()},
        }
        click.echo(json.dumps(document, indent=1))
        return
    render.show(render.plans_table(plans))
    if scored is not None and running is not None:
        render.show(
            render.plans_table({"current": scored}, "what runs now, up to its own arrival rate"),
            *running.notes,
        )
        render.show(gain_in_words(best, scored))
    if relaxed:
        render.show(render.relaxed_table(best, relaxed))
    if reports:
        render.show(render.measured_table(plans, reports))
