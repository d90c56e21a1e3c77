"""xgpt plan"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from xgpt.cli.options import Decimal, constraint_options, json_option, problem_options, read_constraint, search_options

if TYPE_CHECKING:
    from xgpt.app.planning import Subject
    from xgpt.app.sizing import Choice
    from xgpt.schema import Constraint, KvPromise, Plan


@click.command("plan")
@constraint_options
@problem_options
@click.option(
    "--policy",
    type=click.Choice(["auto", "exegpt", "rra", "waa", "chunked", "orca", "static"]),
    default="auto",
    show_default=True,
    help="auto: the best of all policies; exegpt: the better of rra and waa.",
)
@search_options
@click.option(
    "--arrival-rate",
    type=Decimal(0, min_open=True),
    metavar="R",
    help="Requests a second to sustain; the latency bound then counts from arrival, waiting included.",
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
    type=click.Choice(["fcfs", "sjf", "lpt", "edf", "das"]),
    default="fcfs",
    show_default=True,
    help="Which waiting request enters next: fcfs, the earliest arrival; sjf, the shortest prompt; lpt, the longest "
    "output (finishes a given set of requests soonest); edf, the earliest deadline; das, by prompt length and deadline "
    "(TCB).",
)
@click.option("-o", "--output", default="plan.json", show_default=True, metavar="FILE", help="Where to write the plan.")
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
    policy: Any,
    search: str | None,
    kv: Any,
    arrival_rate: float | None,
    devices: str | None,
    among: str | None,
    order: Any,
    output: str,
    as_json: bool,
) -> None:
    """Find the schedule that serves the most under a latency bound, and write plan.json.

    Served most is what --objective says: by default the highest rate at which requests may arrive.

    \b
    Examples:
      xgpt plan --latency-bound 9.8
      xgpt plan --latency-bound inf --model llama-3.1-8b --cluster h200x1 --workload azure-conv
      xgpt plan --latency-bound 8 --model opt-13b --cluster a40x4 --arrival-rate 12 --devices auto
      xgpt plan --latency-bound 8 --model opt-13b --arrival-rate 12 --among a40x4=0.5,h100x8=2.9
    """
    import time
    from pathlib import Path

    from xgpt.app.arrivals import with_capacities
    from xgpt.app.checking import check_planned
    from xgpt.app.planning import plan_each, resolve
    from xgpt.app.simulating import with_joint_lengths
    from xgpt.app.sizing import cheapest, fewest_devices
    from xgpt.app.wording import (
        arrivals_in_words,
        headroom_in_words,
        joint_in_words,
        missing_in_words,
        objective_in_words,
        placement_in_words,
        proof_in_words,
        schedule_in_words,
    )
    from xgpt.cli import render
    from xgpt.errors import InfeasibleError, InputError
    from xgpt.io import dump_json, write_atomic
    from xgpt.resolve import load_trace

    bounds = {"latency_bound_s": latency_bound, "quantile": quantile, "ttft_s": ttft, "tpot_s": tpot}
    bounds |= {"headroom": headroom}
    constraint = read_constraint(bounds, objective, sla, search, arrival_rate)
    search = search or "branch-and-bound"
    if (devices == "auto" or among is not None) and arrival_rate is None:
        raise InputError("--devices" if among is None else "--among", devices or among, "it goes with --arrival-rate")
    choices: list[Choice] = []
    with render.progress_bar() as progress:
        if among is None:
            subject = resolve(model, cluster, workload, profile_path, progress, price, dtype)
        else:
            _alone(devices, price, profile_path)
            subjects = [resolve(model, name, workload, None, progress, each, dtype) for name, each in _priced(among)]
    if among is not None:
        choices = cheapest(subjects, constraint, policy, kv)
        subject, max_devices = choices[0].subject, choices[0].num_devices
        if max_devices is None:
            raise InfeasibleError(
                "arrival_rate_per_s: " + "; ".join(str(choice.why_not) for choice in choices),
                nearest_bound_s=None,
                binding="arrival_rate_per_s",
            )
    elif devices == "auto":
        max_devices = fewest_devices(subject, constraint, policy, kv)
    else:
        max_devices = _count(devices, subject.cluster.num_devices)
    started = time.perf_counter()
    with render.progress_bar() as progress:
        plans = plan_each(subject, constraint, policy, search, kv, order, max_devices, progress)
    plans = with_capacities(plans, subject.profile)
    best = next(iter(plans.values()))
    planning_s = time.perf_counter() - started
    trace = load_trace(workload)
    if trace is not None:
        best = with_joint_lengths(best, subject.profile, trace)
    if subject.cluster.is_local:
        check_planned(best)
    text = dump_json(best)
    write_atomic(Path(output), text)
    if as_json:
        click.echo(text, nl=False)
        return
    bound = "no latency bound" if latency_bound is None else f"latency bound {latency_bound:g} s"
    render.show(
        f"{subject.model.name} on {subject.cluster.name} ({subject.cluster.device.name}), workload "
        f"{subject.workload.name}, {bound}",
        f"maximised: {objective_in_words(best.constraint)}; planned in {planning_s:.1f} s",
        *headroom_in_words(best),
        *([render.choices_table(choices)] if choices else []),
        render.plans_table(plans),
        *missing_in_words(policy, plans),
        f"chosen: {best.policy.kind}: {schedule_in_words(best)}",
        *([f"placement: {placement_in_words(best)}"] if subject.cluster.num_devices > 1 else []),
        f"proof: {proof_in_words(best)}",
        *arrivals_in_words(best),
        *joint_in_words(best),
        *_against_uniform(best, subject, constraint, search, kv, max_devices),
        f"profile: {best.profile.source}, sha256 {best.profile.sha256[:12]}",
        *(f"warning: {warning}" for warning in best.estimate.warnings),
        *([f"warning: {best.seeded_weights}; plan with --model DIRECTORY to serve"] if best.seeded_weights else []),
        f"wrote {output}; next: xgpt serve {output}",
    )


def _count(devices: str | None, most: int) -> int | None:
    from xgpt.errors import InputError

    if devices is None:
        return None
    if not devices.isdecimal() or not 1 <= int(devices) <= most:
        raise InputError("--devices", devices, f"give auto, or a number from 1 to {most}")
    return int(devices)


def _alone(devices: str | None, price: float | None, profile_path: str | None) -> None:
    """Refuse options that cannot take effect with --among."""
    from xgpt.errors import InputError

    chosen = click.get_current_context().get_parameter_source("cluster") is click.core.ParameterSource.COMMANDLINE
    for name, value in (
        ("--cluster", "given, too" if chosen else None),
        ("--devices", devices),
        ("--price", price),
        ("--profile", profile_path),
    ):
        if value is not None:
            raise InputError(name, value, "--among brings its own: leave it out")


def _priced(among: str) -> list[tuple[str, float]]:
    """Return the names and prices in text like a40x4=0.5,h100x8=2.9."""
    from math import isfinite

    from xgpt.errors import InputError
    from xgpt.numbers import decimal

    found = []
    for part in among.split(","):
        name, _, price = part.strip().rpartition("=")
        try:
            value = decimal(price)
        except ValueError:
            value = 0.0
        if not name or not (isfinite(value) and value > 0):
            raise InputError("--among", part, "write CLUSTER=PRICE,CLUSTER=PRICE with prices above 0")
        found.append((name, value))
    return found


def _against_uniform(
    best: Plan, subject: Subject, constraint: Constraint, search: str, kv: KvPromise, max_devices: int | None
) -> list[str]:
    """Return a line on the best uniform plan, where the chosen one need not be uniform."""
    from xgpt.app.arrivals import maximised
    from xgpt.app.planning import is_uniform, plan_uniform
    from xgpt.app.wording import settings_text

    if subject.cluster.num_devices == 1 or constraint.arrival_rate_per_s is not None:
        return []
    if is_uniform(best):
        return ["best uniform plan (equal stages, no rra, no waa): the chosen one"]
    uniform = plan_uniform(subject, constraint, search, kv, max_devices)
    if uniform is None:
        return ["no uniform plan (equal stages, no rra, no waa) keeps the bound"]
    gain = maximised(best) / maximised(uniform) - 1
    what = f"{uniform.policy.kind}, {settings_text(uniform)}: {maximised(uniform):.3f} req/s"
    than = f"{100 * abs(gain):.1f}% {'more' if gain >= 0 else 'less'}"
    return [f"best uniform plan: {what}; the chosen one serves {than}"]
