"""Define the data of re-planning (a server's observation and decision) and the interface of its planner."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.policy import PolicySettings
from xgpt.core.schema.recommendation import Recommendation
from xgpt.core.schema.workload import Workload

Action = Literal["keep", "swap", "redeploy"]
Cause = Literal["lengths", "pace", "goodput", "reuse", "arrivals", "asked"]
LengthsFrom = Literal["planned", "observed"]


class ObservedReuse(Frozen):
    """The prefix reuse of recent requests, observed in the present cache and computed for other cache sizes.

    Attributes:
        share: share of prompt tokens that were in the cache.
        sizes: cache sizes, in tokens.
        shares: for each of these sizes, the share of prompt tokens that would be in the cache.
        most: share of prompt tokens that would be in an unlimited cache.
    """

    share: float = Field(ge=0, le=1)
    sizes: tuple[float, ...]
    shares: tuple[float, ...]
    most: float = Field(ge=0, le=1)


class Observation(Frozen):
    """What a server observes of its recent requests and steps. Later requests have more weight.

    Attributes:
        workload: lengths of the recent requests. Unfinished outputs count as longer than they are so far.
        num_requests: number of requests that arrived.
        num_finished: number of these that have finished.
        weight: Kish's effective sample size of the weighted requests.
        arrival_rate_per_s: arrivals a second. None means that there were too few requests.
        input_distance, output_distance: Wasserstein distances between observed and planned lengths, in tokens.
        step_ratio: measured step times divided by those that the running plan predicts, or None if not known.
        slowdown: measured step times divided by predictions from the profile. None means that too few steps have been
            compared.
        reuse: prefix reuse of the recent requests, or None if not observed.
        goodput: share of the latest requests that kept their bounds. None means that there are no bounds, or too few
            requests.
        cause: the change that made the server judge the plan. "asked" means that a user asked for it.
        lengths: whether `workload` was observed. It is the plan's own if nothing shows that lengths have changed.
        recent_input_mean, recent_output_mean: mean lengths of the recent requests, in tokens, even if `workload` is the
            plan's. None means the means of `workload`.
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
    cause: Cause = "asked"
    lengths: LengthsFrom = "observed"
    recent_input_mean: float | None = None
    recent_output_mean: float | None = None


class Outcome(Frozen):
    """The predicted figures of a plan under the observed lengths.

    Attributes:
        latency_s: the latency that is compared with the bound.
        keeps_bound: whether the plan keeps the bound. If the plan maximises the arrival rate, this refers to the
            observed rate. None means no bound.
        arrival_rate_per_s: simulated highest arrival rate within the bounds. At this rate, `latency_s` is the quantile
            of the time from arrival to the last token. None means that the plan does not maximise the arrival rate.
    """

    policy: PolicySettings
    throughput_rps: float
    latency_s: float
    keeps_bound: bool | None
    arrival_rate_per_s: float | None = None


class Decision(Frozen):
    """A decision to keep or replace the running plan.

    Attributes:
        at: date and time, ISO 8601, UTC.
        cause: the change that made the server judge the plan. "asked" means that a user asked for it.
        cause_detail: the change in numbers, as text.
        reason: the reason for the decision, as text.
        lengths: whether `input_mean` and `output_mean` are the running plan's or observed.
        input_mean, output_mean: mean lengths, in tokens, under which both plans were predicted.
        observed_input_mean, observed_output_mean: mean lengths of the recent requests, as in /metrics.
        arrival_rate_per_s: observed arrival rate, requests a second, to which `keeps_bound` refers. None means not
            known.
        running: predicted figures of the plan that ran until the decision.
        best: predicted figures of the best plan for these lengths. None means that no plan keeps the bound.
        planned_under_s: the looser latency bound under which `best` was found, if no plan keeps the plan's own bound.
            Otherwise None.
        slowdown: factor on the profile's times in the predictions of both plans.
        gain: relative gain of the best plan over the running plan, in the arrival rate if plans maximise it, else in
            throughput.
        pause_s: seconds for which a change of plan would delay requests.
        start_s: seconds of these that a new start takes, where `xgpt serve` does not run the engine. Otherwise 0.
        plan_sha256: hash of the plan that runs after the decision.
        planning_s: seconds that planning took.
        num_unbuilt: number of candidates that were skipped, because they could not be built.
        recommendation: the decision as `xgpt compare` tells it, if it was made by a replay of a log. Otherwise None.
    """

    at: str
    action: Action
    cause: Cause = "asked"
    cause_detail: str = ""
    reason: str
    num_requests: int
    lengths: LengthsFrom = "observed"
    input_mean: float
    output_mean: float
    observed_input_mean: float | None = None
    observed_output_mean: float | None = None
    arrival_rate_per_s: float | None = None
    running: Outcome
    best: Outcome | None
    planned_under_s: float | None = None
    slowdown: float = 1.0
    gain: float
    pause_s: float
    start_s: float = 0.0
    plan_sha256: str
    planning_s: float
    num_unbuilt: int = 0
    recommendation: Recommendation | None = Field(default=None, exclude_if=lambda found: found is None)


class FailedJudgement(Frozen):
    """A failed attempt to judge the running plan. The plan keeps running.

    Attributes:
        at: date and time of the failure, ISO 8601, UTC.
        cause: the change that made the server judge the plan.
        reason: why there is no decision, as text.
        planning_s: seconds from the start of the attempt to its failure.
    """

    at: str
    action: Literal["failed"] = "failed"
    cause: Cause
    reason: str = Field(min_length=1)
    planning_s: float


class Proposal(NamedTuple):
    """A decision, and the plan that will run. If `plan` is None, the present plan keeps running."""

    decision: Decision
    plan: Plan | None


class Planner(Protocol):
    """The interface of a server's planner, which runs in another process so that planning never delays a request."""

    def predict_s(self, plan: Plan, encode: list[tuple[int, int, int]], decodes: list[tuple[int, int]]) -> float | None:
        """Return the predicted seconds of a step, or None if the step also waits for other steps of its pipeline.

        Args:
            encode: (start, end, 1 if the chunk ends its prompt else 0) of each prompt chunk.
            decodes: (input tokens, output tokens so far) of each decoding request.
        """

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        """Judge the running plan by an observation.

        Raises:
            XgptError: planning has failed. The present plan keeps running.
        """

    async def close(self) -> None:
        """End the planning process."""
