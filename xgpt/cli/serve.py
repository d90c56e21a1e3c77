"""xgpt serve"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from xgpt.cli.options import Decimal, Whole, engine_option

if TYPE_CHECKING:
    from xgpt.schema import EngineKind

LOG_LEVELS = ("debug", "info", "warning", "error")


@click.command("serve")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; one beyond this machine needs --api-key-file.",
)
@click.option(
    "--port", type=Whole(0, 65535), default=8000, show_default=True, help="Port to listen on; 0: any free one."
)
@click.option(
    "--api-key-file", metavar="FILE", help="File with a line [NAME] KEY [SETTINGS] for each key; SIGHUP reads it again."
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
    show_default=True,
    help="Requests that may wait at a time; further ones are answered with 429.",
)
@click.option(
    "--answer-within",
    "answer_within_s",
    type=Decimal(0, min_open=True),
    metavar="S",
    help="Longest time to a whole answer, waiting included; a request that would take longer gets 429 at once.",
)
@click.option(
    "--request-timeout",
    "request_timeout_s",
    type=Decimal(0),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Longest time to a whole answer; after it the request ends with 504. 0: no limit.",
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
    help="Time for running requests to finish after SIGTERM.  [default: 30]",
)
@click.option(
    "--shutdown-delay",
    "shutdown_delay_s",
    type=Decimal(0),
    default=0,
    metavar="S",
    help="Time after SIGTERM in which requests are still accepted and /ready already answers 503, so that load "
    "balancers notice.  [default: 0]",
)
@click.option(
    "--ssl-certfile", metavar="FILE", help="PEM certificate; with it the server speaks HTTPS, TLS 1.2 or newer."
)
@click.option("--ssl-keyfile", metavar="FILE", help="The certificate's private key, if it is in a separate file.")
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="Least severe records to log."
)
@click.option("--no-replan", is_flag=True, help="Keep the plan, whatever lengths are observed.")
@click.option(
    "--profile", "profile_path", metavar="FILE", help="The plan's profile. Default: the one kept on this machine."
)
@click.option("--checkpoint", metavar="DIR", help="Directory of the weights, if not where the plan says.")
@engine_option
@click.option(
    "--nnodes", type=Whole(1), default=1, show_default=True, help="Number of machines that run the plan together."
)
@click.option("--node-rank", type=Whole(0), default=0, show_default=True, help="Rank of this machine among them.")
@click.option("--rdzv-endpoint", "rendezvous", metavar="HOST:PORT", help="Address at which machine 0 is reached.")
@click.option("--dry-run", is_flag=True, help="Check devices, memory and checkpoint, and start nothing.")
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Send OpenTelemetry traces there; the standard OTEL_... variables are read, too.",
)
@click.option("--step-log", metavar="FILE", help="Write every executed step to FILE, one JSON line each.")
def command(
    plan_path: str,
    host: str,
    port: int,
    api_key_file: str | None,
    allowed_hosts: tuple[str, ...],
    max_waiting: int,
    answer_within_s: float | None,
    request_timeout_s: float,
    default_max_tokens: int | None,
    max_max_tokens: int | None,
    drain_s: float | None,
    shutdown_delay_s: float,
    ssl_certfile: str | None,
    ssl_keyfile: str | None,
    log_level: str,
    no_replan: bool,
    profile_path: str | None,
    checkpoint: str | None,
    engine: EngineKind,
    nnodes: int,
    node_rank: int,
    rendezvous: str | None,
    dry_run: bool,
    otlp_endpoint: str | None,
    step_log: str | None,
) -> None:
    """Run a plan behind an OpenAI-compatible endpoint.

    When lengths change, the server switches to a better plan: see http://HOST:PORT/ and /plan/history. Logs are JSON
    on standard error, one line a request, with its id and never its prompt.

    A plan for several devices is run by a process for each. On several machines start the same command on each, with
    --nnodes, its own --node-rank, and the environment variable XGPT_CLUSTER_SECRET, the same everywhere; machine 0
    answers requests. Tensors travel unencrypted: such machines need a network of their own.

    \b
    Example:
      xgpt serve plan.json --port 8000
      curl localhost:8000/v1/completions -d '{"model": "opt-125m", "prompt": [2, 100, 200], "max_tokens": 8}'
    """
    from pathlib import Path

    from xgpt.app.checking import check_plan, located, missing
    from xgpt.app.serving import Exposure, Nodes, join_nodes, serve_plan
    from xgpt.errors import InputError
    from xgpt.io import load_json
    from xgpt.schema import Plan
    from xrunner.server import Limits

    plan = located(load_json(Path(plan_path), Plan, "plan"), checkpoint)
    key_path, certificate, private = (None if p is None else Path(p) for p in (api_key_file, ssl_certfile, ssl_keyfile))
    exposure = Exposure(host, port, key_path, allowed_hosts, certificate, private)
    exposure.check()
    exposure.tls()
    nodes = Nodes.of(nnodes, node_rank, rendezvous)
    limits = Limits(
        max_waiting=max_waiting,
        answer_within_s=answer_within_s,
        request_timeout_s=request_timeout_s or None,
        default_max_tokens=default_max_tokens,
        max_max_tokens=max_max_tokens,
    )
    if answer_within_s is not None and not plan.estimate.predicts_rate:
        raise InputError("--answer-within", answer_within_s, "the plan's estimate is 0; plan again, or leave it out")
    if engine == "vllm":
        from xgpt.app.serving_vllm import check_plan_for_vllm

        if nodes is not None:
            raise InputError("nnodes", nnodes, "vLLM is started on this machine alone; leave it out, or --engine vllm")
        click.echo(f"vLLM {check_plan_for_vllm(plan)}{'' if dry_run else ': starting'}", err=True)
    elif dry_run:
        check_plan(plan, nnodes)
    if dry_run:
        lines = [*missing(plan, profile_path, replan=not no_replan), f"{plan_path} can be served here"]
        click.echo("\n".join(lines), err=True)
        return
    if nodes is not None and nodes.rank:
        join_nodes(plan, nodes)
        return
    serve_plan(
        plan,
        exposure,
        limits,
        drain_s=drain_s,
        shutdown_delay_s=shutdown_delay_s,
        log_level=log_level,
        step_log=None if step_log is None else Path(step_log),
        replan=not no_replan,
        profile_path=profile_path,
        nodes=nodes,
        engine=engine,
        otlp_endpoint=otlp_endpoint,
    )
