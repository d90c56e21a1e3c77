"""`xgpt fleet`: a day's load in, the cheapest replicas of each interval out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.commands import Xgpt
from xgpt.core.io import load_json
from xgpt.core.schema.fleet import FleetPlan
from xscheduler.fleet import planning

pytestmark = pytest.mark.usefixtures("short_simulations_here")

DAY = """
name: weekday
stages:
- {hours: 0.2, rate_per_s: 4, workload: azure-conv}
- {hours: 0.1, rate_per_s: 40, workload: azure-conv}
- {hours: 0.1, rate_per_s: 12, workload: azure-code}
"""
ASKED = ("--model", "llama-3.1-8b", "--latency-bound", "20", "--ttft", "2", "--interval", "120", "--policy", "chunked")


@pytest.fixture
def day(xgpt: Xgpt) -> Path:
    path = Path("day.yaml")
    path.write_text(DAY)
    return path


def test_a_day_gets_the_replicas_that_hold_it_at_less_than_a_constant_fleet(xgpt: Xgpt, day: Path) -> None:
    ran = xgpt("fleet", "--trace", str(day), *ASKED, "--among", "h100x8=2.9,a100x16=1.4", "--devices", "16")
    assert ran.code == 0, ran.err
    fleet = load_json(Path("fleet.json"), FleetPlan, "fleet")
    assert len(fleet.intervals) == 12
    kept = [
        sum(
            count * kind.rates_per_s[interval.lengths]
            for count, kind in zip(interval.replicas, fleet.kinds, strict=True)
        )
        for interval in fleet.intervals
    ]
    assert all(
        have >= 0.99 * fleet.load_factor * interval.peak_per_s
        for have, interval in zip(kept, fleet.intervals, strict=True)
    )
    assert fleet.planned.share_kept >= 0.99 and fleet.constant.figures.share_kept >= 0.99
    assert fleet.least_cost <= fleet.planned.cost < 0.8 * fleet.constant.figures.cost
    assert len(fleet.lengths) == 2  # code is not conversation
    assert len({kind.name.partition("/")[0] for kind in fleet.kinds}) == 2
    assert "the cheapest constant fleet of them costs" in ran.out
    assert fleet.planned.confidence is not None and fleet.constant.figures.confidence is not None
    assert "where it has least to spare, the planned fleet keeps the bounds" in " ".join(ran.out.split())
    assert xgpt("report", "fleet.json", "-o", "day.html").code == 0
    page = Path("day.html").read_text()
    assert "constant: " in page and page.count("<img ") == 1
    assert "leave it out" in xgpt.fails(2, "report", "fleet.json", "--profile", "p.json")
    followed = xgpt("autoscale", "fleet.json", "--simulate", str(day)).out
    worst = r"(, \S+ in the worst interval \(\+\d:\d\d to \+\d:\d\d\))?"
    kept = rf"(all|\d\d\.\d+%) of [\d,]{{5,}} requests{worst}; 99% must in each, but for chance\."
    alone = "The fleet has no schedule, since its load is not a day long."
    assert re.match(f"The rule alone keeps the bounds for {kept} {alone}", " ".join(followed.split()))
    assert "starts of replicas, initial ones included" in followed, "115 replicas were said to have run, of at most 14"
    figures = json.loads(xgpt("autoscale", "fleet.json", "--simulate", str(day), "--json").out)
    assert figures["worst_share_within"] <= figures["share_within"] and figures["cost"] > figures["device_hours"]
    assert ("Too few: the rule follows the number of requests" in followed) != figures["holds"]


def test_bounds_hold_in_each_interval(xgpt: Xgpt, day: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet kept 99% of a day's requests, and 95% in its worst quarter of an hour."""
    search, found = planning._candidates, list[Any]()

    def candidates(*asked: Any) -> Any:  # both fleets are of the same kinds of replicas
        found.extend([] if found else [search(*asked)])
        return found[0]

    monkeypatch.setattr(planning, "_candidates", candidates)
    day.write_text(re.sub(r"rate_per_s: (\d+)", r"rate_per_s: \g<1>0", DAY))
    asked = ("fleet", "--trace", str(day), *ASKED, "--attain", "0.95", "--cluster", "h100x1")
    asked += ("--force",)
    worst, fleets = {}, {}
    for window in ("day", "interval"):
        ran = xgpt(*asked, "--slo-window", window)
        assert ran.code == 0, ran.err
        fleets[window] = fleet = load_json(Path("fleet.json"), FleetPlan, "fleet")
        worst[window] = max(
            (fleet.constraint.quantile - interval.share_kept) * (interval.rate_per_s * fleet.interval_s) ** 0.5
            for interval in fleet.intervals
            if interval.share_kept is not None
        )
        assert fleet.slo_window == window and len(Path("fleet.json").read_text()) < 200_000
    assert worst["interval"] <= 3.1 * (0.95 * 0.05) ** 0.5 and worst["interval"] <= worst["day"]
    before, raised = fleets["day"], fleets["interval"]
    assert before.load_factor == raised.load_factor and before.planned.cost < raised.planned.cost
    cheapest = (1 - raised.gap) * raised.planned.cost
    assert raised.least_cost <= cheapest <= before.planned.cost + 1e-9, "the gap was to fleets for the raised loads"
    assert f"{100 * raised.gap:.2f}% less" in " ".join(ran.out.split())


def test_a_trace_is_read_with_its_own_times(xgpt: Xgpt) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(np.concatenate([rng.uniform(0, 600, 600), rng.uniform(600, 1200, 6000)]))
    rows = [f"{time:.3f},{rng.integers(50, 500)},{rng.integers(10, 100)}" for time in times]
    Path("day.csv").write_text("timestamp,input,output\n" + "\n".join(rows) + "\n")
    ran = xgpt("fleet", "--trace", "day.csv", *ASKED, "--cluster", "a100x16", "--json")
    assert ran.code == 0, ran.err
    fleet = json.loads(ran.out)
    rates = [interval["rate_per_s"] for interval in fleet["intervals"]]
    assert rates[:5] == pytest.approx([1] * 5, rel=0.2) and rates[5:] == pytest.approx([10] * 5, rel=0.1)
    assert fleet["num_requests"] == 6600


def test_a_last_interval_that_the_day_covers_in_part_counts_its_own_seconds(xgpt: Xgpt) -> None:
    """It once counted as a whole: its rate was too low, so each interval got several times the replicas it needs."""
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 180, 5400))
    rows = [f"{time:.3f},{rng.integers(50, 500)},{rng.integers(10, 100)}" for time in times]
    Path("day.csv").write_text("timestamp,input,output\n" + "\n".join(rows) + "\n")
    ran = xgpt("fleet", "--trace", "day.csv", *ASKED, "--cluster", "a100x16", "--json")
    assert ran.code == 0, ran.err
    fleet = json.loads(ran.out)
    assert [interval["rate_per_s"] for interval in fleet["intervals"]] == pytest.approx([30, 30], rel=0.05)
    counts = zip(fleet["constant"]["replicas"], fleet["kinds"], strict=True)
    devices = sum(count * int(kind["name"].rpartition("/")[2]) for count, kind in counts)
    assert fleet["constant"]["figures"]["device_hours"] == pytest.approx(180 / 3600 * devices, rel=0.01)


def test_what_is_wrong_is_said_in_one_line(xgpt: Xgpt, day: Path) -> None:
    Path("untimed.csv").write_text("input,output\n10,10\n")
    asked = ("fleet", *ASKED, "--trace")
    assert "need their times" in xgpt.fails(2, *asked, "untimed.csv")
    assert "write N, or CLUSTER=N" in xgpt.fails(2, *asked, str(day), "--devices", "x")
    assert "it is not a cluster of --among" in xgpt.fails(
        2, *asked, str(day), "--among", "h100x8=2.9", "--devices", "a40x4=3"
    )


@pytest.mark.long
def test_what_no_fleet_keeps_is_said_in_one_line(xgpt: Xgpt, day: Path) -> None:
    assert "1 and 1 devices cannot serve" in xgpt.fails(
        1, "fleet", *ASKED, "--trace", str(day), "--among", "h100x8=2.9,a100x16=1.4", "--devices", "1"
    )
    tight = ("fleet", "--trace", str(day), "--model", "llama-3.1-8b", "--cluster", "h100x1", "--latency-bound", "0.05")
    assert "no replica on one node of h100x1 keeps 0.05 s" in xgpt.fails(1, *tight)
    only_ttft = xgpt.fails(1, *tight[:-2], "--ttft", "0.001")
    assert "--ttft: no replica on one node of h100x1 keeps 0.001 s at any arrival rate" in only_ttft
