"""`xgpt serve` whose planner moves to another placement at each look: `python -m tests.attack.to_and_fro OTHER ...`.

OTHER is the plan that it alternates with; what follows, a plan first, goes to `xgpt serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.xrunner.server.test_watch import FakePlanner
from xgpt.cli import main
from xgpt.core.io import load_json
from xgpt.core.schema import Observation, Plan, Proposal
from xgpt.observation import observer
from xgpt.serving import running


class ToAndFro(FakePlanner):
    """Always proposes the one of two plans that does not run."""

    def __init__(self, one: Plan, other: Plan) -> None:
        super().__init__([])
        self.plans = one, other

    def start(self) -> None:
        """Nothing has to be loaded."""

    def stop(self) -> None:
        """Nothing runs."""

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        one, other = self.plans
        self.answers.append(other if plan.stages == one.stages else one)
        return await super().propose(plan, observation)


if __name__ == "__main__":
    other = load_json(Path(sys.argv[1]), Plan, "plan")
    observer.LOOK_EVERY, observer.LOOK_INTERVAL_S = 1, 0.0
    observer.Observer.look = lambda self, snapshot: snapshot.observation()  # type: ignore[method-assign]
    running.find_planner = lambda plan, given: ToAndFro(plan, other)  # type: ignore[assignment, return-value]
    main(["serve", *sys.argv[2:]])
