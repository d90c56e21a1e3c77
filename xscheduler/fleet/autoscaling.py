"""Run a fleet's controller on the real clock: observe, decide, carry out, repeatedly."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from xgpt.core.errors import MachineError
from xgpt.core.schema.fleet import FleetPlan
from xgpt.operating.drivers.base import Counts, Traffic, World, traffic
from xscheduler.fleet.controller import LEAST_LENGTHS, Controller, Look, Orders
from xscheduler.fleet.simulated import LENGTHS_S

logger = logging.getLogger(__name__)

DAY_S = 86400


@dataclass
class Autoscaler:
    """Keeps the replicas of a world to a fleet plan.

    Attributes:
        fleet: the plan.
        world: where its replicas run.
        look_s: time between looks.
        began_s: when the planned day began, on `clock`.
        dry_run: say what would be done, and do nothing.
        on_note: is called with each action, in words.
        clock: returns the time in s.
    """

    fleet: FleetPlan
    world: World
    controller: Controller
    look_s: float
    began_s: float
    dry_run: bool = False
    on_note: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.time
    _before: dict[str, Counts] | None = None
    _looked_s: float = 0.0
    _recent: deque[tuple[float, Traffic]] = field(default_factory=deque)

    def run(self, stop: Event) -> None:
        """Look regularly until `stop` is set; note errors, and try again at the next look."""
        while not stop.is_set():
            started = time.monotonic()
            try:
                self.look()
            except MachineError as error:
                self.on_note(f"the fleet stays as it is: {error}")
            stop.wait(max(0.0, self.look_s - (time.monotonic() - started)))

    def look(self) -> Orders | None:
        """Look once, and carry out the controller's orders; None: the first look only observes.

        Raises:
            MachineError: the world does not answer.
        """
        clock_s = self.clock()
        now_s = clock_s - self.began_s
        replicas, counts = self.world.replicas(now_s), self.world.counts()
        before, self._before = self._before, counts
        seconds, self._looked_s = clock_s - self._looked_s, clock_s
        if before is None:
            self._order_least(len([replica for replica in replicas if replica.state != "draining"]))
            return None
        came = traffic(before, counts)
        lengths = self._lengths(clock_s, came)
        present = [replica for replica in replicas if replica.state != "draining"]
        look = Look(now_s, seconds, came.num_requests, came.waiting, present, *lengths)
        orders = self.controller.decide(look)
        states = [replica.state for replica in replicas]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"
        rate = came.num_requests / max(seconds, 1e-9)
        self.on_note(f"{rate:.3g} requests/s arrive, {came.waiting:.0f} wait; replicas: {counted}; {orders.reason}")
        self.carry_out(orders)
        return orders

    def _order_least(self, present: int) -> None:
        """If there are no replicas, start those that are planned for this time of day."""
        if present:
            return
        planned = self.fleet.interval_at(self.clock() - self.began_s).replicas
        self.carry_out(Orders(planned, (), 0.0, ""))

    def carry_out(self, orders: Orders) -> None:
        """Carry out orders; in a dry run, only note them."""
        would = "would " if self.dry_run else ""
        for kind, number in enumerate(orders.start):
            if number:
                self.on_note(f"{would}start {number} of {self.fleet.kinds[kind].name}")
                if not self.dry_run:
                    self.world.start(kind, number)
        if orders.drain:
            self.on_note(f"{would}drain {', '.join(orders.drain)}")
            if not self.dry_run:
                self.world.drain(orders.drain)

    def _lengths(self, clock_s: float, came: Traffic) -> tuple[float | None, float | None, int]:
        """Return the mean lengths of recent requests (None: too few), and the number of these requests."""
        self._recent.append((clock_s, came))
        while self._recent[0][0] < clock_s - LENGTHS_S:
            self._recent.popleft()
        ended = sum(one.ended for _, one in self._recent)
        if ended < LEAST_LENGTHS:
            return None, None, ended
        tokens = [sum(getattr(one, name) for _, one in self._recent) for name in ("prompt_tokens", "output_tokens")]
        return tokens[0] / ended, tokens[1] / ended, ended


def began_at(clock_s: float, day_begins: str | None) -> float:
    """Return when the planned day began: at the last `day_begins`, UTC; None: now.

    Args:
        day_begins: HH:MM.
    """
    if day_begins is None:
        return clock_s
    hours, _, minutes = day_begins.partition(":")
    began_s = clock_s // DAY_S * DAY_S + 3600 * int(hours) + 60 * int(minutes)
    return began_s if began_s <= clock_s else began_s - DAY_S
