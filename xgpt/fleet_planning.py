"""Plan a day's fleet from its request: read the day, find each cluster's problem, plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from xgpt.core.errors import InputError
from xgpt.core.io import parse_arguments
from xgpt.core.progress import Progress
from xgpt.core.schema.fleet import FleetPlan
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import check_names, workload_of
from xscheduler.fleet import planning
from xscheduler.fleet.day_load import Day, cut, read_day


class FleetRequest(planning.FleetTerms):
    """The arguments of a fleet, besides those of the plans of its replicas (`xgpt.requests.PlanRequest`).

    Attributes:
        trace: a trace with times, or rates and workloads over hours.
        among: clusters with the price of one device for an hour; None: the one cluster of the plan's request.
        devices: largest number of devices of each cluster, one for all or by name; None: as many as needed.
        seed: seed of the requests drawn for rates.
    """

    trace: Path
    among: dict[str, PositiveFloat] | None = None
    devices: PositiveInt | dict[str, PositiveInt] | None = None
    seed: NonNegativeInt = 0


def fleet_request(**asked: Any) -> FleetRequest:
    """Return the request that keyword arguments make; None stands for one that was not given.

    Raises:
        InputError: an argument is not accepted.
    """
    request = parse_arguments({name: value for name, value in asked.items() if value is not None}, FleetRequest)
    check_names(request.among or ())
    return request


def plan_fleet(request: FleetRequest, asked: Mapping[str, Any], progress: Progress | None = None) -> FleetPlan:
    """Return the cheapest fleet of a day.

    Args:
        asked: the arguments for each replica's plan, by the names of `plan_request`.

    Raises:
        InputError: an argument is not accepted, or the trace is malformed.
        InfeasibleError: no replica keeps the bounds, or the devices do not hold the load.
        MachineError: this machine cannot be measured.
    """
    return plan_fleet_of(read_day(request.trace, request.seed), request, asked, progress)


def plan_fleet_of(
    day: Day, request: FleetRequest, asked: Mapping[str, Any], progress: Progress | None = None
) -> FleetPlan:
    """Return the cheapest fleet of a day that has been read; the request's trace is ignored.

    Raises:
        XgptError: as `plan_fleet` does.
    """
    intervals = cut(day, request.interval_s)
    among: Mapping[str, float | None] = request.among or {}
    if among and asked.get("cluster") is not None:
        raise InputError("among", ", ".join(among), "it brings its own clusters: leave `cluster` out")
    unknown = set(request.devices) - set(among) if isinstance(request.devices, dict) else set()
    if unknown:
        raise InputError("devices", min(unknown), "it names no cluster of `among`")
    asked = {"quantile": 0.99, **asked, "workload": intervals.everything, "objective": "arrivals"}
    clusters = []
    for named in [{"cluster": name, "price": price} for name, price in among.items()] or [{}]:
        of_cluster = plan_request(**{**asked, **named})
        problem = resolve(of_cluster, progress)
        workload_of(intervals.everything, problem.model)
        most = request.devices
        if isinstance(most, dict):
            most = most.get(str(named["cluster"]))
        clusters.append(planning.ClusterChoice(problem, of_cluster.policy, most))
    return planning.plan_day(day, intervals, clusters, request)
