"""xgpt serve"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import batching_option, engine_option, plan_profile_option
from xgpt.cli.outputs import force_option
from xgpt.cli.values import Decimal, OfClass, Whole

LOG_LEVELS = ("debug", "info", "warning", "error")


@click.command("serve")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; one beyond this machine needs --api-key-file.",
)
@click.option("--port", type=Whole(0, 65535), default=8000, help="Port to listen on; 0: any free one.")
@click.option(
    "--api-key-file",
    metavar="FILE",
    help="File of API keys, one a line: [NAME] KEY [SETTINGS]. SIGHUP makes the server read it again.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that requests may be addressed to, besides this machine's own. Repeatable.",
)
@click.option(
    "--max-waiting",
    type=Whole(1),
    default=4096,
    help="Largest number of waiting requests; further ones get 429.",
)
@click.option(
    "--answer-within",
    "answer_within_s",
    type=OfClass(),
    multiple=True,
    metavar="[CLASS=]S",
    help="Seconds within which an answer must be whole, waiting included; a request that would take longer gets 429 at "
    "once. CLASS=S: for requests of one of the plan's classes. Repeatable.",
)
@click.option(
    "--request-timeout",
    "request_timeout_s",
    type=Decimal(0),
    default=600.0,
    metavar="S",
    help="Seconds after which an answer that is not whole ends with 504. 0: no limit.",
)
@click.option(
    "--default-max-tokens",
    type=Whole(1),
    metavar="N",
    help="max_tokens of a request that names none.  [default: completions 16, chats the rest of the context]",
)
@click.option("--max-max-tokens", type=Whole(1), metavar="N", help="Largest max_tokens that a request may ask for.")
@click.option(
    "--drain-timeout",
    "drain_s",
    type=Decimal(1),
    metavar="S",
    help="Seconds that running requests have to finish after SIGTERM.  [default: 30]",
)
@click.option(
    "--shutdown-delay",
    "shutdown_delay_s",
    type=Decimal(0),
    default=0,
    metavar="S",
    help="Seconds after SIGTERM in which requests are still accepted while /ready answers 503, so that load balancers "
    "notice.",
)
@click.option(
    "--ssl-certfile", metavar="FILE", help="PEM certificate; with it the server speaks HTTPS, TLS 1.2 or newer."
)
@click.option("--ssl-keyfile", metavar="FILE", help="The certificate's private key, if it is in a separate file.")
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    help="Least severity that is logged.",
)
@click.option("--no-replan", is_flag=True, help="Keep the plan, whatever lengths are observed.")
@click.option("--no-reuse", is_flag=True, help="Compute every prompt whole; share no K/V of earlier prompts.")
@plan_profile_option
@click.option("--checkpoint", metavar="DIR", help="Directory of the weights. Default: the plan's.")
@engine_option
@batching_option
@click.option("--nnodes", type=Whole(1), default=1, help="Number of machines that run the plan together.")
@click.option("--node-rank", type=Whole(0), default=0, help="Rank of this machine among them.")
@click.option("--rdzv-endpoint", "rendezvous", metavar="HOST:PORT", help="Address of machine 0.")
@click.option("--dry-run", is_flag=True, help="Check devices, memory and checkpoint, and start nothing.")
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Send OpenTelemetry traces to this URL; the standard OTEL_... variables are read, too.",
)
@click.option(
    "--front",
    type=click.Choice(["endpoint", "smg"]),
    default="endpoint",
    help="What answers HTTP. smg: the Shepherd Model Gateway, before an engine in a process of its own.",
)
@click.option(
    "--admin-port", type=Whole(0, 65535), default=0, help="With --front smg: port of pages, plan and metrics; 0: any."
)
@click.option("--step-log", metavar="FILE", help="Write every executed step to FILE, one JSON line each.")
@force_option
def command(
    plan_path: str,
    answer_within_s: tuple[tuple[str, float], ...],
    request_timeout_s: float,
    no_replan: bool,
    no_reuse: bool,
    dry_run: bool,
    **asked: Any,
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
    asked |= {"answer_within_s": within.pop("", None), "answer_within_of": within}
    timeout_s = request_timeout_s or None
    asked |= {"request_timeout_s": timeout_s, "replan": not no_replan, "reuse": not no_reuse}
    api.serve(plan_path, **asked, on_note=note, dry_run=dry_run)
    if dry_run:
        note(f"{plan_path} can be served here")
