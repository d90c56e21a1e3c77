"""The exported rule of a fleet on a simulated clock: ahead of the schedule, at once after a jump, late to remove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.fleets import fleet_of
from xgpt.core.load import KeptByWindow, Window
from xgpt.core.schema.fleet import FleetPlan
from xscheduler.fleet.following import LOOK_S, FollowedDay, FollowedFleet, simulate_day
from xscheduler.fleet.scaling import Follower, Scaling
from xsimulator.fleet import Requests


def followed(
    fleet: FleetPlan, rate_at: Callable[[np.ndarray], np.ndarray], seconds: float, first: int, later_s: float = 0.0
) -> FollowedDay:
    rng = np.random.default_rng(0)
    times = np.arange(0, seconds, 5.0)
    counts = rng.poisson(5.0 * rate_at(times))
    at = np.sort(np.repeat(times, counts) + 5 * rng.random(counts.sum()))
    lengths = np.full(len(at), 100)
    return simulate_day(fleet, Requests(lengths, lengths, at), seconds, Follower(fleet), LOOK_S, [first], later_s)


def ready_at(day: FollowedDay, time_s: float) -> int:
    return sum(replica.from_s <= time_s < replica.to_s for replica in day.replicas)


def test_replicas_are_ready_when_the_schedule_needs_them() -> None:
    day = followed(fleet_of([2.0] * 6 + [16.0] * 282), lambda t: np.where(t < 1800, 2.0, 16.0), 3600, first=2)
    assert ready_at(day, 600) <= 3
    assert ready_at(day, 1800 - 3 * LOOK_S) <= 3  # no step before it is needed
    assert ready_at(day, 1800) >= 8


def test_a_trace_that_begins_at_another_hour_follows_the_schedule_of_its_hours() -> None:
    fleet = fleet_of([2.0] * 144 + [16.0] * 144)
    for later_s, count in ((0.0, 1), (43_200.0, 8)):
        day = followed(fleet, lambda t: np.full(len(t), 1.0), 600, first=1, later_s=later_s)
        assert ready_at(day, 300) == count


def test_a_jump_that_no_schedule_told_of_is_followed_at_once() -> None:
    day = followed(fleet_of([4.0] * 12), lambda t: np.where(t < 1800, 4.0, 20.0), 3600, first=3)
    need = {time_s: load for time_s, _, load in day.samples}
    assert need[1770.0] < 6 and need[1890.0] > 15
    assert ready_at(day, 1890 + 60 + LOOK_S) >= 8


def test_a_load_that_falls_gives_replicas_back() -> None:
    day = followed(fleet_of([4.0] * 12), lambda t: np.where(t < 600, 20.0, 4.0), 3600, first=10)
    assert ready_at(day, 600) >= 10 and ready_at(day, 2000) <= 3


def test_the_schedule_of_a_day_is_its_intervals_in_minutes() -> None:
    fleet = fleet_of([2.0] * 144 + [9.0] * 36 + [2.0] * 108, start_s=90.0)
    scaling = Scaling(fleet)
    assert list(scaling.spans(0)) == [(718, 900, 5)]  # 90 s before, in whole minutes
    assert [scaling.scheduled(0, 60.0 * minute) for minute in (717, 719, 899, 900)] == [1, 5, 5, 1]
    assert list(Scaling(fleet.but(begin_s=50 * 86_400.0 + 9 * 3600)).spans(0)) == [(1258, 1440, 5)], "began at midnight"
    minutes = Scaling(fleet_of([2.0, 9.0]))  # ten minutes repeat otherwise
    assert list(minutes.spans(0)) == [] and not minutes.has_schedule
    assert minutes.scheduled(0, 300.0) == 1, "a simulated day followed a schedule that no export has"


def test_the_cheapest_kind_for_its_rate_takes_the_rest() -> None:
    scaling = Scaling(fleet_of([4.0] * 12, (2.0, 5.0)))
    assert scaling.marginal == 0  # the second has no planned replica
    assert scaling.wanted(0.0, 4.0) == (2, 0) and scaling.wanted(0.0, 20.0) == (10, 0)


def test_a_short_time_of_heavy_lengths_does_not_order_replicas_for_the_whole_day() -> None:
    """The lowest rate of the day once did: 2.1 times the clairvoyant device-hours."""
    fleet = fleet_of([4.0] * 12)
    (kind,), (*light, last) = fleet.kinds, fleet.intervals
    heavy = last.model_copy(update={"lengths": 1, "replicas": (8,)})
    changed = {"kinds": (kind.model_copy(update={"rates_per_s": (2.0, 0.5)}),), "intervals": (*light, heavy)}
    changed |= {"interval_s": 7200.0}
    scaling = Scaling(fleet.model_copy(update=changed | {"lengths": fleet.lengths * 2}))
    assert scaling.rates == (1.6,)
    assert scaling.wanted(0.0, 4.0) == (3,) and scaling.wanted(86_300.0, 4.0) == (8,)


def test_a_followed_day_is_judged_by_its_intervals_and_costs_what_is_known() -> None:
    """A rule kept the bounds for 97% of a day and half of its noon; device-hours without a price were its cost."""
    fleet = fleet_of([2.0] * 12)
    noon = Window("12:00 to 12:15", 43_200.0, 900.0, 0, 900)
    within = KeptByWindow(0.97, noon, 0.5, (0.999, 0.5), (20_000, 900))
    found = FollowedFleet(fleet, FollowedDay((), 8.0, 8.0, ()), 20_900, 0.96, within)
    assert found.figures["worst_interval"] == noon.name and found.figures["worst_share_within"] == 0.5
    day = fleet.model_copy(update={"slo_window": "day", "constraint": fleet.constraint.but(quantile=0.9)})
    assert not found.holds and replace(found, fleet=day).holds
    assert found.figures["device_hours"] == 8.0 and "cost" not in found.figures
