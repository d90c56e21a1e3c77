"""Define the types of option values: numbers, times, rates, and values for one class of requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

from xgpt.core.errors import InputError
from xgpt.core.numbers import decimal, duration, seconds, whole

T = TypeVar("T")
S = TypeVar("S")


class Whole(click.IntRange):
    """An integer in a range. Unlike in Python, 1_0 and digits of other alphabets are errors."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(whole(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)


class Decimal(click.FloatRange):
    """A number in a range. nan, inf and what `Whole` rejects are errors."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return super().convert(decimal(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a number, such as 0.5 or 12", param, ctx)


def of_class(value: str) -> tuple[str, float]:
    """Return the class and the number in text such as CLASS=NUMBER, or "" and the number if there is no class. The
    number must be above zero.
    """
    name, equals, number = value.rpartition("=")
    if equals and not name:
        raise click.BadParameter(f"{value!r} has no class before =; give S or CLASS=S")
    return name, Decimal(0, min_open=True).convert(number, None, None)


LONG_S = {"latency_bound_s": 600, "ttft_s": 60, "tpot_s": 2}
"""A larger bound without a unit is refused, since such a value is usually meant in milliseconds."""


class Seconds(click.ParamType):
    """A time above zero, with or without a unit. If `inf` is allowed, it means no bound."""

    name = "seconds"

    def __init__(self, *, allow_inf: bool = False) -> None:
        self.allow_inf = allow_inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        accepted = "seconds above 0, or a unit as in 200ms" + (", or inf for no bound" if self.allow_inf else "")
        try:
            time_s, unit = (math.inf, "") if value == "inf" else seconds(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number; give {accepted}", param, ctx)
        if time_s <= 0 or (time_s == math.inf and not self.allow_inf):
            self.fail(f"{value!r} is not accepted; give {accepted}", param, ctx)
        if param is not None and not unit and LONG_S.get(param.name or "", math.inf) <= time_s < math.inf:
            self.fail(f"{value} would be {duration(time_s)}; write {value}ms or {value}s", param, ctx)
        return time_s


def rates(value: str) -> list[tuple[float, float | None]]:
    """Return (requests per second, seconds or None) for each stage, given as R or R:SECONDS,R:SECONDS,R."""
    stages = []
    for part in value.split(","):
        rate, colon, seconds = part.strip().partition(":")
        try:
            stage = decimal(rate), decimal(seconds) if colon else None
        except ValueError:
            raise click.BadParameter(f"{part!r} is not accepted; write R, or stages R:SECONDS,R:SECONDS,R") from None
        if any(number is not None and not number > 0 for number in stage):
            raise click.BadParameter(f"{part!r} is not accepted; rates and seconds must be above 0")
        stages.append(stage)
    return stages


def _read(number: Callable[[str], T], text: str, otherwise: S) -> T | S:
    try:
        return number(text)
    except ValueError:
        return otherwise


def factor(value: str | float) -> float:
    """Return the factor in text such as x2 or x1.6. A default is a number already."""
    if not isinstance(value, str):
        return value
    found = _read(decimal, value[1:], 0.0) if value[:1] == "x" else 0.0
    if not found > 0:
        raise click.BadParameter(f"{value!r} is not accepted; write a factor above 0, such as x2 or x1.6")
    return found


class SecondsOrNone(Decimal):
    """A time. 0 means no limit, and becomes None."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ValueError):
            value = seconds(str(value))[0]
        return super().convert(value, param, ctx) or None


def prices(value: str) -> dict[str, float]:
    """Return prices per device and hour by cluster, given as CLUSTER=PRICE,CLUSTER=PRICE."""
    found: dict[str, float] = {}
    for part in value.split(","):
        name, _, text = part.strip().rpartition("=")
        price = _read(decimal, text, 0.0)
        if not name or name in found or not (math.isfinite(price) and price > 0):
            raise InputError("among", part, "write CLUSTER=PRICE,CLUSTER=PRICE with prices above 0")
        found[name] = price
    return found


def devices(value: str) -> int | str:
    """Return a number of devices, or auto. The API rejects other text."""
    return _read(whole, value, value)


def requests_or_all(value: str) -> int | str:
    """Return a number of requests, or all."""
    if value == "all":
        return "all"
    found = _read(whole, value, 0)
    if found < 1:
        raise InputError("num_requests", value, "give a whole number of at least 1, or all")
    return found


def devices_of_each(value: str) -> int | dict[str, int]:
    """Return a number of devices for all clusters, given as N, or for each cluster, given as CLUSTER=N,CLUSTER=N."""
    found: dict[str, int] = {}
    for part in value.split(","):
        name, _, count = part.strip().rpartition("=")
        found[name] = _read(whole, count, 0)
        if found[name] < 1 or (not name and "," in value):
            raise InputError("devices", part, "write N, or CLUSTER=N,CLUSTER=N with whole numbers of at least 1")
    return found.get("", found)


def held(value: str) -> tuple[str, int]:
    """Return the control variable and its value, given as NAME=N."""
    name, _, text = (part.strip() for part in value.partition("="))
    number = _read(whole, text, -1)
    if not name or number < 0:
        raise InputError("--fix", value, "write NAME=N, with a whole number")
    return name, number


def assigned(value: str) -> tuple[str, str]:
    """Return the variable and its value, given as NAME=VALUE."""
    name, equals, text = value.partition("=")
    if not equals or not name.isidentifier():
        raise InputError("--set", value, "write NAME=VALUE")
    return name, text


def acceptance(value: str) -> float | tuple[float, ...] | str:
    """Return the acceptance of drafts, given as SHARE, as SHARE,SHARE or as the name of a file.
    `PlanRequest.acceptance` states what these mean.
    """
    try:
        shares = [decimal(part) for part in value.split(",")]
    except ValueError:
        return value
    return shares[0] if len(shares) == 1 else tuple(shares)


KINDS: dict[str, click.ParamType | Callable[[str], object]] = {
    "acceptance": acceptance,
    "assigned": assigned,
    "bound": Seconds(allow_inf=True),
    "counts": devices_of_each,
    "devices": devices,
    "factor": factor,
    "held": held,
    "of_class": of_class,
    "positive": Decimal(0, min_open=True),
    "prices": prices,
    "requests": requests_or_all,
    "rates": rates,
    "seconds": Seconds(),
    "seconds_or_0": SecondsOrNone(0),
}
"""Types of option values by their names in `xgpt.requests.Option.kind`, for fields whose own type is not enough."""
