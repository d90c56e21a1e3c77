"""xgpt export"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from xgpt.cli.outputs import output_option, unchecked_file, write

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
@output_option("Where to write the files.", default=".", metavar="DIR")
def command(plan_path: str, target: Target, output: str, force: bool) -> None:
    """Write the files that start a plan, or a day's fleet, on another machine or platform.

    \b
    Examples:
      xgpt export plan.json --to k8s -o deploy
      xgpt export fleet.json --to k8s -o deploy
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.exporting.export import start_command

    files = api.export(plan_path, target)
    written = {name: unchecked_file(Path(output) / name) for name in files}
    for name, file in written.items():
        file.check(files[name])  # all of them before the first is written
    for name, file in written.items():
        write(file, files[name])
    click.echo(f"start with `{start_command(target)}` in {output}")
