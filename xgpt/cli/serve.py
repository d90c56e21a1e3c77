"""xgpt serve"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli import options
from xgpt.cli.outputs import force_option


@options.command("serve")
@click.argument("plan_path", metavar="PLAN.JSON")
@force_option
def command(
    plan_path: str, answer_within_s: tuple[tuple[str, float], ...], dry_run: bool, force: bool, **_: Any
) -> None:
    """Run a plan behind an OpenAI-compatible endpoint.

    When lengths change, the server switches to a better plan: see http://HOST:PORT/ and /plan/history. Logs are JSON
    on standard error, one line a request, with its id and never its prompt.

    A plan for several devices runs as one process for each device. On several machines, start the same command on
    each, with --nnodes, its own --node-rank, and the same XGPT_CLUSTER_SECRET in the environment; machine 0 answers
    requests. Tensors travel unencrypted, so these machines need a network of their own.

    \b
    Example:
      xgpt serve plan.json --port 8000
      curl localhost:8000/v1/completions -d '{"model": "opt-125m", "prompt": [2, 100, 200], "max_tokens": 8}'
    """
    from xgpt import api

    def note(line: str) -> None:
        click.echo(line, err=True)

    within = dict(answer_within_s)
    if len(within) < len(answer_within_s):
        raise click.UsageError("--answer-within: it is given twice for the same requests; leave one out")
    asked = options.given() | {"answer_within_s": within.pop("", None), "answer_within_of": within, "force": force}
    api.serve(plan_path, **asked, on_note=note)
    if dry_run:
        note(f"{plan_path} can be served here")
