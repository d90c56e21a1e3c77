"""Re-planning: what a server has observed, what it decided, and what it needs from planning."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from xgpt.schema.base import Frozen
from xgpt.schema.plan import Plan
from xgpt.schema.policy import PolicySettings
from xgpt.schema.workload import Workload

Action = Literal["keep", "swap", "redeploy"]


class Observation(Frozen):
    """The requests of late, later ones counting more.

    Attributes:
        workload: their lengths. Outputs that have not ended yet are accounted for: they are at least as long as what
            has come of them.
        num_requests: that arrived.
        num_finished: of these, those whose output has ended.
        weight: independent requests that would tell as much as these, weighted (Kish's effective sample size).
        arrival_rate_per_s: None: too few to tell.
        input_distance, output_distance: Wasserstein distance to the planned lengths, in tokens.
        step_ratio: measured over predicted time of the steps, those of the running plan; None: not known.
        slowdown: measured time of the steps over the profile's; None: too few have been compared.
    """

    schema_version: Literal[1] = 1
    workload: Workload
    num_requests: int = Field(ge=1)
    num_finished: int = Field(ge=0)
    weight: float = Field(gt=0)
    arrival_rate_per_s: float | None = None
    input_distance: float
    output_distance: float
    step_ratio: float | None = None
    slowdown: float | None = Field(default=None, gt=0)


class Outcome(Frozen):
    """What a plan would do under the observed lengths.

    Attributes:
        latency_s: the latency that the bound is compared with.
        keeps_bound: whether it would; None: there is no bound.
        arrival_rate_per_s: up to which arrival rate it would keep its bounds, by simulation; None: the plan does not
            maximise that. `latency_s` is then the quantile of the time from arrival to the last token at that rate.
    """

    policy: PolicySettings
    throughput_rps: float
    latency_s: float
    keeps_bound: bool | None
    arrival_rate_per_s: float | None = None


class Decision(Frozen):
    """What became of a look at the observed lengths.

    Attributes:
        at: date and time, ISO 8601, UTC.
        reason: in words.
        running: the plan that ran.
        best: the best plan for these lengths; None: there is none that keeps the bound.
        slowdown: how many times as long as the profile says steps were taken to last, for both plans.
        gain: throughput, or arrival rate where the plan maximises that, that the best plan gains, as a share of the
            running one's.
        pause_s: how long the switch would hold requests up.
        plan_sha256: of the plan that runs from now on.
        planning_s: time that planning took.
    """

    at: str
    action: Action
    reason: str
    num_requests: int
    input_mean: float
    output_mean: float
    running: Outcome
    best: Outcome | None
    slowdown: float = 1.0
    gain: float
    pause_s: float
    plan_sha256: str
    planning_s: float


class Proposal(NamedTuple):
    """A decision, and the plan to go over to; None: the running one stays."""

    decision: Decision
    plan: Plan | None


class Planner(Protocol):
    """Planning, as a server sees it: elsewhere, and never waited for on the path of a request."""

    def predict_s(self, plan: Plan, encode: list[tuple[int, int, int]], decode_contexts: list[int]) -> float | None:
        """Seconds that a step of a plan should take; None: it waits for others' on its way through several stages.

        Args:
            encode: (start, end, 1 or 0 for sampled) of each piece of a prompt.
        """

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        """Judge the running plan under the observed lengths.

        Raises:
            XgptError: planning has failed; the running plan stays.
        """

    async def close(self) -> None:
        """End what runs in the background."""
