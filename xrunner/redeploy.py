"""Change to a plan with another placement: let running requests finish, then deploy the workers again."""

from __future__ import annotations

import logging

from xgpt.core.errors import MachineError
from xgpt.core.policies import Schedule
from xrunner.executor import Deployer, Executor
from xrunner.generation import Generation

logger = logging.getLogger(__name__)


class Redeployment:
    """The plan to deploy once no request runs, and the requests that are parked until then.

    Args:
        deploy: builds the workers of another plan.
    """

    def __init__(self, deploy: Deployer | None) -> None:
        self._deploy = deploy
        self._next: Schedule | None = None
        self._parked: dict[int, Generation] = {}
        self._num_plans = self._num_taken = self._num_settled = 0

    @property
    def is_pending(self) -> bool:
        return self._next is not None

    @property
    def is_changing(self) -> bool:
        return self._num_settled < self._num_plans

    def announce(self) -> None:
        """Note that a plan will be passed to `adopt`. Any thread may call this."""
        self._num_plans += 1

    def adopt(self, schedule: Schedule, running: Schedule) -> bool:
        """Adopt a plan now if it has the same placement and no plan is pending. Otherwise deploy it next.

        Raises:
            MachineError: no other placement can be deployed.
        """
        self._num_taken += 1
        if not self.is_pending and running.apply(schedule):
            self._num_settled = self._num_taken
            return True
        if self._deploy is None:
            raise MachineError("this engine cannot change to another placement; start the server with that plan")
        self._next = schedule
        return False

    def park(self, generation: Generation) -> None:
        self._parked[generation.id] = generation

    def forget(self, id_: int) -> None:
        self._parked.pop(id_, None)

    def run(self, before: Schedule) -> tuple[Schedule, Executor, str | None]:
        """Deploy the other plan. If that fails, perhaps for lack of memory, deploy the previous one again."""
        assert self._deploy is not None and self._next is not None
        refused = None
        try:
            schedule, executor = self._next, self._deploy(self._next)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        if refused is not None:  # not within the except block, where the error would keep referenced objects in memory
            logger.error("another plan could not be deployed", extra={"fields": {"reason": refused}})
            schedule = before.fresh()
            executor = self._deploy(schedule)
        self._next = None
        return schedule, executor, refused

    def finish(self) -> list[Generation]:
        self._num_settled = self._num_taken
        parked, self._parked = list(self._parked.values()), {}
        return parked
