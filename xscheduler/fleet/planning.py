"""Plan the cheapest fleet for each interval of a day's load, and verify the fleet by simulating the day."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.load import KeptByWindow, Window, clock, kept_in, least_kept
from xgpt.core.schema.fleet import STARTUP_S, ConstantFleet, FleetFigures, FleetInterval, FleetPlan, SloWindow
from xgpt.core.schema.policy import PolicyChoice
from xscheduler.fleet.day_load import Day, Intervals
from xscheduler.fleet.replica_counts import (
    DeviceLimit,
    FleetProblem,
    FleetSolution,
    constant_fleets,
    cost_of,
    least_costs,
    solve_constant,
    solve_fleet,
    starts_of,
)
from xscheduler.fleet.replica_kinds import Candidate, candidates, devices_here
from xscheduler.problem import Problem
from xsimulator.costs.step_cost import lanes_of
from xsimulator.fleet import Replica, replicas_of, simulate_fleet
from xsimulator.measures import RequestTimes

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FACTOR_STEP = 0.05
MOST_TRIED = 10
"""Largest number of load factors that are tried."""
MOST_REPAIRED, LOCAL_STEP, MOST_LOCAL = 12, 1.1, 8.0
"""Largest number of fleets that are tried to keep the bounds in each interval. For each, the load of the intervals that
break them is raised by steps of this factor until their replicas change, up to the last factor.
"""
NOTHING = 0.01
"""A day counts as whole intervals if at most this share of an interval is missing at its end."""
SAVED_REQUESTS = 1_000_000
"""If a day has more requests than this, the search ends at the first load factor that is large enough."""


class FleetCluster(NamedTuple):
    """A cluster on which replicas may run."""

    problem: Problem
    policy: PolicyChoice
    most_devices: int | None


@dataclass(frozen=True)
class FleetModel:
    day: Day
    intervals: Intervals
    candidates: tuple[Candidate, ...]

    def simulate(self, counts: Ints, interval_s: float) -> RequestTimes:
        return self.simulate_replicas(replicas_of(counts, interval_s))

    def simulate_replicas(self, replicas: Sequence[Replica]) -> RequestTimes:
        kinds = [candidate.kind for candidate in self.candidates]
        lanes = [lanes_of(candidate.kind.plan, candidate.profile) for candidate in self.candidates]
        return simulate_fleet(self.day.requests, replicas, kinds, lanes)


def plan_day(
    day: Day,
    intervals: Intervals,
    clusters: Sequence[FleetCluster],
    *,
    interval_s: float,
    least_stay_s: float = 0.0,
    startup_s: float = STARTUP_S,
    least_replicas: int = 1,
    slo_window: SloWindow = "interval",
) -> FleetPlan:
    """Return the cheapest fleet that keeps the bounds under a day's load.

    Args:
        interval_s: length of the intervals. The fleet changes only between intervals.
        least_stay_s: shortest time for which a started replica runs.
        startup_s: time from ordering a replica until the replica begins to load its weights.
        least_replicas: smallest number of replicas at any time.
        slo_window: whether the share of requests must keep the bounds in each interval, or of the whole day.

    Raises:
        InfeasibleError: no replica keeps the bounds, or there are too few devices for the load.
    """
    started = time.perf_counter()
    found, limits = _candidates(clusters, intervals, startup_s)
    model = FleetModel(day, intervals, tuple(found))
    kinds = tuple(candidate.kind for candidate in found)
    problem = FleetProblem(
        needs=intervals.peaks,
        rates=np.asarray([kind.rates_per_s for kind in kinds]).T[intervals.groups],
        prices=np.asarray([kind.price_per_hour for kind in kinds]),
        start_costs=np.asarray([kind.change_cost for kind in kinds]),
        hours=intervals.seconds / 3600,
        least_stay=max(1, ceil(least_stay_s / interval_s)),
        least=least_replicas,
        limits=tuple(limits),
    )
    solution = solve_fleet(problem)
    planning_s = time.perf_counter() - started
    constraint = found[0].kind.plan.constraint
    constant = _constant(model, problem, interval_s, slo_window)
    try:
        factor, solution, times = _settled(model, problem, solution, constraint.quantile, interval_s)
        problem = replace(problem, needs=factor * intervals.peaks)
        # What follows raises the load where requests would be late: of those loads, an optimum would be no bound.
        optimum, least_cost = (1 - solution.gap) * solution.cost, float(least_costs(problem).sum())
        if slo_window == "interval":
            problem, solution, times = _repaired(model, problem, solution, times, interval_s)
    except InfeasibleError as error:
        if constant is not None:
            counts = zip(constant[0].replicas[0].tolist(), kinds, strict=True)
            words = " and ".join(f"{count} {kind.name}" for count, kind in counts if count)
            error.args = (f"{error}, or run {words} all day, which keep the bounds",)
        raise
    if constant is None:
        whole = solve_constant(problem)
        constant = whole, model.simulate(whole.replicas, interval_s)
    whole, whole_times = constant
    return FleetPlan(
        name=day.name,
        constraint=constraint,
        interval_s=interval_s,
        day_s=_day_s(day.seconds, len(intervals.seconds) * interval_s, interval_s),
        begin_s=day.begin_s,
        least_stay_s=least_stay_s,
        least_replicas=least_replicas,
        load_factor=factor,
        slo_window=slo_window,
        kinds=kinds,
        lengths=intervals.lengths,
        intervals=_intervals(model, solution.replicas, times),
        planned=figures_of(model, problem, solution.replicas, times),
        constant=ConstantFleet(
            replicas=tuple(whole.replicas[0].tolist()), figures=figures_of(model, problem, whole.replicas, whole_times)
        ),
        least_cost=least_cost,
        gap=max(0.0, 1 - optimum / solution.cost) if solution.cost else 0.0,
        num_requests=len(day.requests),
        planning_s=round(planning_s, 3),
        verifying_s=round(time.perf_counter() - started - planning_s, 3),
    )


def _day_s(seconds: float, whole_s: float, interval_s: float) -> float:
    """A trace ends with its last request, so a length just short of a whole number of intervals is rounded up."""
    return whole_s if abs(whole_s - seconds) < NOTHING * interval_s else seconds


def _candidates(
    clusters: Sequence[FleetCluster], intervals: Intervals, startup_s: float
) -> tuple[list[Candidate], list[DeviceLimit]]:
    found: list[Candidate] = []
    limits: list[DeviceLimit] = []
    why: InfeasibleError | None = None
    for problem, policy, most_devices in clusters:
        most = most_devices
        if problem.cluster.is_local:
            here = devices_here(problem.cluster, problem.profile.num_threads)
            most = min(most or here, here)
        try:
            of_cluster = candidates(
                replace(problem, max_devices=min(most or problem.cluster.num_devices, problem.cluster.num_devices)),
                policy,
                intervals.lengths,
                startup_s,
            )
        except InfeasibleError as error:
            why = error
            continue
        if most is not None:
            numbers = tuple(range(len(found), len(found) + len(of_cluster)))
            limits.append(DeviceLimit(numbers, tuple(one.kind.num_devices for one in of_cluster), most))
        found += of_cluster
    if not found:
        assert why is not None
        raise why
    return found, limits


def _constant(
    model: FleetModel, problem: FleetProblem, interval_s: float, slo_window: SloWindow
) -> tuple[FleetSolution, RequestTimes] | None:
    """Return the cheapest fleet that is the same in all intervals and keeps the bounds, or None if none of those that
    are tried does.
    """
    quantile = model.candidates[0].kind.plan.constraint.quantile
    with suppress(InfeasibleError):
        for found in islice(constant_fleets(replace(problem, needs=model.intervals.peaks)), MOST_TRIED):
            times = model.simulate(found.replicas, interval_s)
            if share_kept(model, times) >= quantile and (slo_window == "day" or not _broken(model, times)[0].any()):
                return found, times
    return None


def _settled(
    model: FleetModel, problem: FleetProblem, solution: FleetSolution, quantile: float, interval_s: float
) -> tuple[float, FleetSolution, RequestTimes]:
    """If several factors give the same fleet, the highest one is returned. Replicas that share a load keep the bounds
    for more requests than separate replicas. A load that changes within an interval has the opposite effect. The
    simulation shows which effect is larger.
    """
    known: dict[bytes, RequestTimes] = {}
    best: tuple[float, FleetSolution, RequestTimes] | None = None
    failed = passed = 0.0
    factor, step = 1.0, FACTOR_STEP
    for _ in range(MOST_TRIED):
        key = solution.replicas.tobytes()
        if key not in known:
            known[key] = model.simulate(solution.replicas, interval_s)
        share = share_kept(model, known[key])
        if share < quantile:
            failed = factor
        else:
            passed = factor
            if best is None or (best[1].replicas != solution.replicas).any():
                best = factor, solution, known[key]
        if best is None:
            factor, step = factor + step, 1.5 * step
        elif passed - failed < 1.01 * FACTOR_STEP or len(model.day.requests) > SAVED_REQUESTS:
            break
        else:
            factor = (passed + failed) / 2 if failed else passed - FACTOR_STEP
        solution = solve_fleet(replace(problem, needs=factor * problem.needs))
    if best is None:
        raise InfeasibleError(
            f"attain: only {100 * share:.2f}% of the requests keep the bounds even with {factor:.2g} times the "
            f"replicas that the load needs; ask for less than {quantile:g}, or give shorter intervals",
            binding="quantile",
        )
    return best


def _repaired(
    model: FleetModel, problem: FleetProblem, solution: FleetSolution, times: RequestTimes, interval_s: float
) -> tuple[FleetProblem, FleetSolution, RequestTimes]:
    """Return a problem with more load in the intervals whose requests would break the bounds, and its fleet."""
    needs = problem.needs
    for _ in range(MOST_REPAIRED):
        broken, worst = _broken(model, times)
        if not broken.any():
            return problem, solution, times
        before, local = solution.replicas, np.ones(len(needs))
        while (solution.replicas[broken] == before[broken]).all() and local.max() < MOST_LOCAL:
            local[broken] *= LOCAL_STEP
            problem = replace(problem, needs=local * needs)
            solution = solve_fleet(problem)
        needs, times = problem.needs, model.simulate(solution.replicas, interval_s)
    broken, worst = _broken(model, times)
    if not broken.any():
        return problem, solution, times
    raise InfeasibleError(
        f"attain: only {100 * worst:.2f}% of the requests keep the bounds in the worst interval of the day, even with "
        f"{(needs / np.maximum(model.intervals.peaks, 1e-9)).max():.2g} times the replicas that its load needs; ask "
        "for less, give other intervals, or `slo_window=day` for the share of the whole day",
        binding="quantile",
    )


def _broken(model: FleetModel, times: RequestTimes) -> tuple[npt.NDArray[np.bool_], float]:
    """Return which intervals break the bounds by more than chance, and the smallest share of requests that keep them.
    # [intervals]
    """
    index, count = model.intervals.of_requests, len(model.intervals.rates)
    quantile = model.candidates[0].kind.plan.constraint.quantile
    arrived = np.maximum(np.bincount(index, minlength=count), 1)
    shares = 1 - np.bincount(index, ~kept(model, times), count) / arrived
    broken = shares < least_kept(quantile, arrived.astype(float))
    return broken, float(shares[broken].min()) if broken.any() else 1.0


def share_kept(model: FleetModel, times: RequestTimes, *, headroom: bool = True) -> float:
    """Return the share of a day's requests that keep the bounds."""
    return float(np.mean(kept(model, times, headroom=headroom)))


def kept(model: FleetModel, times: RequestTimes, *, headroom: bool = True) -> npt.NDArray[np.bool_]:
    constraint = model.candidates[0].kind.plan.constraint
    margin = max((one.kind.plan.constraint.headroom for one in model.candidates), default=0.0) if headroom else 0.0
    return np.asarray(times.excess(constraint.all_bounds) <= 1 / (1 + margin))


def kept_by_interval(model: FleetModel, times: RequestTimes, interval_s: float) -> KeptByWindow:
    """Return the shares of requests that keep the full bounds, of the day and by interval."""
    intervals = model.intervals
    edges = np.searchsorted(intervals.of_requests, np.arange(len(intervals.seconds) + 1)).tolist()
    windows = [
        Window(
            f"+{clock(interval_s * i, interval_s)} to +{clock(interval_s * (i + 1), interval_s)}",
            interval_s * i,
            float(intervals.seconds[i]),
            first,
            end,
        )
        for i, (first, end) in enumerate(pairwise(edges))
    ]
    return kept_in(windows, kept(model, times, headroom=False))


def figures_of(model: FleetModel, problem: FleetProblem, counts: Ints, times: RequestTimes) -> FleetFigures:
    kinds = [candidate.kind for candidate in model.candidates]
    starts = starts_of(counts).sum(axis=0)
    devices = np.asarray([kind.num_devices for kind in kinds])
    waiting_h = np.asarray([(kind.start_s + kind.drain_s) / 3600 for kind in kinds])
    return FleetFigures(
        cost=cost_of(problem, counts),
        device_hours=float(problem.hours @ counts @ devices + starts @ (devices * waiting_h)),
        starts=int(starts.sum()),
        share_kept=share_kept(model, times),
        share_within=share_kept(model, times, headroom=False),
    )


def _intervals(model: FleetModel, counts: Ints, times: RequestTimes) -> tuple[FleetInterval, ...]:
    intervals, count = model.intervals, len(counts)
    arrived = np.bincount(intervals.of_requests, minlength=count)
    good, within = (
        np.bincount(intervals.of_requests, kept(model, times, headroom=headroom), count) / np.maximum(arrived, 1)
        for headroom in (True, False)
    )
    return tuple(
        FleetInterval(
            rate_per_s=float(intervals.rates[i]),
            peak_per_s=float(intervals.peaks[i]),
            lengths=int(intervals.groups[i]),
            replicas=tuple(counts[i].tolist()),
            share_kept=float(good[i]) if arrived[i] else None,
            share_within=float(within[i]) if arrived[i] else None,
        )
        for i in range(count)
    )
