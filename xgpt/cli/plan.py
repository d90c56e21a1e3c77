"""xgpt plan"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from xgpt.cli.options import constraint_options, json_option, policy_option, priced, problem_options, search_options
from xgpt.cli.outputs import output_file, output_option, write
from xgpt.cli.values import Decimal

if TYPE_CHECKING:
    from xgpt.solving import Planned


@click.command("plan")
@constraint_options
@problem_options
@policy_option
@search_options
@click.option(
    "--arrival-rate",
    "arrival_rate_per_s",
    type=Decimal(0, min_open=True),
    metavar="R",
    help="Requests a second that the plan must sustain; the latency bound then counts from arrival.",
)
@click.option(
    "--burstiness",
    type=Decimal(0, min_open=True),
    metavar="CV",
    help="Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts.  [default: 1]",
)
@click.option(
    "--devices",
    metavar="auto|N",
    help="Use at most N devices of the cluster; auto: the fewest that sustain --arrival-rate.",
)
@click.option(
    "--among",
    metavar="CLUSTER=PRICE,…",
    help="Instead of --cluster: choose the cheapest of these clusters that sustains --arrival-rate, on the fewest "
    "devices. PRICE is that of one device for an hour.",
)
@click.option(
    "--order",
    type=click.Choice(["fcfs", "in-time", "sjf", "lpt", "edf", "das"]),
    default=None,
    help="Which waiting request enters next: fcfs, the earliest arrival; in-time, the earliest of as many as can "
    "keep --ttft, then the others, the longest prompts; sjf, the shortest prompt; lpt, the longest "
    "output (finishes a given set of requests soonest); edf, the earliest deadline; das, by prompt length and deadline "
    "(TCB).  "
    "[default: fcfs; slack also tries in-time]",
)
@click.option(
    "--fix",
    multiple=True,
    metavar="NAME=N",
    help="Hold a control variable at a value, as in --fix token_budget=8192 --fix max_batch=128. Those of the "
    "placement: tp, ep, pp, replicas. Policies without that variable are left out. Repeatable.",
)
@output_option("Where to write the plan.", default="plan.json")
@json_option
def command(
    devices: str | None,
    among: str | None,
    fix: tuple[str, ...],
    output: str,
    force: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Find the schedule with the highest throughput under a latency bound, and write plan.json.

    --objective says which throughput: by default the highest arrival rate at which the bound is kept.

    \b
    Examples:
      xgpt plan --latency-bound 9.8
      xgpt plan --latency-bound inf --model llama-3.1-8b --cluster h200x1 --workload azure-conv
      xgpt plan --latency-bound 8 --model opt-13b --cluster a40x4 --arrival-rate 12 --devices auto
      xgpt plan --latency-bound 8 --model opt-13b --cluster a40x4 --fix tp=2 --fix max_batch=64
      xgpt plan --latency-bound 8 --model opt-13b --arrival-rate 12 --among a40x4=0.5,h100x8=2.9
    """
    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.io import dump_json

    file = output_file(output)
    clusters = priced(among, asked)
    with render.progress_bar() as progress:
        planned = api.solve(**asked, devices=_count(devices), among=clusters, fix=_held(fix), progress=progress)
    text = dump_json(planned.best)
    write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        render.show(*_summary(planned), f"next: xgpt serve {output}")


def _summary(planned: Planned) -> Iterator[object]:
    """Yield what was planned, each policy's plan, and the evidence for the chosen one."""
    from xgpt.cli import render
    from xgpt.reporting import plan_text

    problem, best = planned.problem, planned.best
    bound_s = best.constraint.latency_bound_s
    bound = "no latency bound" if bound_s is None else f"latency bound {bound_s:g} s"
    yield (
        f"{problem.model.name} on {problem.cluster.name} ({problem.cluster.device.name}), workload "
        f"{problem.workload.name}, {bound}"
    )
    yield f"maximised: {plan_text.objective_in_words(best.constraint)}; planned in {planned.planning_s:.1f} s"
    yield from plan_text.classes_in_words(best)
    yield from plan_text.headroom_in_words(best)
    yield from plan_text.engine_in_words(best)
    if planned.choices:
        yield render.choices_table(planned.choices)
    yield render.plans_table(planned.plans)
    yield from plan_text.missing_in_words(planned.request.policy, planned.plans)
    yield f"chosen: {best.policy.kind}: {plan_text.schedule_in_words(best)}"
    if problem.cluster.num_devices > 1:
        yield f"placement: {plan_text.placement_in_words(best)}"
    yield f"proof: {plan_text.proof_in_words(best)}"
    yield from plan_text.arrivals_in_words(best)
    yield from plan_text.reuse_in_words(best)
    yield from plan_text.mixing_in_words(best)
    yield from plan_text.joint_in_words(best)
    if planned.may_be_uneven:
        yield plan_text.uniform_in_words(best, planned.best_uniform())
    yield f"profile: {best.profile.source}, sha256 {best.profile.sha256[:12]}"
    yield from (f"warning: {warning}" for warning in best.estimate.warnings)
    if best.seeded_weights:
        yield f"warning: {best.seeded_weights}; plan with --model DIRECTORY to serve"


def _count(devices: str | None) -> Any:
    """Return the text as a number if it is one; the API refuses any other text but "auto"."""
    return int(devices) if devices is not None and devices.isdecimal() else devices


def _held(fix: tuple[str, ...]) -> dict[str, int]:
    """Return the names and values in texts like max_batch=128."""
    from xgpt.core.errors import InputError
    from xgpt.core.numbers import whole

    found = {}
    for part in fix:
        name, _, value = (text.strip() for text in part.partition("="))
        try:
            found[name] = whole(value)
        except ValueError:
            found[name] = 0
        if not name or found[name] < 1:
            raise InputError("--fix", part, "write NAME=N, a whole number of at least 1")
    return found
