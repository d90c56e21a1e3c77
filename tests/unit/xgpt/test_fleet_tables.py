"""The tables and the page of a day's fleet."""

from __future__ import annotations

import pytest

from tests.fleets import fleet_of
from xgpt.cli import run
from xgpt.cli.render import day_table
from xgpt.core.load import KeptByWindow
from xgpt.core.schema.fleet import FleetPlan
from xgpt.reporting.fleet import costs_rows, fleet_report, kinds_rows
from xscheduler.fleet.following import FollowedDay, FollowedFleet


def with_price(fleet: FleetPlan, price: float | None) -> FleetPlan:
    kinds = []
    for kind in fleet.kinds:
        cluster = kind.plan.cluster.model_copy(update={"price_per_device_hour": price})
        kinds.append(kind.model_copy(update={"plan": kind.plan.model_copy(update={"cluster": cluster})}))
    return fleet.model_copy(update={"kinds": tuple(kinds)})


@pytest.mark.parametrize("price", [None, 2.5])
def test_prices_and_costs_are_shown_only_if_a_price_is_known(price: float | None) -> None:
    fleet = with_price(fleet_of([1.0, 3.0]), price)
    columns = {name for each in (kinds_rows(fleet), costs_rows(fleet)) for name in each.columns}
    is_known = price is not None
    assert {name for name in columns if "price" in name or "cost" in name} == (
        {"price/h", "cost/1000", "cost"} if is_known else set()
    )
    page = fleet_report(fleet)
    assert ("price/h" in page) == ("the day&#39;s cost" in page or "the day's cost" in page) == is_known


def test_shares_count_the_bounds_that_are_stated() -> None:
    """A headline said that 90% keep the bounds; a row said 88.3%, of those that keep them less the headroom."""
    fleet = fleet_of([1.0, 3.0])
    shares = [(0.883, 0.931), (0.95, 0.96)]
    intervals = tuple(
        each.but(share_kept=kept, share_within=within)
        for each, (kept, within) in zip(fleet.intervals, shares, strict=True)
    )
    fleet = fleet.but(intervals=intervals, planned=fleet.planned.but(share_kept=0.91, share_within=0.94))
    assert "93.1%" in list(day_table(fleet).columns[-1].cells)
    assert costs_rows(fleet).rows[0][-1] == "94.00%" and "94.00%" in fleet_report(fleet)
    assert intervals[0].but(share_within=None).within == 0.883, "a file of an earlier version"


@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_followed_fleet_says_what_it_follows(
    has_schedule: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    within = KeptByWindow(0.58)
    found = FollowedFleet(fleet_of([2.0]), FollowedDay((), 8.0, 8.0, ()), 100, 0.5, within, has_schedule)
    monkeypatch.setattr(run.api, "simulate_autoscale", lambda *_: found)
    run.autoscale("fleets/monday.json", "day.csv", as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("The schedule of monday.json and the rule keep the bounds for 58%") == has_schedule
    assert said.startswith("The rule alone keeps the bounds for 58%") != has_schedule
    assert ("no schedule" in said) != has_schedule
