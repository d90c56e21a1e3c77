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
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond this machine only with --api-key-file.")
@click.option("--port", type=Whole(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--api-key-file", metavar="FILE", help="Lines of [NAME] KEY [SETTINGS]; SIGHUP reloads.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="Further name of this server.")
@click.option(
    "--max-waiting",
    type=Whole(1),
    default=4096,
    show_default=True,
    help="Waiting requests; more get 429.",
)
@click.option(
    "--answer-within",
    "answer_within_s",
    type=Decimal(0, min_open=True),
    metavar="S",
    help="Time to a whole answer, waiting included; a request that would take longer gets 429.",
)
@click.option(
    "--request-timeout",
    "request_timeout_s",
    type=Decimal(0),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Time to a whole answer; then 504. 0: as long as it takes.",
)
@click.option(
    "--default-max-tokens",
    type=Whole(1),
    metavar="N",
    help="Of a request that names none.  [default: completions 16, chats the rest of the context]",
)
@click.option("--max-max-tokens", type=Whole(1), metavar="N", help="Largest max_tokens of a request.")
@click.option(
    "--drain-timeout", "drain_s", type=Decimal(1), metavar="S", help="To end in after SIGTERM.  [default: 30]"
)
@click.option(
    "--shutdown-delay",
    "shutdown_delay_s",
    type=Decimal(0),
    default=0,
    metavar="S",
    help="After SIGTERM only /ready changes for so long: load balancers learn to send no more.  [default: 0]",
)
@click.option("--ssl-certfile", metavar="FILE", help="PEM certificate: answer by HTTPS, TLS 1.2 or newer.")
@click.option("--ssl-keyfile", metavar="FILE", help="Its private key, where that is in a file of its own.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@click.option("--no-replan", is_flag=True, help="Keep the plan, whatever lengths come.")
@click.option("--profile", "profile_path", metavar="FILE", help="The plan's profile; the one kept here by default.")
@click.option("--checkpoint", metavar="DIR", help="The weights, where they are not where the plan says.")
@engine_option
@click.option("--nnodes", type=Whole(1), default=1, show_default=True, help="Machines that run it together.")
@click.option("--node-rank", type=Whole(0), default=0, show_default=True, help="Which of them this is.")
@click.option("--rdzv-endpoint", "rendezvous", metavar="HOST:PORT", help="Where machine 0 is met.")
@click.option("--dry-run", is_flag=True, help="Check devices, memory and checkpoint; start nothing.")
@click.option("--otlp-endpoint", metavar="URL", help="Send traces there; the standard OTEL_... variables count, too.")
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

    When lengths change, it goes over to a better plan (see http://HOST:PORT/ and /plan/history).
    Logs are JSON on standard error, one line a request, with its id and never its prompt.

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
