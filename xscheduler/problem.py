"""Define a planning problem: model, devices, profile, lengths and constraint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from xgpt.core.schema import (
    ClusterSpec,
    Constraint,
    EngineSpec,
    KvPromise,
    ModelSpec,
    PlanDraft,
    Profile,
    Speculation,
    Workload,
)
from xscheduler.placement import Placement
from xsimulator.costs.speculating import speculating
from xsimulator.lengths import Reused


@dataclass(frozen=True)
class Problem:
    """A planning problem.

    Attributes:
        kv: how K/V memory is promised to requests. None means by the engine's default (`promise`).
        engine: the engine that will run the plan. None means an engine about which only the step times are known.
        deployed: the engine that runs now. Its memory limits the plan, and it has reserved memory for `max_batch`
            requests. None means `engine`.
        even: whether only placements that engines other than xgpt's can run are considered: each lane has one
            tensor-parallel degree.
        reused: the part of prompts that is found in the K/V cache. None means no part.
    """

    model: ModelSpec
    checkpoint: str | None
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    constraint: Constraint
    kv: KvPromise | None = None
    engine: EngineSpec | None = None
    deployed: EngineSpec | None = None
    max_devices: int | None = None
    uniform: bool = False
    even: bool = False
    replicas: int | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    placement: Placement | None = None
    reused: Reused | None = None
    speculation: Speculation | None = None

    @property
    def step_profile(self) -> Profile:
        """The profile, converted so that a step gives each request one token on average even with a draft."""
        return speculating(self.profile, self.model, self.speculation)

    @property
    def in_groups(self) -> bool:
        """Whether several groups may encode prompts side by side. Only vLLM runs such plans: several of it. They are
        tried where arrivals must keep bounds on first tokens and on the time between tokens.
        """
        framework = self.profile.engine if self.engine is None else self.engine.framework
        bounds = self.constraint
        return (
            framework in (None, "vllm")
            and self.cluster.device.type == "gpu"
            and not self.model.is_encoder_decoder
            and None not in (bounds.ttft_s, bounds.tpot_s)
            and bounds.maximises_arrivals
            and self.reused is None
            and self.workload.sessions is None
            and not self.fixed.get("adjustment_percent")
        )

    @classmethod
    def of(cls, plan: PlanDraft, profile: Profile) -> Problem:
        return cls(
            plan.model,
            plan.checkpoint,
            plan.cluster,
            plan.workload,
            profile,
            plan.constraint,
            plan.admission.kv,
            plan.engine,
            max_devices=plan.num_devices,
            even=runs_elsewhere(plan.model, plan.cluster, profile, plan.engine, plan.pinned.fixed),
            reused=reused_by(plan, plan.workload),
            speculation=plan.speculation,
        )

    def engine_of(self, kind: str) -> EngineSpec | None:
        return None if self.engine is None else self.engine.started_for(kind)

    def promise(self, kind: str, microbatches: int) -> KvPromise:
        """Return how K/V memory is promised under a policy, as the user requested or by the engine's default.

        By default, memory is reserved for the longest output where the fast simulation cannot preempt requests: in
        pipelines, with a draft, and with cached prompts of requests that are no turns of sessions.
        """
        if self.kv is not None:
            return self.kv
        engine = self.engine_of(kind)
        by_use = engine is not None and engine.admits_by_use and engine.scheduler == "own"
        is_reusing = self.reused is not None and self.workload.sessions is None
        is_plain = microbatches == 1 and self.speculation is None and not is_reusing
        return "quantile" if by_use and is_plain else "reserve"

    def under(self, constraint: Constraint) -> Problem:
        return replace(self, constraint=constraint)


def runs_elsewhere(
    model: ModelSpec, cluster: ClusterSpec, profile: Profile, engine: EngineSpec | None, fixed: Mapping[str, int]
) -> bool:
    """Return whether another engine than xgpt's will run the plans: one that the user names or, by default on several
    machines, vLLM.
    """
    named = profile.engine if engine is None else engine.framework
    is_default = named is None and cluster.num_nodes > 1 and "tp_devices" not in fixed
    return named not in (None, "xgpt") or (is_default and not model.is_encoder_decoder)


def reused_by(plan: PlanDraft, workload: Workload) -> Reused | None:
    """Return the part of prompts that a plan expects to be found in the K/V cache."""
    found = plan.estimate.reuse
    if found is None:
        return None
    return Reused.proportional(workload, found.share, found.kept_blocks * plan.block_size, found.most_share)
