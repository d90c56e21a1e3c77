"""The problem that a plan solves: model, devices, profile, lengths and constraint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from xgpt.schema import ClusterSpec, Constraint, EngineSpec, KvPromise, ModelSpec, Plan, Profile, Workload
from xscheduler.placement import Placement
from xscheduler.space import Wish
from xsimulator.lengths import Reused


@dataclass(frozen=True)
class Problem:
    """Everything that a plan answers to.

    Attributes:
        engine: the engine that runs the plan; None: any, of which nothing is known but the profile's steps.
        max_devices: the most devices of the cluster to take.
        uniform: only placements that are replicas of equal stages.
        replicas: only this number of replicas.
        fixed: values that control variables and those of placements are held at.
        placement: only this one. It need not be one that would be tried.
        reused: what requests find of their prompts; None: nothing.
        wish: a user's own objective or constraint; no bound is known for it, so Optuna takes the search over.
    """

    model: ModelSpec
    checkpoint: str | None
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    constraint: Constraint
    kv: KvPromise = "reserve"
    engine: EngineSpec | None = None
    max_devices: int | None = None
    uniform: bool = False
    replicas: int | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    placement: Placement | None = None
    wish: Wish | None = None
    reused: Reused | None = None

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> Problem:
        """Return the problem that a plan was made for, on all of its cluster's devices."""
        return cls(
            plan.model,
            plan.checkpoint,
            plan.cluster,
            plan.workload,
            profile,
            plan.constraint,
            plan.admission.kv,
            plan.engine,
            reused=reused_by(plan, plan.workload),
        )

    def under(self, constraint: Constraint) -> Problem:
        """Return the same problem under another constraint."""
        return replace(self, constraint=constraint)


def reused_by(plan: Plan, workload: Workload) -> Reused | None:
    """Return what a plan counts on being found of a workload's prompts; None: nothing."""
    found = plan.estimate.reuse
    if found is None:
        return None
    return Reused.proportional(workload, found.share, found.kept_blocks * plan.block_size, found.most_share)
