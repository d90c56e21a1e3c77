"""Describe what re-planning starts from: the running plan, the observed lengths and pace, and the devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from xgpt.core.schema import Observation, ObservedReuse, Plan, PlanDraft, Profile, ReuseEstimate, Workload
from xgpt.core.workload import within_context
from xscheduler.placement import Placement
from xscheduler.problem import Problem, reused_by
from xsimulator.costs.step_cost import lanes_of
from xsimulator.forecast import FORECASTS
from xsimulator.lengths import Lengths, Reused
from xsimulator.memory import RequestBlocks

PARTS = (0.3, 0.5, 0.65, 0.8, 0.9, 0.95)
"""Shares of K/V memory to try for cached blocks."""
NOTHING = 0.02
"""If at most this share of prompt tokens is cached, reuse is ignored."""


@dataclass(frozen=True)
class Situation:
    """A running plan and what was observed while it ran.

    Attributes:
        profile: the measured profile, to which the plan's slowdown is not applied.
        reuse: observed prefix reuse. None means the plan's expected reuse.
        is_as_planned: whether lengths, pace and reuse are those for which the plan's figures were predicted.
    """

    plan: PlanDraft
    profile: Profile
    lengths: Workload
    weight: float
    arrival_rate_per_s: float | None = None
    reuse: ObservedReuse | None = None
    goodput: float | None = None
    is_as_planned: bool = False
    unbuilt: list[str] = field(default_factory=list)

    @property
    def misses(self) -> bool:
        return self.goodput is not None and self.goodput < self.plan.constraint.quantile

    @classmethod
    def of(cls, plan: Plan, profile: Profile, observation: Observation, slowdown: float | None = None) -> Situation:
        lengths = within_context(observation.workload, plan.model.max_context)
        rate = observation.arrival_rate_per_s
        reuse = observation.reuse if plan.replicas == 1 else None
        running, planned = with_reuse(at_pace(plan, slowdown), reuse), plan.workload
        same = running is plan and (lengths.input, lengths.output) == (planned.input, planned.output)
        return cls(running, profile, lengths, observation.weight, rate, reuse, observation.goodput, same)

    def under(self, latency_bound_s: float) -> Situation:
        constraint = self.plan.constraint.but(latency_bound_s=latency_bound_s)
        return replace(self, plan=self.plan.but(constraint=constraint), is_as_planned=False)

    def problem(self, *, in_place: bool) -> Problem:
        """Return the planning problem on the server's devices. Its best plan may take over.

        The number of replicas is fixed if replicas are on several machines or share experts.
        """
        plan, engine = self.plan, self.plan.engine
        by_itself = engine is not None and engine.runs_alone
        stays = in_place or plan.cluster.num_nodes > 1 or plan.sharing_replicas > 1
        return replace(
            Problem.of(plan, self.profile.slowed(plan.profile.slowdown)),
            workload=self.lengths,
            kv=None if by_itself else plan.admission.kv,  # as the engine promises it on each placement
            replicas=plan.replicas if stays else None,
            fixed=plan.pinned.fixed,
            placement=Placement.of(plan) if in_place and plan.devices_per_replica > 1 else None,
            reused=reused_by(plan, self.lengths),
        )

    def problems(self, *, in_place: bool) -> list[Problem]:
        problem, reuse = self.problem(in_place=in_place), self.reuse
        if reuse is None:
            return [problem]
        memory = self.plan.block_size * min(s.kv_blocks for s in self.plan.stages if s.lane != "decode")
        problems = [replace(problem, reused=None)]
        for tokens in sorted({*(size for size in reuse.sizes if size < memory), *(part * memory for part in PARTS)}):
            share = float(np.interp(tokens, (0.0, *reuse.sizes), (0.0, *reuse.shares)))
            if share > NOTHING:
                reused = Reused.proportional(self.lengths, share, tokens, reuse.most)
                problems.append(replace(problem, reused=reused))
        return problems

    def quantile(self, deviations: float) -> float:
        q = self.plan.constraint.quantile
        return max(0.5, min(q + deviations * sqrt(q * (1 - q) / self.weight), 1 - 1e-9))


def with_reuse(plan: PlanDraft, reuse: ObservedReuse | None) -> PlanDraft:
    """Return the plan with the observed reuse, or the same plan if `reuse` is None.

    A plan that expects no reuse reserves no memory for cached blocks.
    """
    estimated = plan.estimate.reuse
    if reuse is None or (estimated is None and reuse.share <= NOTHING):
        return plan
    kept = 0 if estimated is None else estimated.kept_blocks
    found = ReuseEstimate(share=reuse.share, most_share=max(reuse.most, reuse.share), kept_blocks=kept)
    return plan.with_estimate(reuse=found)


def at_pace(plan: PlanDraft, slowdown: float | None) -> PlanDraft:
    if slowdown in (None, plan.profile.slowdown):
        return plan
    return plan.but(profile=plan.profile.but(slowdown=slowdown))


def reestimate(
    plan: PlanDraft, profile: Profile, workload: Workload, quantile: float, ratio: float = 1.0
) -> dict[str, float]:
    """Return a plan's predictions for other lengths, with the plan's computed numbers unchanged."""
    lengths = Lengths(workload, reused_by(plan, workload))
    lanes = lanes_of(plan, profile)
    blocks = min(stage.kv_blocks for stage in plan.stages if stage.lane != "encode")
    kept = 0
    if plan.estimate.reuse is not None and plan.policy.lanes == ("both",):
        kept = plan.estimate.reuse.kept_blocks
    inside = float(RequestBlocks.of(lengths, plan.block_size, plan.admission.kv, kept).most(blocks))
    inside = max(1.0, min(inside, plan.admission.max_running or np.inf))
    forecast = FORECASTS[plan.policy.kind]
    model = forecast.model(*(lanes[name] for name in plan.policy.lanes), lengths, quantile)
    found = forecast.reestimate(plan, model, inside)
    return found | {"throughput": plan.replicas * found["throughput"], "latency": ratio * found["latency"]}
