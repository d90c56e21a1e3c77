"""Start and watch workers on several machines through Ray, which runs one launcher on each machine.

Ray (https://docs.ray.io, "Placement Groups" and "Actors") knows which machines are free and alive. An actor owns a
machine's `LauncherProcess`. Workers report to the engine's process, and exchange tensors, as on one machine.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import getsource
from typing import Any, NoReturn

import msgspec
import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from xgpt.core.errors import InputError, MachineError
from xgpt.core.network import reach
from xrunner.cluster import looking
from xrunner.cluster.launching import (
    ALIVE_S,
    SILENCE_S,
    Exited,
    LauncherProcess,
    LauncherSettings,
    MachineGroup,
    StartWorkers,
)
from xrunner.cluster.looking import look

MEET_S = 600.0
"""Seconds within which Ray must find enough machines, for example after the loss of one, and Ray's head must answer."""
LOOK_S = 120.0
REMEDIES = {
    "Python": "use the same Python on all machines",
    "Ray": "install the same Ray on all machines",
    "xgpt": "install the same xgpt-serve[ray] on all machines",
    "checkpoint": "copy the same checkpoint to the same path of all machines",
}
AGAIN_S = 1.0
_connecting = threading.Lock()

logger = logging.getLogger(__name__)


def reserve(address: str, count: int, devices: int, *, gpus: bool, checkpoint: str | None = None) -> MachineGroup:
    """Reserve devices on machines of a Ray cluster. The returned group starts launchers there and later frees the
    devices.

    Raises:
        InputError: no Ray cluster is at that address.
        MachineError: the cluster had too few free devices for `MEET_S` seconds, or a machine differs from this one.
    """
    _connect(address)
    bundle = {"GPU": float(devices)} if gpus else {"CPU": float(devices)}
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD" if count > 1 else "PACK")
    try:
        ray.get(group.ready(), timeout=MEET_S)
    except GetTimeoutError:
        wanted = f"{devices} free {'GPUs' if gpus else 'CPUs'} on each of {count} machines within {MEET_S:.0f} s"
        raise MachineError(f"Ray did not find {wanted}; `ray status` shows its resources") from None
    placed = placement_group_table(group)["bundles_to_node_id"].values()
    try:
        _compare([node for node in ray.nodes() if node["NodeID"] in placed], checkpoint)
    except MachineError:
        _free(group)
        raise
    launches = [partial(RayLauncher, group, number, bundle.get("GPU", 0.0)) for number in range(count)]
    return MachineGroup(launches, partial(_free, group))


def examine(address: str, count: int, devices: int, *, gpus: bool, checkpoint: str | None, waits: bool) -> None:
    """Check that a Ray cluster has `devices` devices on one machine `count` times, and that its machines are like this
    one. Nothing is reserved.

    Args:
        waits: whether machines have `MEET_S` seconds to join, as those of a group do that start in any order.

    Raises:
        InputError: no Ray cluster is at that address.
        MachineError: the cluster has too few machines with enough devices, or one differs from this machine.
    """
    _connect(address)
    try:
        kind = "GPU" if gpus else "CPU"
        deadline = time.monotonic() + (MEET_S if waits else 0.0)
        nodes, places = _with(kind, devices)
        while places < count:
            if time.monotonic() > deadline:
                wanted = f"{devices} {kind}s in each of {count} places"
                says = f"the plan needs {wanted}, and the Ray cluster has {places} of these: see `ray status`"
                raise MachineError(says)
            time.sleep(AGAIN_S)
            nodes, places = _with(kind, devices)
        _compare(nodes, checkpoint)
    finally:
        ray.shutdown()


def _with(kind: str, devices: int) -> tuple[list[dict[str, Any]], int]:
    """Return the machines with enough devices, and how often they have that many."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind, 0) >= devices]
    return nodes, sum(int(node["Resources"][kind] // devices) for node in nodes)


def _compare(nodes: Sequence[Mapping[str, Any]], checkpoint: str | None) -> None:
    """Compare what runs on nodes with what runs here, before any worker starts."""
    ask, here = _asking(checkpoint), look(checkpoint)
    calls = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls.append(ray.remote(ask).options(num_cpus=0, scheduling_strategy=strategy).remote())
    for node, call in zip(nodes, calls, strict=True):
        name = node["NodeManagerAddress"]
        try:
            there = json.loads(ray.get(call, timeout=LOOK_S))
        except RayError as error:
            raise MachineError(f"machine {name} does not answer: {str(error).splitlines()[0]}") from None
        for what, value in here.items():
            if there[what] != value:
                has = there[what] or f"no {what}"
                raise MachineError(f"machine {name} has {has}, and this one {value}: {REMEDIES[what]}")


def _asking(checkpoint: str | None) -> Callable[[], str]:
    """Return the function by which a machine looks at itself. Ray sends its code there, which may lack xgpt."""
    source = getsource(looking)
    given = [] if checkpoint is None else [checkpoint]

    def ask() -> str:
        import subprocess
        import sys

        return subprocess.run(
            [sys.executable, "-P", "-c", source, *given], stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    return ask


def _free(group: PlacementGroup) -> None:
    with suppress(RayError):
        remove_placement_group(group)


def _leave(error: AuthenticationError) -> NoReturn:
    """End the engine's process, because its Ray cluster no longer exists. After a restart of Ray's head, the cluster is
    a new one.

    A process can join only one Ray cluster in its lifetime. The HTTP server starts another engine process, which joins
    the new cluster and continues the requests.
    """
    logger.error("the Ray cluster is gone, so the engine's process ends: %s", str(error).splitlines()[0])
    os._exit(1)


def host() -> str:
    return str(get_node_ip_address())


def _connect(address: str) -> None:
    with _connecting:
        if ray.is_initialized():
            return
        logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns that this thread receives no signals
        deadline = time.monotonic() + MEET_S
        while True:
            try:
                if address != "auto":
                    reach(address)  # Ray itself would stop all threads of the process until the head answers
                ray.init(address=address, configure_logging=False)
                return
            except (OSError, RayError) as error:
                if address == "auto" or time.monotonic() > deadline:
                    reason = f"no Ray cluster answers there: {str(error).splitlines()[0]}"
                    raise InputError("ray", address, reason) from None
            except RuntimeError as error:  # versions differ
                raise MachineError(f"Ray refuses this machine: {' '.join(str(error).split())}") from None
            time.sleep(AGAIN_S)


class _Machine:
    def __init__(self, settings: LauncherSettings, threads: str | None) -> None:
        # Ray sets this variable to the number of the actor's CPUs, but the launcher itself computes nothing.
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        self._launcher = LauncherProcess(msgspec.structs.replace(settings, host=host()))

    def start(self, order: StartWorkers) -> None:
        self._launcher.start(order)

    def exited(self) -> list[Exited]:
        select.select([self._launcher], [], [], ALIVE_S)
        return self._launcher.exited()


class RayLauncher:
    """A `MachineLauncher` on the machine of one bundle of a placement group.

    Ray starts the launcher once the machine is alive. If the machine is lost, the launcher is, too. Ray then places the
    next launcher on the same machine if it is back, or on another machine with enough free devices.
    """

    sees_workers = False

    def __init__(self, group: PlacementGroup, number: int, gpus: float, settings: LauncherSettings) -> None:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options: dict[str, Any] = {"scheduling_strategy": strategy, "num_cpus": 0, "num_gpus": gpus}
        self._create = partial(
            ray.remote(_Machine).options(**options).remote, settings, os.environ.get("OMP_NUM_THREADS")
        )
        self._number = number
        self._order: StartWorkers | None = None
        self._is_there = False
        self._heard_s = time.monotonic()
        self._actor: Any = None
        self._place()

    def _place(self) -> None:
        self._placed_s = time.monotonic()
        self._calls: list[Any] = []
        try:
            self._actor = self._create()
            self._calls.append(self._actor.exited.remote())
            if self._order is not None:
                self.start(self._order)
        except AuthenticationError as error:
            _leave(error)
        except RayError:
            self._calls = []  # the head does not answer

    def start(self, order: StartWorkers) -> None:
        self._order = order
        if self._calls:
            self._calls.insert(0, self._actor.start.remote(order))

    def exited(self) -> list[Exited]:
        ended: list[Exited] = []
        now = time.monotonic()
        silent_s = now - self._heard_s
        if silent_s > (SILENCE_S if self._is_there else MEET_S):
            raise MachineError(f"the launcher of machine {self._number} has been silent for {silent_s:.0f} s")
        if not self._calls:
            if now - self._placed_s > AGAIN_S:
                self._place()
            return []
        ready, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        try:
            for call in ready:
                ended += ray.get(call) or ()
        except AuthenticationError as error:
            _leave(error)
        except (RayError, MachineError) as error:
            if self._is_there:
                reason = str(error).strip().splitlines()[0]
                raise MachineError(f"the launcher of machine {self._number} is lost: {reason}") from None
            # Until Ray knows that a machine is lost, it places actors there, which die immediately.
            self._calls = []
            return []
        if ready:
            self._is_there, self._heard_s = True, now
        if not self._calls:
            self._calls = [self._actor.exited.remote()]
        return ended

    def is_at_work(self) -> bool:
        return not self._is_there

    def excuse_silence(self) -> None:
        self._heard_s = time.monotonic()

    def close(self) -> None:
        with suppress(RayError):
            if self._actor is not None:
                ray.kill(self._actor)
