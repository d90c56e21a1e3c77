"""Write a self-contained page that compares a day's fleet with the cheapest constant fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xgpt.core.schema.fleet import FleetFigures, FleetPlan
from xgpt.deciding.phrases import tenths
from xgpt.deciding.verified import unverified
from xgpt.pages import render
from xgpt.reporting.plan_text import OF_WINDOW, bounds_in_words, settings_text

if TYPE_CHECKING:
    from xgpt.pages.charts import Chart


IN_EACH = {"interval": ", and for more in intervals that would break them, but for chance", "day": ""}
"""What follows on the load for which a fleet is planned, by `FleetPlan.slo_window`."""


def fleet_report(fleet: FleetPlan) -> str:
    """Return the page as HTML that loads no other files."""
    constraint, plan = fleet.constraint, fleet.kinds[0].plan
    saved = 1 - fleet.planned.cost / fleet.constant.figures.cost if fleet.constant.figures.cost else 0.0
    return render(
        "fleet.html",
        heading=f"{plan.model.name}: {fleet.name}",
        subject=f"{100 * constraint.quantile:g}% of {OF_WINDOW[fleet.slo_window]}: {bounds_in_words(constraint)}; "
        f"intervals of {fleet.interval_s:g} s",
        cards=[
            *([{"label": "the day's cost", "value": f"{fleet.planned.cost:.4g}"}] if fleet.is_priced else []),
            {"label": "cheaper than the constant fleet", "value": f"{100 * saved:.0f}%"},
            {"label": "of requests keep the bounds", "value": f"{100 * fleet.planned.share_within:.2f}%"},
            {"label": "device-hours", "value": f"{fleet.planned.device_hours:.1f}"},
            {"label": "proven gap to the optimum", "value": f"{100 * fleet.gap:.2f}%"},
        ],
        chart=_day(fleet),
        costs=costs_rows(fleet),
        kinds=kinds_rows(fleet),
        proof=(
            f"{fleet.num_requests:,} requests simulated. {planned_for(fleet)}. The gap is to the cheapest fleet of "
            f"these replicas for {fleet.load_factor:.2f} times the load in each interval. If starts and stops were "
            f"free and immediate, that would cost {fleet.least_cost:.4g}{'' if fleet.is_priced else ' device-hours'}."
            + (f" {sure[0].upper()}{sure[1:]}." if (sure := how_sure(fleet)) else "")
            + (f" {unknown[0].upper()}{unknown[1:]}." if (unknown := unverified_kinds(fleet)) else "")
        ),
    )


def planned_for(fleet: FleetPlan) -> str:
    """Return the load for which a fleet is planned, in words. Shares that are shown beside count the full bounds."""
    margin = max(kind.plan.constraint.headroom for kind in fleet.kinds)
    spare = f" with {100 * margin:.3g}% to spare" if margin else ""
    return (
        f"Planned for {fleet.load_factor:.2f} times the load, the smallest factor tried under which "
        f"{100 * fleet.constraint.quantile:g}% of the requests keep the bounds{spare}{IN_EACH[fleet.slo_window]}"
    )


def unverified_kinds(fleet: FleetPlan) -> str:
    """Return which of the kinds that run published measurements have not verified, in words, or ""."""
    found = dict[str, list[str]]()
    for k, kind in enumerate(fleet.kinds):
        if fleet.constant.replicas[k] or any(interval.replicas[k] for interval in fleet.intervals):
            for what in unverified(kind.plan):
                found.setdefault(what, []).append(kind.name)
    each = "; ".join(f"{what} ({', '.join(names)})" for what, names in found.items())
    return f"measurements do not verify {each}" if found else ""


def how_sure(fleet: FleetPlan) -> str:
    """Return how surely the fleets keep the bounds, in words, or "" if it is not known."""
    planned, constant = fleet.planned.confidence, fleet.constant.figures.confidence
    if planned is None or constant is None:
        return ""
    where = "where it has least to spare, the planned fleet keeps the bounds"
    return f"by the errors of earlier predictions, {where} in {tenths(planned)}, the constant one in {tenths(constant)}"


class FleetRows(NamedTuple):
    columns: list[str]
    rows: list[list[str]]


def kinds_rows(fleet: FleetPlan) -> FleetRows:
    """Return the kinds of replicas, with the arrivals/s that each sustains under each of the day's lengths."""
    has_price = fleet.is_priced
    rows = [
        [
            kind.name,
            f"{kind.plan.policy.kind}: {settings_text(kind.plan)}",
            str(kind.num_devices),
            *([f"{kind.price_per_hour:.3g}"] if has_price else []),
            " / ".join(f"{rate:.2f}" for rate in kind.rates_per_s),
            *([f"{kind.price_per_hour / max(kind.rates_per_s[0], 1e-9) / 3.6:.3g}"] if has_price else []),
            f"{kind.start_s:.0f}",
        ]
        for kind in fleet.kinds
    ]
    columns = ["kind", "settings", "devices", "price/h", "arrivals/s", "cost/1000", "start s"]
    return FleetRows([name for name in columns if has_price or name not in ("price/h", "cost/1000")], rows)


def costs_rows(fleet: FleetPlan) -> FleetRows:
    def row(name: str, most: int, figures: FleetFigures) -> list[str]:
        cost, kept = [f"{figures.cost:.4g}"] if fleet.is_priced else [], f"{100 * figures.share_within:.2f}%"
        return [name, *cost, f"{figures.device_hours:.1f}", str(most), str(figures.starts), kept]

    constant = f"constant: {fleet.in_words(fleet.constant.replicas)}"
    least = fleet.devices_of(fleet.constant.replicas)
    rows = [row("planned", fleet.most_devices, fleet.planned), row(constant, least, fleet.constant.figures)]
    columns = ["fleet", *(["cost"] if fleet.is_priced else []), "device-hours", "most devices", "starts", "kept"]
    return FleetRows(columns, rows)


def _day(fleet: FleetPlan) -> Chart:
    from xgpt.pages import charts

    hours = [edge_s / 3600 for edge_s in fleet.edges_s]
    intervals = fleet.intervals

    def cost_per_hour(replicas: tuple[int, ...]) -> float:
        return sum(count * kind.price_per_hour for count, kind in zip(replicas, fleet.kinds, strict=True))

    drawn = charts.DayChart(
        hours,
        load=[interval.rate_per_s for interval in intervals],
        replicas={kind.name: [interval.replicas[k] for interval in intervals] for k, kind in enumerate(fleet.kinds)},
        kept=[interval.within for interval in intervals],
        asked=fleet.constraint.quantile,
        costs=[cost_per_hour(interval.replicas) for interval in intervals],
        constant_cost=cost_per_hour(fleet.constant.replicas),
    )
    return charts.day(
        drawn,
        alt=f"load, replicas, kept requests and cost of {fleet.name} over {hours[-1]:g} hours",
        caption="From top to bottom: arriving requests, replicas of each kind, the share of each interval's requests "
        "that keep the bounds, and the hourly cost of the fleet (dashed: of the cheapest "
        "constant fleet).",
    )
