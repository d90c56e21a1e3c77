"""The interface of an objective: the figure that a plan maximises, and how the best plan is found and proven."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from xgpt.core.progress import Progress
from xgpt.core.schema import Plan
from xscheduler.schedule import Scheduler

Ranked = dict[str, list[tuple[Plan, float]]]
"""Each policy's plans with their objective's value in closed form, the highest first."""


MOST_SECONDS = 20.0
"""Seconds after which a search ends with the best plan so far, and says so. Most searches take far less."""
BOUNDS = ("latency_bound_s", "ttft_s", "tpot_s")
"""The bounds of a constraint, by name."""
TOGETHER = "none: requests that began together stay together, which closed forms do not model"
"""Why there is no proof if a simulation at saturation contradicts the closed form."""


class Objective(ABC):
    """The figure that a plan maximises.

    An objective ranks candidates in closed form, verifies the best ones by simulation, and certifies the result: it
    computes how much better any other candidate could be.

    Args:
        finish: completes a plan before it is simulated; for example, it sets the order of admission.
        progress: is called for each part of the work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        finish: Callable[[Plan], Plan] = lambda plan: plan,
        progress: Progress | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.finish = finish
        self.progress = progress

    @abstractmethod
    def rank(self, kinds: Sequence[str]) -> Ranked:
        """Return each policy's plans with the highest value in closed form.

        Raises:
            InfeasibleError: closed forms show that no plan keeps the constraint.
        """

    @abstractmethod
    def verify(self, ranked: Ranked) -> dict[str, Plan]:
        """Return each policy's plan with the highest value in simulation.

        Raises:
            InfeasibleError: no plan keeps the constraint.
        """

    @abstractmethod
    def certify(self, plans: dict[str, Plan]) -> dict[str, Plan]:
        """Return the plans with their proofs, the highest value first.

        Raises:
            InfeasibleError: no plan sustains the requested arrival rate.
        """

    def settle(self, kinds: Sequence[str]) -> dict[str, Plan]:
        """Return each policy's best plan, verified and certified, the highest value first.

        Raises:
            InfeasibleError: no plan keeps the constraint.
        """
        return self.certify(self.verify(self.rank(kinds)))


def simulating(what: str) -> str:
    """Return a progress bar's text for a simulation."""
    from xsimulator.counts.counted_run import is_compiled

    once = "" if is_compiled() else " (compiled once on each machine, in about 15 s)"
    return f"simulating {what}{once}"
