"""From names on a command line to plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from xgpt.errors import InfeasibleError, InputError
from xgpt.schema import AdmissionOrder, ClusterSpec, Constraint, DType, KvPromise, ModelSpec, Plan, Profile, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from xgpt.app.profiles import Progress
    from xscheduler.schedule import Scheduler

PolicyChoice = Literal["auto", "exegpt", "rra", "waa", "chunked", "orca", "static"]


POLICY_GROUPS: dict[str, tuple[str, ...]] = {
    "auto": ("rra", "chunked", "orca", "static", "waa"),
    "exegpt": ("rra", "waa"),
}
"""Choices that stand for several policies."""
UNIFORM_KINDS = ("chunked", "orca", "static")
"""What other planners offer, on replicas of equal stages."""


@dataclass(frozen=True)
class Subject:
    """What is planned for, resolved."""

    model: ModelSpec
    checkpoint: Path | None
    cluster: ClusterSpec
    workload: Workload
    profile: Profile


def resolve(
    model: str,
    cluster: str,
    workload: str,
    profile_path: str | None = None,
    progress: Progress | None = None,
    price: float | None = None,
    dtype: DType | None = None,
) -> Subject:
    """Look the names up and get a profile: the given file, the cached one, a measurement, or the datasheet's.

    Args:
        price: of one device for an hour; None: what the cluster says.
        dtype: what the model is to run in; None: its own, on a CPU float32.

    Raises:
        InputError: a name that is not there, a file that is broken, or a profile of something else.
        MachineError: the machine cannot be measured.
    """
    from xgpt.app.profiles import given_profile, keep, obtain_profile
    from xgpt.resolve import load_cluster, load_model, load_workload

    spec, checkpoint = load_model(model)
    devices = load_cluster(cluster)
    if price is not None:
        devices = devices.model_copy(update={"price_per_device_hour": price})
    lengths = load_workload(workload, spec)
    if profile_path is not None:
        profile = given_profile(profile_path, spec, devices, dtype)
    else:
        profile = obtain_profile(spec, checkpoint, devices, progress, dtype=dtype)
    keep(profile)
    return Subject(spec, checkpoint, devices, lengths, profile)


def subject_of(plan: Plan, profile: Profile) -> Subject:
    """What a plan was made for."""
    from pathlib import Path

    checkpoint = None if plan.checkpoint is None else Path(plan.checkpoint)
    return Subject(plan.model, checkpoint, plan.cluster, plan.workload, profile)


def headroom_of(constraint: Constraint, profile: Profile) -> float:
    """Share that plans leave of their bounds: as the constraint says, or the known error of the profile's kind."""
    return constraint.headroom if "headroom" in constraint.model_fields_set else profile.headroom


def scheduler(
    subject: Subject,
    constraint: Constraint,
    search: str,
    kv: KvPromise = "reserve",
    max_devices: int | None = None,
    *,
    uniform: bool = False,
) -> Scheduler:
    """The scheduler of a subject, its headroom that of the profile where the constraint names none.

    Args:
        max_devices: take no more of the cluster's.
        uniform: only replicas of equal stages.

    Raises:
        InputError: the profile's spread leaves nothing of a bound.
    """
    from typing import cast

    from xscheduler.problem import Problem
    from xscheduler.schedule import Scheduler
    from xscheduler.search import Method

    headroom = headroom_of(constraint, subject.profile)
    if headroom >= 1:
        raise InputError("profile.spread", headroom, "its steps vary by more than they last; measure a quieter machine")
    constraint = constraint.model_copy(update={"headroom": headroom})
    problem = Problem(
        model=subject.model,
        checkpoint=None if subject.checkpoint is None else str(subject.checkpoint),
        cluster=subject.cluster,
        workload=subject.workload,
        profile=subject.profile,
        constraint=constraint,
        kv=kv,
        max_devices=max_devices,
        uniform=uniform,
    )
    return Scheduler(problem, cast(Method, search))


def plan_each(
    subject: Subject,
    constraint: Constraint,
    policy: PolicyChoice = "auto",
    search: str = "branch-and-bound",
    kv: KvPromise = "reserve",
    order: AdmissionOrder = "fcfs",
    max_devices: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Plan]:
    """Each policy's best plan, the best of all first.

    Args:
        order: who of those who wait enters next.
        progress: told of what takes its time.

    Raises:
        InputError: the model cannot be run under the policy that is asked for.
        InfeasibleError: no policy has one.
    """
    from functools import partial

    from xgpt.app.arrivals import best_by_arrivals
    from xgpt.app.verifying import best_of_each

    kinds = _kinds(subject, policy)
    if constraint.arrival_rate_per_s is not None:  # what keeps the highest rate keeps this one, if any does
        constraint = constraint.model_copy(update={"objective": "arrivals"})
    if constraint.maximises_arrivals:
        of = scheduler(subject, constraint, search, kv, max_devices)
        return best_by_arrivals(of, kinds, finish=partial(_admitting, order=order))
    plans = best_of_each(subject, constraint, kinds, search, kv, max_devices, progress=progress)
    _check_stable(constraint, plans)
    ordered = sorted(plans.items(), key=lambda item: -item[1].estimate.throughput_rps)
    return {kind: _admitting(plan, order) for kind, plan in ordered}


def _kinds(subject: Subject, policy: PolicyChoice) -> tuple[str, ...]:
    """The policies that are planned for.

    Raises:
        InputError: the model cannot be run under the one that is asked for.
    """
    from xscheduler.space import UNCUT, runnable

    kinds = POLICY_GROUPS.get(policy, (policy,))
    if policy == "auto" and subject.profile.engine == "vllm":  # it frees a slot as soon as its request ends
        kinds = tuple(kind for kind in kinds if kind != "static")
    found = runnable(kinds, subject.model)
    if not found:
        others = ", ".join(runnable(POLICY_GROUPS["auto"], subject.model))
        raise InputError("--policy", policy, f"{subject.model.name}: {UNCUT}; take one of {others}, auto")
    return found


def _check_stable(constraint: Constraint, plans: dict[str, Plan]) -> None:
    """Without bounds, a rate is kept that lies below the throughput."""
    rate = constraint.arrival_rate_per_s
    if rate is None:
        return
    for kind in [kind for kind, plan in plans.items() if plan.estimate.throughput_rps <= rate]:
        del plans[kind]
    if not plans:
        raise InfeasibleError(
            f"arrival_rate_per_s: no schedule serves {rate:g} requests/s; take more devices or a lower rate",
            nearest_bound_s=None,
            binding="arrival_rate_per_s",
        )


def is_uniform(plan: Plan) -> bool:
    """Whether other planners offer such a plan: replicas of equal stages, without rra and waa."""
    from xscheduler.placement import Placement

    return plan.policy.kind in UNIFORM_KINDS and Placement.of(plan).is_uniform


def plan_uniform(
    subject: Subject, constraint: Constraint, search: str, kv: KvPromise = "reserve", max_devices: int | None = None
) -> Plan | None:
    """The best that other planners offer: replicas of equal stages, without rra and waa; None where nothing fits."""
    from xgpt.app.arrivals import best_by_arrivals
    from xgpt.app.verifying import best_of_each
    from xscheduler.space import runnable

    kinds = runnable(UNIFORM_KINDS, subject.model)
    try:
        if constraint.maximises_arrivals:
            of = scheduler(subject, constraint, search, kv, max_devices, uniform=True)
            return next(iter(best_by_arrivals(of, kinds, only_best=True).values()))
        plans = best_of_each(subject, constraint, kinds, search, kv, max_devices, uniform=True)
    except InfeasibleError:
        return None
    return max(plans.values(), key=lambda plan: plan.estimate.throughput_rps)


def _admitting(plan: Plan, order: AdmissionOrder) -> Plan:
    """The plan with this order of admission. DAS looks at as many prompt tokens together as run at once; lpt is for
    work that is all at hand, where none is overdue."""
    from xgpt.workload import mean

    row_tokens = max(1, round(plan.estimate.decode_batch * mean(plan.workload.input))) if order == "das" else None
    changes = {"order": order, "row_tokens": row_tokens} | ({"patience": None} if order == "lpt" else {})
    return plan.model_copy(update={"admission": plan.admission.model_copy(update=changes)})
