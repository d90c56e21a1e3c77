"""Types of option values: numbers, times, rates, and values for one class of requests."""

from __future__ import annotations

import math
from typing import Any

import click

from xgpt.core.errors import InputError
from xgpt.core.numbers import decimal, whole


class Whole(click.IntRange):
    """An integer in a range. 1_0 and digits of other alphabets, which Python accepts, are errors."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(whole(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)


class Decimal(click.FloatRange):
    """A number in a range. nan, inf and the errors of `Whole` are errors."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return super().convert(decimal(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a number, such as 0.5 or 12", param, ctx)


class OfClass(click.ParamType):
    """A number above zero for all requests, or CLASS=NUMBER for one class. The value becomes a pair: the class (or "")
    and the number.
    """

    name = "[class=]seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        of_class, equals, number = str(value).rpartition("=")
        if equals and not of_class:
            self.fail(f"{value!r} has no class before =; give S or CLASS=S", param, ctx)
        return of_class, Decimal(0, min_open=True).convert(number, param, ctx)


LONG_S = {"latency_bound_s": 600, "ttft_s": 60, "tpot_s": 2}
"""Bounds from which a note on the unit is printed, since such values are usually in milliseconds."""


class Seconds(click.ParamType):
    """A time above zero. `inf`, if allowed, means no bound."""

    name = "seconds"

    def __init__(self, *, allow_inf: bool = False) -> None:
        self.allow_inf = allow_inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        accepted = "seconds above 0" + (", or inf for no bound" if self.allow_inf else "")
        try:
            seconds = math.inf if value == "inf" else decimal(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number; give {accepted}", param, ctx)
        if seconds <= 0 or (seconds == math.inf and not self.allow_inf):
            self.fail(f"{value!r} is not accepted; give {accepted}", param, ctx)
        if param is not None and LONG_S.get(param.name or "", math.inf) <= seconds < math.inf:
            click.echo(f"note: {param.opts[0]} {value} is in seconds, not in milliseconds", err=True)
        return seconds


class Rates(click.ParamType):
    """Arrivals a second: R, or stages R:SECONDS,R:SECONDS,R."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        stages = []
        for part in str(value).split(","):
            rate, colon, seconds = part.strip().partition(":")
            try:
                stage = decimal(rate), decimal(seconds) if colon else None
            except ValueError:
                self.fail(f"{part!r} is not accepted; write R, or stages R:SECONDS,R:SECONDS,R", param, ctx)
            if any(number is not None and not number > 0 for number in stage):
                self.fail(f"{part!r} is not accepted; rates and seconds must be above 0", param, ctx)
            stages.append(stage)
        return stages


class SecondsOrNone(Decimal):
    """A time. 0 means no limit and becomes None."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) or None


class Prices(click.ParamType):
    """Clusters with their prices, CLUSTER=PRICE,CLUSTER=PRICE."""

    name = "prices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in str(value).split(","):
            name, _, text = part.strip().rpartition("=")
            try:
                price = decimal(text)
            except ValueError:
                price = 0.0
            if not name or name in found or not (math.isfinite(price) and price > 0):
                raise InputError("among", part, "write CLUSTER=PRICE,CLUSTER=PRICE with prices above 0")
            found[name] = price
        return found


class Devices(click.ParamType):
    """A number of devices, or auto. The API rejects other text."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return int(value) if str(value).isdecimal() else str(value)


class RequestsOrAll(click.ParamType):
    """A number of requests, or all."""

    name = "requests"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "all":
            return "all"
        try:
            found = whole(str(value))
        except ValueError:
            found = 0
        if found < 1:
            raise InputError("num_requests", value, "give a whole number of at least 1, or all")
        return found


class DevicesOfEach(click.ParamType):
    """A number of devices, for all clusters or for each: N, or CLUSTER=N,CLUSTER=N."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | dict[str, int]:
        found: dict[str, int] = {}
        for part in str(value).split(","):
            name, _, count = part.strip().rpartition("=")
            try:
                found[name] = whole(count)
            except ValueError:
                found[name] = 0
            if found[name] < 1 or (not name and "," in value):
                raise InputError("devices", part, "write N, or CLUSTER=N,CLUSTER=N with whole numbers of at least 1")
        return found.get("", found)


class Held(click.ParamType):
    """A control variable and its value, NAME=N, as a pair."""

    name = "held"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        name, _, text = (part.strip() for part in str(value).partition("="))
        try:
            number = whole(text)
        except ValueError:
            number = -1
        if not name or number < 0:
            raise InputError("--fix", value, "write NAME=N, with a whole number")
        return name, number


class Acceptance(click.ParamType):
    """Shares of draft tokens that are accepted, SHARE or SHARE,SHARE. Anything else is a file."""

    name = "acceptance"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from xgpt.core.numbers import decimal

        try:
            shares = [decimal(part) for part in str(value).split(",")]
        except ValueError:
            return str(value)
        return shares[0] if len(shares) == 1 else tuple(shares)


KINDS: dict[str, click.ParamType] = {
    "acceptance": Acceptance(),
    "bound": Seconds(allow_inf=True),
    "counts": DevicesOfEach(),
    "devices": Devices(),
    "held": Held(),
    "of_class": OfClass(),
    "positive": Decimal(0, min_open=True),
    "prices": Prices(),
    "requests": RequestsOrAll(),
    "rates": Rates(),
    "seconds": Seconds(),
    "seconds_or_0": SecondsOrNone(0),
}
"""Types of option values that a field's type does not determine (`xgpt.requests.Option.kind`)."""
