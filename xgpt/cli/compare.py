"""xgpt compare"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from xgpt.cli.options import constraint_options, json_option, problem_options, refuse_idle, search_options
from xgpt.cli.outputs import output_file, output_option, write
from xgpt.cli.values import Whole

if TYPE_CHECKING:
    from xgpt.core.schema import Plan


@click.command("compare")
@constraint_options
@problem_options
@search_options
@click.option(
    "--current",
    metavar="COMMAND|FILE",
    help="What runs today, to be scored in the same table: a command of vLLM, SGLang or TensorRT-LLM, a docker run, "
    "or a Compose file, pod manifest or Helm values that start one.",
)
@output_option("Write --current as a plan, for xgpt simulate, report and bench.")
@click.option("--measure", is_flag=True, help="Also run each plan on this machine.")
@click.option(
    "--requests",
    "num_requests",
    type=Whole(1),
    default=300,
    help="With --measure: number of requests for each plan.",
)
@click.option("--seed", type=Whole(0), default=0, help="With --measure: seed of lengths.")
@json_option
def command(output: str | None, force: bool, as_json: bool, **asked: Any) -> None:
    """Compare every policy, each at its own best under the same bound.

    \b
    Examples:
      xgpt compare --latency-bound 9.8
      xgpt compare --latency-bound 9.8 --measure --requests 300
      xgpt compare --latency-bound 4 --model llama-3.1-8b --cluster h200x1 --price 3.5 \\
        --current 'vllm serve llama --max-num-seqs 128 --max-num-batched-tokens 2048' -o current.json
    """
    from xgpt import api
    from xgpt.cli import render
    from xgpt.comparing.compare import gain_in_words
    from xgpt.core.io import dump_json, sha256
    from xgpt.core.schema.outputs import CompareOutput, GainOutput
    from xgpt.reporting.plan_text import settings_text

    if asked["current"] is None:
        refuse_idle(["output"], "it goes with --current: only what runs now is written")
    if not asked["measure"]:
        refuse_idle(["num_requests", "seed"], "it goes with --measure")
    file = None if output is None else output_file(output)

    def announce(plan: Plan) -> None:
        click.echo(f"measuring {plan.policy.kind}: {settings_text(plan)}; plan {sha256(plan)[:12]}", err=True)

    with render.progress_bar() as progress:
        found = api.compare(**asked, progress=progress, on_start=announce)
    if file is not None and found.current is not None:
        write(file, dump_json(found.current))
    if as_json:
        document = CompareOutput(
            plans=found.plans,
            relaxed=list(found.relaxed.values()),
            current=found.current,
            current_notes=list(found.notes),
            gain=None if found.gain is None else GainOutput(**found.gain._asdict()),
            measured=found.measured,
        )
        click.echo(document.model_dump_json(indent=1))
        return
    render.show(render.plans_table(found.plans))
    if found.current is not None:
        table = render.plans_table({"current": found.current}, "what runs now, up to its own arrival rate")
        render.show(table, *found.notes, gain_in_words(found.best, found.current))
        if output is not None:
            render.show(f"next: xgpt simulate {output} --arrival-rate R")
    if found.relaxed:
        render.show(render.relaxed_table(found.best, found.relaxed))
    if found.measured:
        render.show(render.measured_table(found.plans, found.measured))
