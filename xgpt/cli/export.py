"""xgpt export"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from xgpt.exporting.export import Target


@click.command("export")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "--to",
    "target",
    type=click.Choice(["script", "vllm", "k8s", "dynamo", "llm-d"]),
    required=True,
    help="script: xgpt's own engine, on one or several machines. vllm: the schedule inside vLLM, on one machine. k8s: "
    "either engine on Kubernetes. dynamo, llm-d: the schedule inside vLLM, on these platforms.",
)
@click.option("-o", "--output", default=".", metavar="DIR", help="Where to write the files.")
def command(plan_path: str, target: Target, output: str) -> None:
    """Write the files that start a plan, or a day's fleet, on another machine or platform.

    \b
    Examples:
      xgpt export plan.json --to k8s -o deploy
      xgpt export fleet.json --to k8s -o deploy
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.core.io import write_atomic
    from xgpt.exporting.export import start_command

    files = api.export(plan_path, target)
    for name, text in files.items():
        write_atomic(Path(output) / name, text)
    click.echo(f"wrote {', '.join(files)} to {output}; start with `{start_command(target)}` there")
