"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

DTYPES = ["float32", "float16", "bfloat16", "float8"]

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.ParamType):
    """A time above zero; `inf` (where allowed) means no bound and becomes None."""

    name = "seconds"

    def __init__(self, *, allow_inf: bool = False) -> None:
        self.allow_inf = allow_inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        accepted = "seconds above 0" + (", or inf for no bound" if self.allow_inf else "")
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number; give {accepted}", param, ctx)
        if self.allow_inf and seconds == math.inf:
            return None
        if not (math.isfinite(seconds) and seconds > 0):
            self.fail(f"{value!r} is not accepted; give {accepted}", param, ctx)
        return seconds


def _add(options: list[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def problem_options(command: F) -> F:
    """--model, --cluster, --dtype, --workload, --price, --profile: what is planned for."""
    return _add(
        [
            click.option(
                "--model", default="opt-125m", show_default=True, help="Name, YAML file, or checkpoint directory."
            ),
            click.option("--cluster", default="local", show_default=True, help="Name or YAML file."),
            click.option("--dtype", type=click.Choice(DTYPES), help="To run in; the model's own, on a CPU float32."),
            click.option(
                "--workload", default="summarization", show_default=True, help="Name, YAML file, CSV or JSON lines."
            ),
            click.option(
                "--price",
                type=click.FloatRange(0, min_open=True),
                metavar="P",
                help="Of one device for an hour, in any currency; the cluster's own by default.",
            ),
            click.option(
                "--profile", "profile_path", metavar="FILE", help="Use this profile instead of the cached one."
            ),
        ],
        command,
    )


def constraint_options(command: F) -> F:
    """The bounds that a schedule must keep."""
    return _add(
        [
            click.option(
                "--latency-bound",
                type=Seconds(allow_inf=True),
                required=True,
                metavar="S|inf",
                help="From admission to the last token, of a request of the quantile's output length.",
            ),
            click.option(
                "--quantile",
                type=click.FloatRange(0, 1, min_open=True, max_open=True),
                default=0.99,
                show_default=True,
            ),
            click.option(
                "--sla",
                type=click.Choice(["length", "request"]),
                default="length",
                show_default=True,
                help="Bound a request of the quantile's length, or the quantile of all requests.",
            ),
            click.option("--ttft", type=Seconds(), metavar="S", help="Bound on the time to first token."),
            click.option("--tpot", type=Seconds(), metavar="S", help="Bound on the mean time per output token."),
        ],
        command,
    )


def search_options(command: F) -> F:
    return _add(
        [
            click.option(
                "--search",
                type=click.Choice(["branch-and-bound", "exhaustive", "optuna"]),
                default="branch-and-bound",
                show_default=True,
            ),
            click.option(
                "--kv",
                type=click.Choice(["reserve", "quantile"]),
                default="reserve",
                show_default=True,
                help="Set each request's maximum aside, or admit to the p99.9 of what is used, and preempt.",
            ),
        ],
        command,
    )


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")

engine_option = click.option(
    "--engine",
    type=click.Choice(["native", "vllm"]),
    default="native",
    show_default=True,
    help="What runs the plan: xgpt's own engine, or vLLM with xgpt's schedule.",
)
