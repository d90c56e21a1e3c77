"""Run `xgpt plan`: write plan.json, and print the plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from xgpt import api
from xgpt.checkpoints import hub
from xgpt.cli import options, render
from xgpt.cli.outputs import output_file, write
from xgpt.core.io import dump_json
from xgpt.reporting import plan_text
from xgpt.reporting.engine_command import command_in_words
from xprofiler.others import differences

if TYPE_CHECKING:
    from xgpt.core.schema import Plan
    from xgpt.solving import Planned


def run(output: str, force: bool, as_json: bool, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    file = output_file(output)
    with render.progress_bar() as progress:
        planned = api.solve(**{"latency_bound_s": None, **options.given()}, progress=progress)
    text = dump_json(planned.best)
    write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        render.show(*_summary(planned), *_next(planned.best, output))


def _next(best: Plan, output: str) -> list[str]:
    """Return the next command for the plan: serve it if it is for this machine, else report it."""
    return [f"next: xgpt {'serve' if best.cluster.is_local else 'report'} {output}"]


def _summary(planned: Planned) -> Iterator[object]:
    """Yield the subject, each policy's plan, and the evidence for the chosen one."""
    problem, best = planned.problem, planned.best
    bound_s = best.constraint.latency_bound_s
    bound = "no latency bound" if bound_s is None else f"latency bound {bound_s:g} s"
    yield (
        f"{problem.model.name} on {problem.cluster.name} ({problem.cluster.device.name}), workload "
        f"{problem.workload.name}, {bound}"
    )
    yield f"maximised: {plan_text.objective_in_words(best.constraint)}; planned in {planned.planning_s:.1f} s"
    yield from plan_text.own_objective_in_words(planned.plans)
    yield from plan_text.classes_in_words(best)
    yield from plan_text.headroom_in_words(best)
    yield from plan_text.engine_in_words(best)
    yield from plan_text.ranges_from_rows(best)
    if planned.choices:
        yield render.choices_table(planned.choices)
    yield render.plans_table(planned.plans)
    yield from plan_text.missing_in_words(planned.request.policy, planned.plans)
    yield f"chosen: {best.policy.kind}: {plan_text.schedule_in_words(best)}"
    if planned.why_not_fewer:
        yield planned.why_not_fewer
    if problem.cluster.num_devices > 1:
        yield f"placement: {plan_text.placement_in_words(best)}"
    yield f"proof: {plan_text.proof_in_words(best)}"
    yield from plan_text.arrivals_in_words(best)
    yield from plan_text.ranges_on_this_machine(best)
    yield from plan_text.speculation_in_words(best, planned.ahead)
    yield from plan_text.log_in_words(planned.request.workload, best)
    yield from command_in_words(planned.plans)
    yield from plan_text.reuse_in_words(best)
    yield from plan_text.mixing_in_words(best)
    yield from plan_text.joint_in_words(best)
    if (uneven := planned.best_uneven()) is not None:
        yield plan_text.uneven_in_words(best, uneven)
    if planned.may_be_uneven:
        yield plan_text.uniform_in_words(best, planned.best_uniform())
    yield plan_text.profile_in_words(best)
    if best.cluster.is_local and (line := differences(problem.profile)) is not None:
        yield line
    yield from (f"warning: {warning}" for warning in best.estimate.warnings)
    if best.seeded_weights and best.cluster.is_local:
        yield f"warning: {best.seeded_weights}; to serve real weights, plan with --model DIRECTORY"
    elif best.seeded_weights:
        name = hub.id_of_shipped(best.model.name) or "DIRECTORY or --model ORGANISATION/NAME"
        yield f"weights: the plan names no checkpoint; to export it, plan with --model {name}"
