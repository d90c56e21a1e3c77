"""From a day's load to a fleet: the replicas of each interval at the least cost, settled by simulating the day."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.io import parse_arguments
from xgpt.core.progress import Progress
from xgpt.core.schema import Frozen
from xgpt.core.schema.fleet import ConstantFleet, FleetFigures, FleetInterval, FleetPlan
from xgpt.problems import resolve
from xgpt.requests import PlanRequest, plan_request
from xgpt.resolve import check_names, workload_of
from xscheduler.fleet.day import Day, Intervals, cut, read_day
from xscheduler.fleet.kinds import Candidate, candidates, devices_here
from xscheduler.fleet.sizes import (
    DeviceLimit,
    FleetProblem,
    FleetSolution,
    cost_of,
    least_costs,
    solve_constant,
    solve_fleet,
    starts_of,
)
from xsimulator.costs.step_cost import lanes_of
from xsimulator.fleet import Replica, replicas_of, simulate_fleet
from xsimulator.measures import RequestTimes

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FACTOR_STEP = 0.05
"""Least difference between the load factors that are tried."""
MOST_TRIED = 10
"""Most load factors tried: upwards in growing steps until one keeps the share, then between the last two."""
SAVED_REQUESTS = 1_000_000
"""Simulated requests after which no smaller load factor is tried: it would save little and take minutes."""


class FleetRequest(Frozen):
    """The arguments of a fleet, besides those of the plans of its replicas (`xgpt.requests.PlanRequest`).

    Attributes:
        trace: a trace with times, or rates and workloads over hours.
        among: clusters with the price of one device for an hour; None: the one cluster of the plan's request.
        interval_s: length of an interval, in which the fleet does not change.
        least_stay_s: least time for which a started replica stays.
        startup_s: time from ordering a replica until it begins to load its weights.
        devices: largest number of devices of each cluster, one for all or by name; None: as many as needed.
        least_replicas: least number of replicas at any time.
        seed: seed of the requests drawn for rates.
    """

    trace: Path
    among: dict[str, PositiveFloat] | None = None
    interval_s: PositiveFloat = 900.0
    least_stay_s: NonNegativeFloat = 0.0
    startup_s: NonNegativeFloat = 60.0
    devices: PositiveInt | dict[str, PositiveInt] | None = None
    least_replicas: NonNegativeInt = 1
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class FleetModel:
    """A day, the kinds of replicas that may hold it, and their step costs."""

    day: Day
    intervals: Intervals
    candidates: tuple[Candidate, ...]

    def simulate(self, counts: Ints, interval_s: float) -> RequestTimes:
        """Return the times of the day's requests on a fleet. # counts [intervals, kinds]"""
        return self.simulate_replicas(replicas_of(counts, interval_s))

    def simulate_replicas(self, replicas: Sequence[Replica]) -> RequestTimes:
        """Return the times of the day's requests on replicas that start and end."""
        kinds = [candidate.kind for candidate in self.candidates]
        lanes = [lanes_of(candidate.kind.plan, candidate.profile) for candidate in self.candidates]
        return simulate_fleet(self.day.requests, replicas, kinds, lanes)


def plan_fleet(request: FleetRequest, asked: Mapping[str, Any], progress: Progress | None = None) -> FleetPlan:
    """Plan a day's fleet.

    Args:
        asked: the arguments for each replica's plan, by the names of `plan_request`.

    Raises:
        InputError: an argument is not accepted, or the trace is malformed.
        InfeasibleError: no replica keeps the bounds, or the devices do not hold the load.
        MachineError: this machine cannot be measured.
    """
    return plan_day(read_day(request.trace, request.seed), request, asked, progress)[0]


def plan_day(
    day: Day, request: FleetRequest, asked: Mapping[str, Any], progress: Progress | None = None
) -> tuple[FleetPlan, FleetModel]:
    """Plan the fleet of a day that has been read; the request's trace is ignored.

    Raises:
        XgptError: as `plan_fleet` does.
    """
    started = time.perf_counter()
    intervals = cut(day, request.interval_s)
    found, limits = _candidates(request, asked, intervals, progress)
    model = FleetModel(day, intervals, tuple(found))
    problem = _problem(request, model, limits)
    solution = solve_fleet(problem)
    planning_s = time.perf_counter() - started
    constraint = found[0].kind.plan.constraint
    factor, solution, times = _settled(model, problem, solution, constraint.quantile, request.interval_s)
    problem = replace(problem, needs=factor * intervals.peaks)
    constant = solve_constant(problem)
    constant_times = model.simulate(constant.replicas, request.interval_s)
    kinds = tuple(candidate.kind for candidate in found)
    fleet = FleetPlan(
        name=day.name,
        constraint=constraint,
        interval_s=request.interval_s,
        least_stay_s=request.least_stay_s,
        least_replicas=request.least_replicas,
        load_factor=factor,
        kinds=kinds,
        lengths=intervals.lengths,
        intervals=_intervals(model, solution.replicas, times, request.interval_s),
        planned=figures_of(model, problem, solution.replicas, times),
        constant=ConstantFleet(
            replicas=tuple(constant.replicas[0].tolist()),
            figures=figures_of(model, problem, constant.replicas, constant_times),
        ),
        least_cost=float(least_costs(problem).sum()),
        gap=solution.gap,
        num_requests=len(day.requests),
        planning_s=round(planning_s, 3),
        verifying_s=round(time.perf_counter() - started - planning_s, 3),
    )
    return fleet, model


def _candidates(
    request: FleetRequest, asked: Mapping[str, Any], intervals: Intervals, progress: Progress | None
) -> tuple[list[Candidate], list[DeviceLimit]]:
    """Return the kinds of replicas of all clusters, and the devices that they share."""
    asked = {"quantile": 0.99, **asked, "workload": intervals.everything, "objective": "arrivals"}
    among: Mapping[str, float | None] = request.among or {}
    if among and asked.get("cluster") is not None:
        raise InputError("among", ", ".join(among), "it brings its own clusters: leave `cluster` out")
    each = [{"cluster": name, "price": price} for name, price in among.items()] or [{}]
    requests: list[PlanRequest] = [plan_request(**{**asked, **of}) for of in each]
    unknown = set(request.devices) - set(among) if isinstance(request.devices, dict) else set()
    if unknown:
        raise InputError("devices", min(unknown), "it names no cluster of `among`")
    found: list[Candidate] = []
    limits: list[DeviceLimit] = []
    why: InfeasibleError | None = None
    for number, one in enumerate(requests):
        name = str(each[number].get("cluster", ""))
        most = request.devices.get(name) if isinstance(request.devices, dict) else request.devices
        problem = resolve(one, progress)
        workload_of(intervals.everything, problem.model)
        if problem.cluster.is_local:
            here = devices_here(problem.cluster, problem.profile.num_threads)
            most = min(most or here, here)
        try:
            of_cluster = candidates(
                replace(problem, max_devices=min(most or problem.cluster.num_devices, problem.cluster.num_devices)),
                one.policy,
                intervals.lengths,
                request.startup_s,
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


def _problem(request: FleetRequest, model: FleetModel, limits: Sequence[DeviceLimit]) -> FleetProblem:
    kinds = [candidate.kind for candidate in model.candidates]
    rates = np.asarray([kind.rates_per_s for kind in kinds]).T
    return FleetProblem(
        needs=model.intervals.peaks,
        rates=rates[model.intervals.groups],
        prices=np.asarray([kind.price_per_hour for kind in kinds]),
        start_costs=np.asarray([kind.change_cost for kind in kinds]),
        hours=request.interval_s / 3600,
        least_stay=max(1, ceil(request.least_stay_s / request.interval_s)),
        least=request.least_replicas,
        limits=tuple(limits),
    )


def _settled(
    model: FleetModel, problem: FleetProblem, solution: FleetSolution, quantile: float, interval_s: float
) -> tuple[float, FleetSolution, RequestTimes]:
    """Return the least load factor tried whose fleet keeps the share of requests in simulation, with that fleet; if
    several give the same fleet, the highest of these.

    Replicas that share a load keep more of it than each alone, and a load that changes within an interval is kept less:
    the simulated day shows which weighs more.

    Raises:
        InfeasibleError: no factor tried keeps it.
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
            f"attain: {share:.4f} of the requests keep the bounds even with {factor:.2g} times the replicas that the "
            f"load takes; ask for less than {quantile:g}, or give shorter intervals",
            nearest_bound_s=None,
            binding="quantile",
        )
    return best


def share_kept(model: FleetModel, times: RequestTimes, *, headroom: bool = True) -> float:
    """Return the share of a day's requests that keep the bounds.

    Args:
        headroom: whether to leave the headroom free, as plans do.
    """
    return float(np.mean(kept(model, times, headroom=headroom)))


def kept(model: FleetModel, times: RequestTimes, *, headroom: bool = True) -> npt.NDArray[np.bool_]:
    """Return which requests keep the bounds. # [requests]"""
    constraint = model.candidates[0].kind.plan.constraint
    slack = max((one.kind.plan.constraint.headroom for one in model.candidates), default=0.0) if headroom else 0.0
    return np.asarray(times.excess(constraint.all_bounds) <= 1 / (1 + slack))


def figures_of(model: FleetModel, problem: FleetProblem, counts: Ints, times: RequestTimes) -> FleetFigures:
    """Return a fleet's cost and the requests that it keeps. # counts [intervals, kinds]"""
    kinds = [candidate.kind for candidate in model.candidates]
    starts = starts_of(counts).sum(axis=0)
    devices = np.asarray([kind.num_devices for kind in kinds])
    waiting_h = np.asarray([(kind.start_s + kind.drain_s) / 3600 for kind in kinds])
    return FleetFigures(
        cost=cost_of(problem, counts),
        device_hours=float(problem.hours * (counts @ devices).sum() + starts @ (devices * waiting_h)),
        starts=int(starts.sum()),
        share_kept=share_kept(model, times),
        share_within=share_kept(model, times, headroom=False),
    )


def _intervals(model: FleetModel, counts: Ints, times: RequestTimes, interval_s: float) -> tuple[FleetInterval, ...]:
    of, count = model.intervals, len(counts)
    index = np.minimum((model.day.requests.arrivals_s // interval_s).astype(int), count - 1)
    arrived = np.bincount(index, minlength=count)
    good = np.bincount(index, kept(model, times), count)
    return tuple(
        FleetInterval(
            rate_per_s=float(of.rates[i]),
            peak_per_s=float(of.peaks[i]),
            lengths=int(of.groups[i]),
            replicas=tuple(counts[i].tolist()),
            share_kept=float(good[i] / arrived[i]) if arrived[i] else None,
        )
        for i in range(count)
    )


def fleet_request(**asked: Any) -> FleetRequest:
    """Return the request that keyword arguments make; None stands for one that was not given.

    Raises:
        InputError: an argument is not accepted.
    """
    request = parse_arguments({name: value for name, value in asked.items() if value is not None}, FleetRequest)
    check_names(request.among or ())
    return request
