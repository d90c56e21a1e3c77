"""Run `xgpt compare`, and print its recommendation and tables."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.options import output_file, refuse_idle, write
from xgpt.cli.run import answered, summary
from xgpt.comparing.compare import Compared
from xgpt.core.io import dump_json
from xgpt.core.schema.documents import CompareOutput
from xgpt.deciding import words


def compare(output: str | None, force: bool, as_json: bool, explain: bool, current: str | None, **_: Any) -> None:
    if current is None:
        refuse_idle(["output"], "it needs --current: only the current deployment is written")
    file = None if output is None else output_file(output)
    with render.progress_bar() as progress:
        asked = {"latency_bound_s": None, **options.given(), "progress": progress, "path": output}
        found, refusal = answered(lambda: api.compare(**asked))
    if file is not None and found.current is not None:
        write(file, dump_json(found.current))
    if as_json:
        document = CompareOutput(
            plans=found.plans,
            relaxed=list(found.relaxed.values()),
            current=found.current,
            current_notes=list(found.notes),
            recommendation=found.recommendation,
            gain_ranges=found.ranges,
            answer=found.answer,
        )
        click.echo(document.model_dump_json(indent=1))
    else:
        click.echo("\n".join(words.told(found.recommendation, explain, _how_to_write(found))))
        if explain:
            _explain(found)
    if refusal is not None:
        raise refusal


def _how_to_write(found: Compared) -> str:
    """Return what writes the plan that the printed command serves, or "" if the command needs none."""
    told, engine = found.recommendation, found.best.engine
    if told.action == "keep" or all("plan.json" not in process.command for process in told.best.processes):
        return ""
    more = "" if engine is None else f" --engine {engine.framework}"
    return f"xgpt plan with these options, --model {found.planned.request.model}{more} writes plan.json."


def _explain(found: Compared) -> None:
    parts = [*summary(found.planned)]
    if found.current is not None:
        parts += ["what runs now:", *(f"  {said}" for said in (*found.notes, *found.answer))]
        parts.append(render.plans_table({"current": found.current}, "the current deployment"))
    if found.ranges:
        parts.append(render.assumptions_table(found.ranges))
    if found.relaxed:
        parts.append(render.relaxed_table(found.highest, found.relaxed))
    render.show("", *parts)
