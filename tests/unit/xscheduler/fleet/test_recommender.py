"""Recommended replicas on a simulated clock: ahead of what the season says, at once after what it does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.fleets import fleet_of
from xgpt.core.schema import Workload
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.workload import histogram_of
from xscheduler.fleet.load_forecast import LoadForecast
from xscheduler.fleet.recommender import LoadSample, RecommendedDay, Recommender, WantedReplicas, simulate_day
from xscheduler.fleet.replica_counts import DeviceLimit
from xsimulator.fleet import Requests

LOOK_S = 15.0


def arrivals(rate_at: Callable[[np.ndarray], np.ndarray], seconds: float, seed: int = 0) -> Requests:
    rng = np.random.default_rng(seed)
    times = np.arange(0, seconds, 5.0)
    counts = rng.poisson(5.0 * rate_at(times))
    at = np.sort(np.repeat(times, counts) + 5 * rng.random(counts.sum()))
    lengths = np.full(len(at), 100)
    return Requests(lengths, lengths, at)


def controlled(
    fleet: FleetPlan, rate_at: Callable[[np.ndarray], np.ndarray], seconds: float, first: int = 1
) -> RecommendedDay:
    recommender = Recommender(fleet, look_s=LOOK_S)
    return simulate_day(fleet, arrivals(rate_at, seconds), seconds, recommender.recommend, LOOK_S, [first])


def ready_at(day: RecommendedDay, time_s: float) -> int:
    return sum(replica.from_s <= time_s < replica.to_s for replica in day.replicas)


def test_replicas_are_ready_when_the_season_needs_them() -> None:
    rates = [2.0] * 6 + [16.0] * 6
    day = controlled(fleet_of(rates), lambda t: np.where(t < 1800, 2.0, 16.0), 3600, first=2)
    assert ready_at(day, 600) <= 3
    assert ready_at(day, 1800 - 3 * LOOK_S) <= 3  # no step before it is needed
    assert ready_at(day, 1800) >= 8


def test_a_jump_that_no_season_told_of_is_followed_at_once() -> None:
    day = controlled(fleet_of([4.0] * 12), lambda t: np.where(t < 1800, 4.0, 20.0), 3600, first=3)
    need = {time_s: replicas for time_s, _, replicas in day.samples}
    assert need[1770.0] < 6
    assert need[1845.0] > 15  # three looks after it
    assert ready_at(day, 1800 + 45 + 60 + LOOK_S) >= 8


def test_a_steady_load_keeps_its_fleet() -> None:
    day = controlled(fleet_of([9.0] * 12), lambda t: np.full(len(t), 9.0), 3600, first=5)
    assert len(day.replicas) <= 7  # 5 at the beginning
    assert all(ready_at(day, time_s) in (5, 6) for time_s in range(900, 3600, 300))


def test_a_load_that_rises_does_not_jump_where_intervals_meet() -> None:
    rates = [0.5, 0.5, 0.5, *np.arange(2.0, 26.0, 3.0), 24.5]

    def rate_at(time_s: np.ndarray) -> np.ndarray:
        return np.interp(time_s, 300.0 * np.arange(12) + 150, rates)

    day = controlled(fleet_of(rates), rate_at, 3600, first=1)
    over = [need - rate_at(np.asarray(time_s + 60 + LOOK_S)) for time_s, _, need in day.samples if 900 < time_s < 3300]
    assert max(over) < 6  # an interval's rise is 3


def test_a_season_is_a_line_within_intervals_and_steps_where_levels_change() -> None:
    rates = [2.0, 2.0, 8.0, 8.0, 8.0, 10.0, 12.0, 14.0, 14.0, 9.0, 9.0, 2.0]
    season = LoadForecast(fleet_of(rates), 60.0).season
    for i, rate in enumerate(rates):
        assert np.mean([season(300.0 * i + 15 * j + 7.5) for j in range(20)]) == pytest.approx(rate)
    assert (season(599), season(601)) == (2.0, 8.0)
    assert season(1800) == pytest.approx(season(1799), rel=0.01) == pytest.approx(11, rel=0.01)


def test_replicas_leave_when_that_repays() -> None:
    day = controlled(fleet_of([20.0] * 6 + [2.0] * 6), lambda t: np.where(t < 1800, 20.0, 2.0), 3600, first=11)
    assert ready_at(day, 1500) >= 10
    assert ready_at(day, 2700) <= 2


def steadily(recommender: Recommender, num_requests: float, ready: int, times: int = 20) -> WantedReplicas:
    """Return the last recommendation of a steady load."""
    for i in range(times):
        found = recommender.recommend(LoadSample(900.0 + LOOK_S * i, LOOK_S, num_requests, ready=[ready]))
    return found


def test_waiting_requests_are_worked_off() -> None:
    calm, pressed = (
        Recommender(fleet_of([4.0] * 12), look_s=LOOK_S).recommend(LoadSample(900.0, LOOK_S, 60, waiting, [3]))
        for waiting in (0.0, 400.0)
    )
    assert pressed.replicas > calm.replicas


def test_more_than_the_devices_hold_takes_all_of_them() -> None:
    recommender = Recommender(fleet_of([100.0] * 12), [DeviceLimit((0,), (1,), 5)], LOOK_S)
    assert recommender.recommend(LoadSample(900.0, LOOK_S, 1500, 0.0, [1])).replicas == (5,)


def test_a_recommendation_stands_while_replicas_start() -> None:
    fleet = fleet_of([16.0] * 12)
    recommender = Recommender(fleet, look_s=LOOK_S)
    first = recommender.recommend(LoadSample(900.0, LOOK_S, 240, 0.0, [1])).replicas[0]
    assert first >= 8
    for i in range(1, 4):
        assert first <= recommender.recommend(LoadSample(900.0 + LOOK_S * i, LOOK_S, 240, 0.0, [1])).replicas[0] <= 10


def test_a_recommender_that_begins_anew_goes_on_with_the_replicas_there_are() -> None:
    fleet = fleet_of([16.0] * 12)
    before = steadily(Recommender(fleet, look_s=LOOK_S), 240, 8).replicas[0]
    again = Recommender(fleet, look_s=LOOK_S).recommend(LoadSample(1215.0, LOOK_S, 240, 0.0, [before]))
    assert again.replicas == (before,)


def test_fewer_replicas_are_recommended_once_fewer_have_sufficed() -> None:
    fleet = fleet_of([2.0] * 12)
    recommender = Recommender(fleet, look_s=LOOK_S)
    assert steadily(recommender, 15, 4, times=2).replicas == (4,)
    assert steadily(recommender, 15, 4).replicas < (3,)


def test_a_replica_stays_as_long_as_it_is_to_stay() -> None:
    fleet = fleet_of([20.0] * 12, least_stay_s=3600)
    recommender = Recommender(fleet, look_s=LOOK_S)
    most = recommender.recommend(LoadSample(600.0, LOOK_S, 300, 0.0, [1])).replicas[0]
    assert most > 8
    assert steadily(recommender, 1, most).replicas == (most - 1,)  # the one that was there before


def test_without_a_look_at_the_replicas_the_plan_stands() -> None:
    recommender = Recommender(fleet_of([2.0, 20.0, 2.0]), look_s=LOOK_S)
    assert recommender.as_planned(0.0).replicas == (1,)
    assert recommender.as_planned(300.0).replicas == (10,)
    assert recommender.as_planned(600.0).replicas == (10,)  # none leaves unseen


def test_a_forecast_follows_the_trend_where_the_season_is_wrong() -> None:
    fleet = fleet_of([5.0] * 12)
    forecast = LoadForecast(fleet, lead_s=120)
    rng = np.random.default_rng(0)
    for i in range(1, 100):
        forecast.look(15.0 * i, 15, int(rng.poisson(15 * (5 + 0.02 * 15 * i))))
    now = 5 + 0.02 * 15 * 99
    assert forecast.at(120) == pytest.approx(now + 0.02 * 120, rel=0.08)
    assert 0 < forecast.error < 0.3


def test_a_season_at_another_level_is_scaled() -> None:
    fleet = fleet_of([2.0] * 6 + [8.0] * 6)
    forecast = LoadForecast(fleet, lead_s=120)
    for i in range(1, 61):
        forecast.look(15.0 * i, 15, 60)  # twice as many as on the planned day
    assert forecast.level == pytest.approx(2, rel=0.05)
    assert forecast.season(2400) * forecast.level == pytest.approx(16, rel=0.05)


def test_a_load_after_a_pause_is_taken_for_what_it_is() -> None:
    """No requests at all are no error of a hundred times."""
    day = controlled(fleet_of([2.0] * 12), lambda t: np.where((t > 1200) & (t < 1800), 0.0, 2.0), 3600, first=2)
    assert len(day.replicas) <= 6
    assert max(need for _, _, need in day.samples) < 6


@pytest.mark.parametrize(("num_lengths", "expected"), [(50, 2.0), (5000, 0.5)])
def test_lengths_are_the_seasons_unless_others_are_observed_beyond_chance(num_lengths: int, expected: float) -> None:
    """Fifty requests of a season's lengths are longer by three tenths by chance; five thousand are not."""
    values = np.random.default_rng(0).exponential(200, 2000).astype(int) + 1
    season, longer = (
        Workload(name=f"x{factor}", input=histogram_of(factor * values), output=histogram_of(factor * values))
        for factor in (2, 3)
    )
    fleet = fleet_of([4.0] * 12)
    kind = fleet.kinds[0].model_copy(update={"rates_per_s": (2.0, 0.5)})
    fleet = fleet.model_copy(update={"kinds": (kind,), "lengths": (season, longer)})
    mean = 1.3 * 2 * float(values.mean())
    sample = LoadSample(900.0, LOOK_S, 60, 0.0, [3], mean, mean, num_lengths)
    assert Recommender(fleet, look_s=LOOK_S).recommend(sample).held_per_s == pytest.approx(3 * expected)


@pytest.mark.parametrize(("day_s", "rates"), [(None, [1, 2, 3, 1]), (700.0, [1, 2, 1, 1]), (980.0, [1, 2, 3, 3])])
def test_a_day_repeats_after_its_own_length(day_s: float | None, rates: list[float]) -> None:
    """The last interval ends with the day. Without its length, as in older files, it is as long as the others."""
    fleet = fleet_of([1.0, 2.0, 3.0]).model_copy(update={"day_s": day_s})
    days_later = 5 * (day_s or 900.0)
    assert [fleet.interval_at(days_later + at).rate_per_s for at in (0.0, 300.0, 710.0, 970.0)] == rates
    assert fleet.edges_s == (0.0, 300.0, 600.0, day_s or 900.0)
    forecast = LoadForecast(fleet, lead_s=120)
    assert forecast.season(days_later + (600 + fleet.edges_s[-1]) / 2) == pytest.approx(3.0)
