"""Re-planning: what a server has observed, what it decided, and what it needs from planning."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.policy import PolicySettings
from xgpt.core.schema.workload import Workload

Action = Literal["keep", "swap", "redeploy"]


class ObservedReuse(Frozen):
    """What recent requests found of their prompts, and would find with another size of what is kept.

    Attributes:
        share: share of prompt tokens that was found.
        sizes: tokens kept.
        shares: share of prompt tokens that a cache of each of these sizes finds.
        most: the same where it forgets nothing.
    """

    share: float = Field(ge=0, le=1)
    sizes: tuple[float, ...]
    shares: tuple[float, ...]
    most: float = Field(ge=0, le=1)


class Observation(Frozen):
    """The lengths of recent requests, the most recent ones counting most.

    Attributes:
        workload: their lengths. Outputs that are still running count as at least as long as they are by now.
        num_requests: requests that arrived.
        num_finished: those of them that have finished.
        weight: Kish's effective sample size of the weighted requests.
        arrival_rate_per_s: requests a second; None: too few to tell.
        input_distance, output_distance: Wasserstein distance to the planned lengths, in tokens.
        step_ratio: measured over predicted time of the running plan's steps; None: not known.
        slowdown: measured time of the steps over the profile's; None: too few have been compared.
        reuse: what they had in common; None: it was not observed.
        goodput: share of the latest requests that kept their bounds; None: there are none, or too few requests.
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
    reuse: ObservedReuse | None = None
    goodput: float | None = None


class Outcome(Frozen):
    """The prediction of a plan under the observed lengths.

    Attributes:
        latency_s: the latency that the bound is compared with.
        keeps_bound: whether that keeps the bound; None: there is no bound.
        arrival_rate_per_s: highest arrival rate at which it would keep its bounds, by simulation; None: the plan does
            not maximise that. `latency_s` is then the quantile of the time from arrival to the last token at that rate.
    """

    policy: PolicySettings
    throughput_rps: float
    latency_s: float
    keeps_bound: bool | None
    arrival_rate_per_s: float | None = None


class Decision(Frozen):
    """The outcome of judging the running plan under the observed lengths.

    Attributes:
        at: date and time, ISO 8601, UTC.
        reason: why, in words.
        running: the plan that ran until then.
        best: the best plan for these lengths; None: there is none that keeps the bound.
        slowdown: factor on the profile's times that both plans were predicted with.
        gain: throughput, or arrival rate where the plan maximises that, that the best plan gains, as a share of the
            running one's.
        pause_s: seconds for which the switch would hold up requests.
        plan_sha256: hash of the plan that runs from then on.
        planning_s: seconds that planning took.
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
    """Planning, as a server sees it: in another process, and never on the path of a request."""

    def predict_s(self, plan: Plan, encode: list[tuple[int, int, int]], decodes: list[tuple[int, int]]) -> float | None:
        """Return the seconds that a step of a plan should take; None: it also waits for other steps of its pipeline.

        Args:
            encode: (start, end, 1 or 0 for sampled) of each piece of a prompt.
            decodes: (input tokens, output tokens so far) of each decoding request.
        """

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        """Judge the running plan under the observed lengths.

        Raises:
            XgptError: planning has failed; the running plan stays.
        """

    async def close(self) -> None:
        """End the planning process."""
