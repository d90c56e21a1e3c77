"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import click

from xgpt.cli.values import Decimal, Rates, Seconds, Whole

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from xgpt.core.io import ConfigKind

DTYPES = ["float32", "float16", "bfloat16", "int8", "float8"]

F = TypeVar("F", bound=Callable[..., Any])


def _names(kind: ConfigKind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a shell completion of the names of shipped configs, then of files."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from xgpt.core.io import config_names

        found = [CompletionItem(name) for name in config_names(kind) if name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]

    return complete


def _add(options: list[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command


config_option = click.option(
    "--config",
    metavar="FILE",
    help="config.json of the model, where --model is a Hugging Face id. Default: the one in huggingface_hub's cache; "
    "nothing is downloaded.",
)

model_option = click.option(
    "--model",
    default="opt-125m",
    shell_complete=_names("models"),
    help="Model: a shipped name, a YAML file, a checkpoint directory, or a Hugging Face id.",
)

cluster_option = click.option(
    "--cluster",
    default="local",
    shell_complete=_names("clusters"),
    help="Devices: local (this machine), local:N (N of its cores), a shipped name, or a YAML file.",
)

dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="Number type to run in. Default: the model's own; float32 on a CPU."
)

kv_dtype_option = click.option(
    "--kv-dtype",
    type=click.Choice(DTYPES),
    help="Number type of keys and values: int8 on CPUs, float8 on GPUs that are planned for. Default: that of --dtype.",
)

plan_profile_option = click.option(
    "--profile", metavar="FILE", help="Profile that the plan was made from. Default: the copy kept on this machine."
)


def problem_options(command: F) -> F:
    """Add the options of a planning problem: model, devices, workload, profile and engine."""
    lengths = click.option(
        "--workload",
        default="summarization",
        shell_complete=_names("workloads"),
        help="Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines.",
    )
    return _planned_for(command, lengths)


def replica_options(command: F) -> F:
    """Add the options of `problem_options` without --workload: a fleet's lengths are those of its trace."""
    return _planned_for(command)


def _planned_for(command: F, *lengths: Callable[[F], F]) -> F:
    return _add(
        [
            model_option,
            config_option,
            cluster_option,
            dtype_option,
            kv_dtype_option,
            *lengths,
            click.option(
                "--price",
                type=Decimal(0, min_open=True),
                metavar="P",
                help="Price of one device for an hour, in any currency. Default: the cluster file's.",
            ),
            click.option(
                "--profile",
                metavar="FILE",
                help="Profile (step times) to plan from. Default: the cached one; without one, this machine is "
                "measured, or the datasheet of its devices is used.",
            ),
            click.option(
                "--engine",
                metavar="NAME",
                help="Engine that will run the plan: a shipped name (vllm-0.15, tensorrt-llm-1.0, …; vllm: its newest "
                "version) or a YAML file. Default: the profile's.",
            ),
        ],
        command,
    )


def bound_options(command: F) -> F:
    """Add the bounds of a fleet, which count from a request's arrival."""
    return _add(
        [
            _latency_option("Seconds from arrival to the last token that --attain of all requests must keep."),
            *_parts(),
            _headroom(),
        ],
        command,
    )


def constraint_options(command: F) -> F:
    """Add the objective and the bounds of a plan."""
    return _add(
        [
            _latency_option(
                "Seconds within which --quantile of all requests must end, or inf for no bound. With --objective "
                "arrivals they count from arrival; with saturated from admission, see --sla."
            ),
            click.option(
                "--objective",
                type=click.Choice(["arrivals", "saturated"]),
                help="What to maximise. arrivals: the highest Poisson arrival rate that keeps the bounds, waiting "
                "included. saturated: throughput while requests are always waiting, latency counted from admission, as "
                "in ExeGPT.  [default: arrivals; saturated with --sla or --search exhaustive]",
            ),
            click.option(
                "--quantile",
                type=Decimal(0, 1, min_open=True, max_open=True),
                default=0.99,
                help="Share of requests that must keep the bounds.",
            ),
            click.option(
                "--sla",
                type=click.Choice(["length", "request"]),
                help="With --objective saturated: what must keep the bound. length: a request whose output has the "
                "quantile's length. request: the quantile of all requests, by simulation.  [default: length]",
            ),
            *_parts(),
            *(
                click.option(
                    f"--{name}-quantile",
                    type=Decimal(0, 1, min_open=True, max_open=True),
                    metavar="SHARE",
                    help=f"Share of requests that must keep --{name} by itself, as in MLPerf's server scenario.  "
                    "[default: --quantile of requests keep all bounds together]",
                )
                for name in ("ttft", "tpot")
            ),
            _headroom(),
        ],
        command,
    )


def _latency_option(text: str) -> Callable[[F], F]:
    return click.option(
        "--latency-bound",
        "latency_bound_s",
        type=Seconds(allow_inf=True),
        callback=_is_bounded,
        metavar="S|inf",
        help=text,
    )


def _is_bounded(context: click.Context, option: click.Parameter, bound_s: float | None) -> float | None:
    """Return the latency bound; refuse a command without any bound (click reads options that are not given last)."""
    parts = (context.params.get(name) for name in ("ttft_s", "tpot_s"))
    is_given = context.get_parameter_source("latency_bound_s") is not click.core.ParameterSource.DEFAULT
    if not (is_given or context.resilient_parsing) and all(part is None for part in parts):
        raise click.UsageError("Missing option '--latency-bound'; give it in seconds, or --ttft or --tpot", context)
    return bound_s


def _parts() -> list[Callable[[F], F]]:
    """Return the options --ttft and --tpot."""
    return [
        click.option(
            "--ttft", "ttft_s", type=Seconds(), metavar="S", help="Bound on the time to first token, in seconds."
        ),
        click.option(
            "--tpot", "tpot_s", type=Seconds(), metavar="S", help="Bound on the mean time per output token, in seconds."
        ),
    ]


def _headroom() -> Callable[[F], F]:
    return click.option(
        "--headroom",
        type=Decimal(0, 1, max_open=True),
        metavar="SHARE",
        help="Share by which steps may take longer than predicted before a bound is broken.  [default: the known "
        "error of the profile's kind (0.05 measured, 0.1 imported, 0.12 from a datasheet), or its spread if larger]",
    )


POLICIES = ["auto", "exegpt", "rra", "waa", "waa-c", "waa-m", "chunked", "orca", "static", "slack"]

policy_option = click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default="auto",
    help="Kind of schedule. rra: encode a batch of prompts, run several decode steps, and again. waa: some devices "
    "encode and the others decode; waa-c divides them by computation, waa-m by memory. chunked: each step decodes and "
    "encodes pieces of prompts. orca: the same with whole prompts. static: a batch runs until all of it has finished. "
    "slack: chunked, with as many prompt tokens a step as running requests have time for under --tpot, tuned by "
    "simulation. exegpt: the better of rra and waa. auto: the best of all but slack.",
)


def priced(among: str | None, asked: dict[str, Any]) -> dict[str, float] | None:
    """Return the names and prices in text like a40x4=0.5,h100x8=2.9, which take the place of --cluster's default."""
    from xgpt.core.errors import InputError
    from xgpt.core.numbers import decimal

    if among is None:
        return None
    if click.get_current_context().get_parameter_source("cluster") is not click.core.ParameterSource.COMMANDLINE:
        del asked["cluster"]
    found: dict[str, float] = {}
    for part in among.split(","):
        name, _, price = part.strip().rpartition("=")
        try:
            value = decimal(price)
        except ValueError:
            value = 0.0
        if not name or name in found or not (math.isfinite(value) and value > 0):
            raise InputError("among", part, "write CLUSTER=PRICE,CLUSTER=PRICE with prices above 0")
        found[name] = value
    return found


def search_options(command: F) -> F:
    """Add --search and --kv."""
    return _add(
        [
            click.option(
                "--search",
                type=click.Choice(["branch-and-bound", "exhaustive", "optuna"]),
                help="Method of search; exhaustive goes with --objective saturated.  [default: branch-and-bound]",
            ),
            click.option(
                "--kv",
                type=click.Choice(["reserve", "quantile"]),
                default="reserve",
                help="How memory for keys and values is promised. reserve: each request's maximum is set aside. "
                "quantile: as many requests enter as fit 99.9% of the time; the newest is preempted where they do not.",
            ),
        ],
        command,
    )


def load_options(num_requests: int) -> Callable[[F], F]:
    """Return a decorator that adds the requests with which a plan is simulated or measured.

    Args:
        num_requests: default of --requests.
    """

    def add(command: F) -> F:
        return _add(
            [
                click.option(
                    "--workload",
                    help="Request lengths: a shipped name, a YAML file, or a trace as CSV or JSON lines. Default: the "
                    "plan's own.",
                ),
                click.option(
                    "--requests",
                    "num_requests",
                    type=Whole(1),
                    help="Number of requests that are measured; some more run before and after them.  [default: "
                    f"{num_requests}, or as many as the stages of --arrival-rate bring]",
                ),
                click.option(
                    "--arrival-rate",
                    "arrival_rate_per_s",
                    type=Rates(),
                    metavar="R|R:S,…",
                    help="Poisson arrivals a second, or stages of them: 2:60,8:30,2 is 2 a second for 60 s, 8 for "
                    "30 s, then 2. Default: requests are always waiting.",
                ),
                plan_profile_option,
                click.option("--seed", type=Whole(0), default=0, help="Seed of lengths and arrivals."),
            ],
            command,
        )

    return add


def refuse_idle(names: Collection[str], accepted: str) -> None:
    """Refuse those of the running command's options, by parameter, that were given and would have no effect.

    Raises:
        InputError: `accepted` says what they go with.
    """
    from xgpt.core.errors import InputError

    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise InputError(name, context.params[name], accepted)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")

batching_option = click.option(
    "--batching",
    type=click.Choice(["flat", "padded", "rows", "slots"]),
    default="flat",
    help="Layout of a batch. flat: without padding. padded: a row for each request. rows: several requests in each "
    "row, one after the other. slots: rows divided into slots, each freed as soon as it has finished. All but flat "
    "need a plan of --policy static for one device.",
)

engine_option = click.option(
    "--engine",
    type=click.Choice(["native", "vllm"]),
    default="native",
    help="What runs the plan: xgpt's own engine, or vLLM under xgpt's schedule.",
)
