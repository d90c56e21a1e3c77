"""A day's fleet as tables and lines on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from xgpt.cli.render import table
from xgpt.reporting.plan_text import bounds_in_words, settings_text

if TYPE_CHECKING:
    from rich.table import Table

    from xgpt.core.schema.fleet import FleetFigures, FleetPlan


def summary(fleet: FleetPlan) -> Iterator[object]:
    """Yield the bounds, the replicas, the day, and its cost compared with other fleets."""
    constraint, plan = fleet.constraint, fleet.kinds[0].plan
    share = f"{100 * constraint.quantile:g}%"
    kept = f"{share} of the day's requests keep {bounds_in_words(constraint)}"
    yield f"{plan.model.name}, {fleet.name}: {kept}"
    yield kinds_table(fleet)
    yield day_table(fleet)
    yield costs_table(fleet)
    over, gap = fleet.constant.figures.cost / max(fleet.planned.cost, 1e-12) - 1, 100 * fleet.gap
    yield (
        f"planned for {fleet.load_factor:.2f} times the load: of the factors that were tried, the smallest with which "
        f"{share} of the requests keep the bounds"
    )
    yield (
        f"proof: even a fleet that knew the whole day in advance would cost at most {gap:.2f}% less; if starting and "
        f"stopping replicas took no time and cost nothing, a fleet would still cost {fleet.least_cost:.4g}"
        + ("" if fleet.is_priced else " device-hours")
    )
    yield f"the cheapest constant fleet costs {100 * over:.0f}% more"
    yield (
        f"planned in {fleet.planning_s:.1f} s; {fleet.num_requests} requests simulated several times in "
        f"{fleet.verifying_s:.1f} s"
    )


def kinds_table(fleet: FleetPlan) -> Table:
    """Return a table of the kinds of replicas."""
    has_price = fleet.is_priced
    rows = [
        [
            kind.name,
            settings_text(kind.plan),
            str(kind.num_devices),
            *([f"{kind.price_per_hour:.3g}"] if has_price else []),
            " / ".join(f"{rate:.2f}" for rate in kind.rates_per_s),
            *([f"{kind.price_per_hour / max(kind.rates_per_s[0], 1e-9) / 3.6:.3g}"] if has_price else []),
            f"{kind.start_s:.0f}",
        ]
        for kind in fleet.kinds
    ]
    columns = ["kind", "settings", "devices", "price/h", "arrivals/s", "cost/1000", "start s"]
    columns = [name for name in columns if has_price or name not in ("price/h", "cost/1000")]
    return table(
        "kinds of replicas, with the arrivals/s that each sustains under each of the day's lengths", columns, rows
    )


def day_table(fleet: FleetPlan) -> Table:
    """Return a table of the day, with equal intervals merged."""
    rows = []
    numbered = enumerate(fleet.intervals)
    for _, part in groupby(numbered, key=lambda item: (item[1].replicas, item[1].lengths)):
        stretch = list(part)
        first, intervals = stretch[0][0], [interval for _, interval in stretch]
        kept = [interval.share_kept for interval in intervals if interval.share_kept is not None]
        rows.append(
            [
                f"{_clock(first * fleet.interval_s)} - {_clock((first + len(intervals)) * fleet.interval_s)}",
                f"{min(one.rate_per_s for one in intervals):.2f} - {max(one.rate_per_s for one in intervals):.2f}",
                str(intervals[0].lengths),
                fleet.in_words(intervals[0].replicas) or "none",
                f"{100 * min(kept):.1f}%" if kept else "-",
            ]
        )
    return table("the day", ["time", "requests/s", "lengths", "replicas", "kept at least"], rows)


def costs_table(fleet: FleetPlan) -> Table:
    """Return a table of the costs of the planned and the constant fleet, and of the requests within the bounds."""

    def row(name: str, figures: FleetFigures) -> list[str]:
        cost = [f"{figures.cost:.4g}"] if fleet.is_priced else []
        return [name, *cost, f"{figures.device_hours:.1f}", str(figures.starts), f"{100 * figures.share_kept:.2f}%"]

    constant = f"constant: {fleet.in_words(fleet.constant.replicas)}"
    rows = [row("planned", fleet.planned), row(constant, fleet.constant.figures)]
    columns = ["fleet", *(["cost"] if fleet.is_priced else []), "device-hours", "starts", "kept"]
    return table("the day's cost", columns, rows)


def _clock(seconds: float) -> str:
    """Return 9000 as 2:30."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}" if seconds % 60 == 0 else f"{seconds:g} s"
