"""Run `xgpt compare`, and print its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.options import output_file, refuse_idle, write
from xgpt.comparing.compare import NOT_RELAXED, gain_in_words
from xgpt.core.io import dump_json, sha256
from xgpt.core.schema.documents import CompareOutput
from xgpt.reporting.engine_command import command_in_words, engine_command
from xgpt.reporting.plan_text import limit_in_words, settings_text
from xscheduler.expression import maximised

if TYPE_CHECKING:
    from xgpt.comparing.compare import Compared
    from xgpt.core.schema import Plan


def compare(output: str | None, force: bool, as_json: bool, current: str | None, measure: bool, **_: Any) -> None:
    """Run the command that `commands.py` declares."""
    if current is None:
        refuse_idle(["output"], "it needs --current: only the current deployment is written")
    if not measure:
        refuse_idle(["num_requests", "seed"], "it needs --measure")
    file = None if output is None else output_file(output)

    def announce(plan: Plan) -> None:
        click.echo(f"measuring {plan.policy.kind}: {settings_text(plan)}; plan {sha256(plan)[:12]}", err=True)

    def tell(found: Compared) -> None:
        progress.pause()
        if file is not None and found.current is not None:
            write(file, dump_json(found.current))
        if not as_json:
            _show(found, output)

    with render.progress_bar() as progress:
        asked = {"latency_bound_s": None, **options.given()}
        found = api.compare(**asked, progress=progress, on_start=announce, on_found=tell)
    if as_json:
        document = CompareOutput(
            plans=found.plans,
            relaxed=list(found.relaxed.values()),
            current=found.current,
            current_notes=list(found.notes),
            gain=found.gain,
            gain_ranges=found.ranges,
            keeps_current=found.keeps_current,
            answer=found.answer,
            command=next(filter(None, (engine_command(plan, found.kept) for plan in found.plans.values())), None),
            measured=found.measured,
        )
        click.echo(document.model_dump_json(indent=1))
        return
    if found.relaxed:
        render.show(render.relaxed_table(found.best, found.relaxed))
    elif found.notes and found.notes[-1].startswith(NOT_RELAXED):
        render.show(found.notes[-1])
    if found.measured:
        render.show(render.measured_table(found.plans, found.measured))


def _show(found: Compared, output: str | None) -> None:
    """Print the plans, and the comparison with the current deployment."""
    tables = [render.plans_table(found.plans)]
    commands = command_in_words(found.plans, found.kept)
    highest = max(found.plans.values(), key=maximised)  # its search covers the schedules of all policies
    if highest.search.gap is not None:
        commands.insert(0, f"proof: {limit_in_words(highest)}")
    if found.current is None:
        render.show(*tables, *commands)
        return
    title = "the current deployment at its highest arrival rate" + (": keep it" if found.keeps_current else "")
    tables.insert(0 if found.keeps_current else 1, render.plans_table({"current": found.current}, title))
    range_ = found.ranges.get(next(iter(found.plans)))
    render.show(*tables, *found.notes, *found.answer, gain_in_words(found.best, found.current, range_), *commands)
    if output is not None:
        render.show(f"next: xgpt simulate {output} --arrival-rate R")
