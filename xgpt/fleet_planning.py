"""Plan a day's fleet for a request, by building a problem for each cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xgpt.core.errors import InputError
from xgpt.core.progress import Progress
from xgpt.core.schema.fleet import FleetPlan
from xgpt.problems import resolve
from xgpt.requests import FleetRequest, as_plan_request
from xgpt.resolve import workload_of
from xscheduler.fleet.day_load import Day, cut
from xscheduler.fleet.planning import FleetCluster, plan_day


def plan_fleet_of(day: Day, request: FleetRequest, progress: Progress | None = None) -> FleetPlan:
    """Return the cheapest fleet for a day. `day` has already been read: `request.trace` is ignored.

    Raises:
        InputError: an argument is not accepted.
        InfeasibleError: no replica keeps the bounds, or the devices cannot serve the load.
        MachineError: this machine cannot be measured.
    """
    intervals = cut(day, request.interval_s)
    among: Mapping[str, float | None] = request.among or {}
    if among and "cluster" in request.model_fields_set:
        raise InputError("among", ", ".join(among), "it already contains the clusters: leave `cluster` out")
    unknown = set(request.devices) - set(among) if isinstance(request.devices, dict) else set()
    if unknown:
        raise InputError("devices", min(unknown), "it is not a cluster of `among`")
    same: dict[str, Any] = {"workload": intervals.everything, "objective": "arrivals", "quantile": request.attain}
    clusters = []
    for named in [{"cluster": name, "price": price} for name, price in among.items()] or [{}]:
        of_cluster = as_plan_request(request, **same, **named)
        problem = resolve(of_cluster, progress)
        workload_of(intervals.everything, problem.model)
        most = request.devices
        if isinstance(most, dict):
            most = most.get(str(named["cluster"]))
        clusters.append(FleetCluster(problem, of_cluster.policy, most))
    return plan_day(
        day,
        intervals,
        clusters,
        interval_s=request.interval_s,
        least_stay_s=request.least_stay_s,
        startup_s=request.startup_s,
        least_replicas=request.least_replicas,
    )
