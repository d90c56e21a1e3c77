"""Recommend how many replicas a fleet needs: in real time, as a published metric, or over a simulated day."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from prometheus_client import CollectorRegistry, Gauge, make_asgi_app

from xgpt.autoscaling.scraping import LoadReader, ScrapedTraffic, target_of
from xgpt.connection import own_api_key
from xgpt.core.errors import MachineError
from xgpt.core.network import address_text
from xgpt.core.processes import stops_on_signal
from xgpt.core.schema.fleet import FleetPlan
from xgpt.exporting.replicas import name_of
from xgpt.requests import AutoscaleRequest
from xprofiler.store import profile_of
from xscheduler.fleet.day_load import cut, read_day
from xscheduler.fleet.planning import FleetModel, share_kept
from xscheduler.fleet.recommender import (
    LEAST_LENGTHS,
    LENGTHS_S,
    LoadSample,
    RecommendedDay,
    Recommender,
    WantedReplicas,
    simulate_day,
)
from xscheduler.fleet.replica_counts import DeviceLimit
from xscheduler.fleet.replica_kinds import Candidate, devices_here

DAY_S = 86400
RATE_SPAN_S = 600.0
"""A rate that the user states is assumed to have lasted for this time before the first reading."""
WANTED, READY, NEED, AT = (
    "xgpt_replicas_wanted",
    "xgpt_replicas_ready",
    "xgpt_load_needed",
    "xgpt_recommended_at_seconds",
)
"""Names of the published metrics."""


def autoscale(
    fleet: FleetPlan, request: AutoscaleRequest, on_note: Callable[[str], None], stop: Event | None = None
) -> WantedReplicas | None:
    """Recommend and publish numbers of replicas until `stop` is set. Return the last recommendation, or None if there
    was none.

    Raises:
        InputError: `scrape` names a kind that the fleet does not have.
        MachineError: the port cannot be opened, or with `once` no replica answers.
    """
    ending = stop or Event()
    clock_s = time.time()
    began_s = time.monotonic() - (clock_s - began_at(clock_s, request.day_begins))
    recommender = Recommender(fleet, device_limits(fleet), request.look_s)
    kinds = [kind.name for kind in fleet.kinds]
    targets = [target_of(text, kinds) for text in request.scrape]
    reader = LoadReader(targets, len(kinds), own_api_key())
    with stops_on_signal(ending):
        live = _Live(fleet, request, recommender, reader, began_s)
        if request.once:
            return live.once(ending)
        with _published(fleet, request) as publish:
            on_note(f"publishing recommendations at http://{address_text(request.host, publish.port)}/metrics")
            while not ending.is_set():
                started = time.monotonic()
                found, note = live.look()
                on_note(note)
                if found is not None:
                    publish(found, live.ready)
                ending.wait(max(0.0, request.look_s - (time.monotonic() - started)))
    return live.last


@dataclass
class _Live:
    """Reads the live load, and recommends numbers of replicas.

    Attributes:
        began_s: time on the monotonic clock at which the planned day began.
    """

    fleet: FleetPlan
    request: AutoscaleRequest
    recommender: Recommender
    reader: LoadReader
    began_s: float

    def __post_init__(self) -> None:
        self.last: WantedReplicas | None = None
        self.ready: tuple[int, ...] | None = None
        self._looked_s: float | None = None
        self._recent: deque[tuple[float, ScrapedTraffic]] = deque()

    def once(self, stop: Event) -> WantedReplicas | None:
        found, note = self.look()
        if self.request.scrape:  # arrivals are counted between two readings
            if self.ready is None:
                raise MachineError(note)
            stop.wait(self.request.look_s)
            found, note = self.look()
        return found

    def look(self) -> tuple[WantedReplicas | None, str]:
        """Read the load. Return a recommendation, and a line of text about it."""
        now_s = time.monotonic() - self.began_s
        rate = self.request.arrival_rate_per_s
        if rate is not None:
            seconds = RATE_SPAN_S if self._looked_s is None else now_s - self._looked_s
            self._looked_s = now_s
            self.last = self.recommender.recommend(LoadSample(now_s, seconds, rate * seconds))
            return self.last, f"{rate:.3g} requests/s arrive; {self._in_words(self.last)}"
        traffic = self.reader.read(now_s)
        self.ready = None if traffic is None else traffic.ready
        if traffic is None or not traffic.seconds:
            self.last = self.recommender.as_planned(now_s, self.ready)
            why = "no replica answers" if traffic is None else "a rate needs a second reading"
            return self.last, f"{why}, so the load planned for this time of day is assumed; {self._in_words(self.last)}"
        lengths = self._lengths(now_s, traffic)
        sample = LoadSample(now_s, traffic.seconds, traffic.num_requests, traffic.waiting, traffic.ready, *lengths)
        self.last = self.recommender.recommend(sample)
        return self.last, (
            f"{traffic.num_requests / traffic.seconds:.3g} requests/s arrive, {traffic.waiting:.0f} wait; "
            f"{self._in_words(self.last)}"
        )

    def _in_words(self, found: WantedReplicas) -> str:
        wanted = ", ".join(f"{n} {kind.name}" for n, kind in zip(found.replicas, self.fleet.kinds, strict=True))
        return f"recommended for {found.need_per_s:.3g} requests/s: {wanted}"

    def _lengths(self, now_s: float, traffic: ScrapedTraffic) -> tuple[float | None, float | None, int]:
        """Return the mean input length and the mean output length of recent requests, and how many of them have ended.
        The means are None if there are too few requests.
        """
        self._recent.append((now_s, traffic))
        while self._recent[0][0] < now_s - LENGTHS_S:
            self._recent.popleft()
        arrived, ended, prompt, output = (
            sum(getattr(one, name) for _, one in self._recent)
            for name in ("num_requests", "ended", "prompt_tokens", "output_tokens")
        )
        if min(arrived, ended, output) < LEAST_LENGTHS:
            return None, None, round(ended)
        return prompt / arrived, output / ended, round(ended)


class _Metrics:
    """The metrics published for a fleet. Calling the object sets them."""

    def __init__(self, fleet: FleetPlan, port: int, registry: CollectorRegistry) -> None:
        self.port = port
        self._labels = [(fleet_name(fleet), str(number), kind.name) for number, kind in enumerate(fleet.kinds)]
        labels = ("fleet", "kind", "name")
        self._wanted = Gauge(
            WANTED,
            "Replicas that the load needs, by kind of replica: its number in the fleet, and its name.",
            labels,
            registry=registry,
        )
        self._ready = Gauge(READY, "Replicas that answered when the load was last read.", labels, registry=registry)
        self._need = Gauge(NEED, "Requests/s for which the replicas are recommended.", registry=registry)
        self._at = Gauge(AT, "Unix time at which the replicas were recommended, in seconds.", registry=registry)

    def __call__(self, found: WantedReplicas, ready: tuple[int, ...] | None) -> None:
        for labels, wanted, count in zip(self._labels, found.replicas, ready or (0,) * len(self._labels), strict=True):
            self._wanted.labels(*labels).set(wanted)
            self._ready.labels(*labels).set(count)
        self._need.set(found.need_per_s)
        self._at.set(time.time())


@contextmanager
def _published(fleet: FleetPlan, request: AutoscaleRequest) -> Iterator[_Metrics]:
    registry = CollectorRegistry()
    from xrunner.server.http.connections import Listener  # late: exports also import this module, and need no server
    from xrunner.server.http.process import GuardedServer

    with Listener.at(request.host, request.port) as listener:
        server = GuardedServer(make_asgi_app(registry), listener, grace_s=1)
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield _Metrics(fleet, listener.getsockname()[1], registry)
        finally:
            server.should_exit = True
            thread.join()


def began_at(clock_s: float, day_begins: str | None) -> float:
    """Return the start of the planned day, in seconds on the clock of `clock_s`: the latest moment at which the time of
    day was `day_begins`. If that is None, the day starts now.

    Args:
        day_begins: a time of day in UTC, as HH:MM.
    """
    if day_begins is None:
        return clock_s
    hours, _, minutes = day_begins.partition(":")
    began_s = clock_s // DAY_S * DAY_S + 3600 * int(hours) + 60 * int(minutes)
    return began_s if began_s <= clock_s else began_s - DAY_S


def device_limits(fleet: FleetPlan) -> list[DeviceLimit]:
    """Return a list with one limit: how many of this machine's devices the replicas may use together. The list is empty
    if no replica runs on this machine.
    """
    local = [number for number, kind in enumerate(fleet.kinds) if kind.plan.cluster.is_local]
    if not local:
        return []
    devices = tuple(fleet.kinds[number].num_devices for number in local)
    plan = fleet.kinds[local[0]].plan
    return [DeviceLimit(tuple(local), devices, devices_here(plan.cluster, plan.profile.num_threads))]


def fleet_name(fleet: FleetPlan) -> str:
    """Return a fleet's name in the form that Kubernetes accepts: only letters, digits and dashes."""
    return name_of(fleet.kinds[0].plan)[:40].rstrip("-")


@dataclass(frozen=True)
class SimulatedFleet:
    """The result of a simulated day on which the fleet followed recommendations.

    Attributes:
        day: the time at which each replica ran, and the day's cost.
        share_kept: share of requests that keep the bounds after the bounds are tightened by the headroom.
        share_within: share of requests that keep the original bounds.
    """

    day: RecommendedDay
    num_requests: int
    share_kept: float
    share_within: float

    @property
    def figures(self) -> dict[str, float]:
        return {
            "requests": self.num_requests,
            "share_kept": self.share_kept,
            "share_within": self.share_within,
            "device_hours": self.day.device_hours,
            "cost": self.day.cost,
            "replicas": len(self.day.replicas),
        }


def simulate(fleet: FleetPlan, trace: Path, look_s: float) -> SimulatedFleet:
    """Simulate a day on which a fleet follows each recommendation immediately, and return the result.

    Raises:
        InputError: the trace is malformed, or a plan's profile is not on this machine.
    """
    day = read_day(trace)
    found = tuple(Candidate(kind, profile_of(kind.plan, None)) for kind in fleet.kinds)
    model = FleetModel(day, cut(day, fleet.interval_s), found)
    recommend = Recommender(fleet, device_limits(fleet), look_s).recommend
    done = simulate_day(fleet, day.requests, day.seconds, recommend, look_s, fleet.intervals[0].replicas)
    times = model.simulate_replicas(done.replicas)
    kept, within = (share_kept(model, times, headroom=headroom) for headroom in (True, False))
    return SimulatedFleet(done, len(day.requests), kept, within)
