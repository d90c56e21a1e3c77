"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from xgpt.io import ConfigKind

DTYPES = ["float32", "float16", "bfloat16", "int8", "float8"]

F = TypeVar("F", bound=Callable[..., Any])


class Whole(click.IntRange):
    """An integer in a range; refuses 1_0 and digits of other alphabets, which Python would take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from xgpt.numbers import whole

        try:
            return super().convert(whole(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)


class Decimal(click.FloatRange):
    """A number in a range; refuses nan, inf and what `Whole` refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from xgpt.numbers import decimal

        try:
            return super().convert(decimal(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)


class Seconds(click.ParamType):
    """A time above zero; `inf` (where allowed) means no bound and becomes None."""

    name = "seconds"

    def __init__(self, *, allow_inf: bool = False) -> None:
        self.allow_inf = allow_inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        from xgpt.numbers import decimal

        accepted = "seconds above 0" + (", or inf for no bound" if self.allow_inf else "")
        try:
            seconds = math.inf if value == "inf" else decimal(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number; give {accepted}", param, ctx)
        if self.allow_inf and seconds == math.inf:
            return None
        if not (math.isfinite(seconds) and seconds > 0):
            self.fail(f"{value!r} is not accepted; give {accepted}", param, ctx)
        return seconds


def _names(kind: ConfigKind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completes the names of shipped configs, and behind them files."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from xgpt.io import config_names

        found = [CompletionItem(name) for name in config_names(kind) if name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]

    return complete


class Rates(click.ParamType):
    """Arrivals a second: R, or stages R:SECONDS,R:SECONDS,R."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from xgpt.numbers import decimal

        stages = []
        for part in str(value).split(","):
            rate, colon, seconds = part.strip().partition(":")
            try:
                stage = decimal(rate), decimal(seconds) if colon else None
            except ValueError:
                self.fail(f"{part!r} is not accepted; write R, or stages R:SECONDS,R:SECONDS,R", param, ctx)
            if any(number is not None and not number > 0 for number in stage):
                self.fail(f"{part!r} is not accepted; rates and seconds are above 0", param, ctx)
            stages.append(stage)
        return stages


def _add(options: list[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command


config_option = click.option(
    "--config",
    metavar="FILE",
    help="config.json of a Hugging Face id. Default: that of huggingface_hub's cache; the network is never asked.",
)


def problem_options(command: F) -> F:
    """--model, --config, --cluster, --dtype, --workload, --price, --profile, --engine: what is planned for."""
    lengths = click.option(
        "--workload",
        default="summarization",
        show_default=True,
        shell_complete=_names("workloads"),
        help="Name, YAML file, CSV or JSON lines.",
    )
    return _planned_for(command, lengths)


def replica_options(command: F) -> F:
    """The same without --workload: what replicas are planned for that take requests of a trace."""
    return _planned_for(command)


def _planned_for(command: F, *lengths: Callable[[F], F]) -> F:
    return _add(
        [
            click.option(
                "--model",
                default="opt-125m",
                show_default=True,
                shell_complete=_names("models"),
                help="Name, YAML file, checkpoint directory, or Hugging Face id.",
            ),
            config_option,
            click.option(
                "--cluster",
                default="local",
                show_default=True,
                shell_complete=_names("clusters"),
                help="Name or YAML file.",
            ),
            click.option(
                "--dtype", type=click.Choice(DTYPES), help="Type to run in. Default: the model's own; float32 on a CPU."
            ),
            *lengths,
            click.option(
                "--price",
                type=Decimal(0, min_open=True),
                metavar="P",
                help="Price of one device for an hour, in any currency. Default: the cluster file's.",
            ),
            click.option("--profile", metavar="FILE", help="Use this profile instead of the cached one."),
            click.option(
                "--engine",
                metavar="NAME",
                help="Engine that is to run the plan (vllm-0.15, tensorrt-llm-1.0, …), or a YAML file; "
                "vllm: its newest version. Default: the profile's.",
            ),
        ],
        command,
    )


def bound_options(command: F) -> F:
    """Bounds on requests from their arrival on."""
    return _add(
        [
            _latency_option("Latency that --attain of all requests must keep, from arrival to the last token."),
            *_parts(),
            _headroom(),
        ],
        command,
    )


def constraint_options(command: F) -> F:
    """The bounds that a schedule must keep."""
    return _add(
        [
            _latency_option(
                "Latency that --quantile of all requests must keep. With --objective arrivals it counts from "
                "arrival to the last token; with saturated from admission, as --sla says."
            ),
            click.option(
                "--objective",
                type=click.Choice(["arrivals", "saturated"]),
                help="What to maximise. arrivals: the highest Poisson arrival rate that keeps the bounds, waiting "
                "included. saturated: throughput while requests are always waiting, latency counted from admission, as "
                "in ExeGPT.  [default: arrivals; saturated with --sla or --search]",
            ),
            click.option(
                "--quantile",
                type=Decimal(0, 1, min_open=True, max_open=True),
                default=0.99,
                show_default=True,
                help="Share of requests that must keep the bounds.",
            ),
            click.option(
                "--sla",
                type=click.Choice(["length", "request"]),
                help="With --objective saturated. length: the bound holds for a request of the quantile's output "
                "length; request: for the quantile of all requests, by simulation.  [default: length]",
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
    """Refuse a command that names no bound at all: options that are not given are read last."""
    parts = (context.params.get(name) for name in ("ttft_s", "tpot_s"))
    is_given = context.get_parameter_source("latency_bound_s") is not click.core.ParameterSource.DEFAULT
    if not (is_given or context.resilient_parsing) and all(part is None for part in parts):
        raise click.UsageError("Missing option '--latency-bound'; give it in seconds, or --ttft or --tpot", context)
    return bound_s


def _parts() -> list[Callable[[F], F]]:
    """--ttft, --tpot: bounds on parts of a request's time."""
    return [
        click.option("--ttft", "ttft_s", type=Seconds(), metavar="S", help="Bound on the time to first token."),
        click.option("--tpot", "tpot_s", type=Seconds(), metavar="S", help="Bound on the mean time per output token."),
    ]


def _headroom() -> Callable[[F], F]:
    return click.option(
        "--headroom",
        type=Decimal(0, 1, max_open=True),
        metavar="SHARE",
        help="By which share steps may take longer than predicted before a bound is broken.  [default: the "
        "known error of the profile's kind (0.05 measured, 0.1 imported, 0.12 by a datasheet), or its spread]",
    )


POLICIES = ["auto", "exegpt", "rra", "waa", "waa-c", "waa-m", "chunked", "orca", "static", "slack", "phases"]

policy_option = click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default="auto",
    show_default=True,
    help="auto: the best of all policies but slack and phases; exegpt: the better of rra and waa; waa: the better of "
    "waa-c, which divides the devices between encoding and decoding by computation, and waa-m, which does by memory; "
    "slack: chunked with as many prompt tokens a step as running requests have time for under --tpot; phases: rra that "
    "encodes once enough requests wait, or one for long enough. These two are tuned by simulation.",
)


def priced(among: str) -> dict[str, float]:
    """Return the names and prices in text like a40x4=0.5,h100x8=2.9."""
    from xgpt.errors import InputError
    from xgpt.numbers import decimal

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
    return _add(
        [
            click.option(
                "--search",
                type=click.Choice(["branch-and-bound", "exhaustive", "optuna"]),
                help="With --objective saturated.  [default: branch-and-bound]",
            ),
            click.option(
                "--kv",
                type=click.Choice(["reserve", "quantile"]),
                default="reserve",
                show_default=True,
                help="How K/V memory is promised. reserve: each request's maximum is set aside. quantile: requests are "
                "admitted up to the p99.9 of what they use together, and preempted where that does not suffice.",
            ),
        ],
        command,
    )


def load_options(num_requests: int) -> Callable[[F], F]:
    """--workload, --requests, --arrival-rate, --profile, --seed: what a plan is run with."""

    def add(command: F) -> F:
        return _add(
            [
                click.option("--workload", help="Name, YAML file, CSV or JSON lines; the plan's own by default."),
                click.option(
                    "--requests",
                    "num_requests",
                    type=Whole(1),
                    help="Number of requests that are measured; some more run before and after them.  [default: "
                    f"{num_requests}; what the stages of --arrival-rate come to]",
                ),
                click.option(
                    "--arrival-rate",
                    "arrival_rate_per_s",
                    type=Rates(),
                    metavar="R|R:S,…",
                    help="Poisson arrivals a second, or stages of them: 2:60,8:30,2 is 2 a second for 60 s, 8 for "
                    "30 s, then 2. Default: requests are always waiting.",
                ),
                click.option(
                    "--profile", metavar="FILE", help="The plan's profile. Default: the one kept on this machine."
                ),
                click.option(
                    "--seed", type=Whole(0), default=0, show_default=True, help="Seed of lengths and arrivals."
                ),
            ],
            command,
        )

    return add


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")

batching_option = click.option(
    "--batching",
    type=click.Choice(["flat", "padded", "rows", "slots"]),
    default="flat",
    show_default=True,
    help="Layout of a batch. flat: without padding. padded: a row for each request. rows: requests one behind the "
    "other in rows. slots: in slots of rows, which leave once they have ended. All but flat take a plan of --policy "
    "static for one device.",
)

engine_option = click.option(
    "--engine",
    type=click.Choice(["native", "vllm"]),
    default="native",
    show_default=True,
    help="What runs the plan: xgpt's own engine, or vLLM under xgpt's schedule.",
)
