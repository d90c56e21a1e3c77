"""Operate a fleet: run its controller with a world, on the real clock or on the simulated one."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat

from xgpt.connection import own_api_key
from xgpt.core.errors import InputError
from xgpt.core.io import parse_arguments
from xgpt.core.schema import ClusterSpec, Frozen
from xgpt.core.schema.fleet import FleetPlan
from xgpt.exporting.pods import Names
from xgpt.operating.drivers.kubernetes import ApiServer, Kubernetes
from xgpt.operating.drivers.local import LocalWorld
from xprofiler.store import profile_of
from xscheduler.fleet.autoscaling import Autoscaler, began_at
from xscheduler.fleet.controller import Controller
from xscheduler.fleet.day import cut, read_day
from xscheduler.fleet.kinds import Candidate, devices_here
from xscheduler.fleet.planning import FleetModel, share_kept
from xscheduler.fleet.simulated import ControlledDay, control_day
from xscheduler.fleet.sizes import DeviceLimit


def _time_of_day(text: str) -> str:
    if re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", text) is None:
        raise ValueError("write HH:MM, as in 08:30")
    return text


class AutoscaleRequest(Frozen):
    """The arguments of autoscaling.

    Attributes:
        driver: where replicas run.
        dry_run: say what would be done, and do nothing.
        look_s: time between two looks.
        day_begins: HH:MM, UTC, at which the planned day begins; None: now.
        port, state: for replicas on this machine: the front's port, and the directory of the fleet's state.
        name, namespace, api_server: for Kubernetes; None: see `xgpt autoscale --help`.
    """

    driver: Literal["local", "kubernetes"] = "local"
    dry_run: bool = False
    look_s: PositiveFloat = 15.0
    day_begins: Annotated[str, AfterValidator(_time_of_day)] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    state: Path = Path("fleet-state")
    name: str | None = None
    namespace: str | None = None
    api_server: str | None = None


def autoscale_request(**asked: Any) -> AutoscaleRequest:
    """Return the request that keyword arguments make; None stands for one that was not given.

    Raises:
        InputError: an argument is not accepted, or goes with another driver.
    """
    request = parse_arguments({name: value for name, value in asked.items() if value is not None}, AutoscaleRequest)
    if request.driver != "kubernetes":
        for name in ("name", "namespace", "api_server"):
            if getattr(request, name) is not None:
                raise InputError(name, getattr(request, name), "it goes with `driver=kubernetes`")
    return request


def autoscale(
    fleet: FleetPlan, request: AutoscaleRequest, on_note: Callable[[str], None], stop: Event | None = None
) -> None:
    """Fit a fleet to its load until `stop` is set.

    Raises:
        InputError: the fleet cannot run there.
        MachineError: the front does not start.
    """
    clock_s = time.time()
    began_s = began_at(clock_s, request.day_begins)
    limits = device_limits(fleet)
    controller = Controller(fleet, limits, request.look_s)
    ending = stop or Event()
    if request.driver == "kubernetes":
        name = request.name or fleet_name(fleet)
        with closing(ApiServer(request.api_server)) as server, _until_signal(ending):
            cluster = Kubernetes(fleet, name, server, request.namespace, own_api_key(), began_s)
            Autoscaler(fleet, cluster, controller, request.look_s, began_s, request.dry_run, on_note).run(ending)
        return
    foreign = next((kind.name for kind in fleet.kinds if not _runs_here(kind.plan.cluster)), None)
    if foreign is not None:
        raise InputError(
            "fleet.kinds", foreign, "replicas on this machine take a fleet of `cluster=local` or `local:N`"
        )
    world = LocalWorld(fleet, request.state, request.port, began_s)
    keeper = Autoscaler(fleet, world, controller, request.look_s, began_s, request.dry_run, on_note)
    with _until_signal(ending):
        if not request.dry_run:
            world.open()
            on_note(f"the front listens on {world.url}")
        keeper.run(ending)
    if not request.dry_run:
        on_note("ending: the front first, then the replicas, each once its requests have ended")
        world.close()


def _runs_here(cluster: ClusterSpec) -> bool:
    """Whether a cluster's replicas may run on this machine: it is this machine, or a CPU described by a file."""
    return cluster.is_local or cluster.device.type == "cpu"


@contextmanager
def _until_signal(stop: Event) -> Iterator[None]:
    """Set the event on SIGTERM or SIGINT."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def device_limits(fleet: FleetPlan) -> list[DeviceLimit]:
    """Return the limit on devices that replicas on this machine share."""
    local = [number for number, kind in enumerate(fleet.kinds) if kind.plan.cluster.is_local]
    if not local:
        return []
    devices = tuple(fleet.kinds[number].num_devices for number in local)
    plan = fleet.kinds[local[0]].plan
    return [DeviceLimit(tuple(local), devices, devices_here(plan.cluster, plan.profile.num_threads))]


def fleet_name(fleet: FleetPlan) -> str:
    """Return a fleet's name as Kubernetes accepts it: letters, digits and dashes."""
    return Names.of(fleet.kinds[0].plan).name[:40].rstrip("-")


@dataclass(frozen=True)
class SimulatedFleet:
    """What a controller has made of a day.

    Attributes:
        day: the times at which replicas ran, and their cost.
        share_kept, share_within: shares of the requests within the bounds less the headroom, and within the bounds.
    """

    day: ControlledDay
    num_requests: int
    share_kept: float
    share_within: float

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by its name."""
        return {
            "requests": self.num_requests,
            "share_kept": self.share_kept,
            "share_within": self.share_within,
            "device_hours": self.day.device_hours,
            "cost": self.day.cost,
            "replicas": len(self.day.replicas),
        }


def simulate(fleet: FleetPlan, trace: Path, look_s: float) -> SimulatedFleet:
    """Run a fleet's controller over a day on the simulated clock, then its requests on the replicas.

    Raises:
        InputError: the trace is malformed, or a plan's profile is not here.
    """
    day = read_day(trace)
    found = tuple(Candidate(kind, profile_of(kind.plan, None)) for kind in fleet.kinds)
    model = FleetModel(day, cut(day, fleet.interval_s), found)
    decide = Controller(fleet, device_limits(fleet), look_s).decide
    done = control_day(fleet, day.requests, day.seconds, decide, look_s, fleet.intervals[0].replicas)
    times = model.simulate_replicas(done.replicas)
    kept, within = (share_kept(model, times, headroom=headroom) for headroom in (True, False))
    return SimulatedFleet(done, len(day.requests), kept, within)
