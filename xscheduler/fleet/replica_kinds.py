"""Find the kinds of replicas that may serve a day's load by planning for several numbers of devices of each cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xgpt.core.errors import InfeasibleError
from xgpt.core.machine import num_cores
from xgpt.core.schema import ClusterSpec, Pinned, Plan, Profile, Workload
from xgpt.core.schema.constraint import Bounds
from xgpt.core.schema.fleet import ReplicaKind
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.policy import PolicyChoice
from xscheduler.objectives.best_plans import best_of_each, kinds_of
from xscheduler.problem import Problem
from xscheduler.replanning.decide import start_s
from xscheduler.replanning.situation import reestimate
from xscheduler.schedule import scheduler

WORTH = 1.02
"""A larger replica is considered only if it serves more requests, by this factor, than smaller ones on its devices."""
NEAR = 0.94
"""Plans are searched by simulation if the best closed form, divided by this, exceeds what smaller replicas serve."""


@dataclass(frozen=True)
class Candidate:
    kind: ReplicaKind
    profile: Profile


def devices_here(cluster: ClusterSpec, num_threads: int | None) -> int:
    """Return the number of devices on this machine. A CPU counts as several devices: one for each replica whose threads
    fit on its cores.
    """
    count = cluster.num_devices
    if cluster.device.type == "gpu" or num_threads is None:
        return count
    return count * max(1, num_cores() // count // num_threads)


def candidates(
    problem: Problem, policy: PolicyChoice, lengths: Sequence[Workload], startup_s: float
) -> list[Candidate]:
    """Return one cluster's useful kinds of replicas, the kind with the fewest devices first.

    Args:
        startup_s: time from ordering a replica until the replica begins to load its weights.

    Raises:
        InfeasibleError: no plan on the devices of one node keeps the bounds.
    """
    found: list[Candidate] = []
    why = None
    rates: dict[int, float] = {}
    together = [0.0]  # the highest rate that replicas found so far serve on so many devices
    most = min(problem.cluster.devices_per_node, problem.max_devices or problem.cluster.devices_per_node)
    for size in range(1, most + 1):
        if rates and size > 2 * max(rates):
            break  # if up to twice as many devices gain nothing, more devices gain nothing either
        together.append(max((rate + together[size - used] for used, rate in rates.items()), default=0.0))
        try:
            plan = _best_plan(replace(problem, max_devices=size, replicas=1), policy, WORTH * together[size])
        except InfeasibleError as error:
            why = why if error.binding in Bounds._fields else error
            continue
        if plan is not None:
            rates[plan.devices_per_replica] = rate_of(plan)
            together[size] = rate_of(plan)
            found.append(Candidate(_kind(plan, problem.profile, lengths, startup_s), problem.profile))
    if not found:
        raise why or _never_kept(problem)
    return found


def _best_plan(problem: Problem, policy: PolicyChoice, least_rate: float) -> Plan | None:
    by, kinds = scheduler(problem), kinds_of(problem, policy)
    closed = next(iter(best_of_each(by, kinds, is_closed=True).values())).closed_rate or 0.0
    if closed / NEAR < least_rate:
        return None
    best = next(iter(best_of_each(by, kinds, proves=False, only_best=True).values()))
    pinned = Pinned(policy=policy, fixed=dict(problem.fixed))
    return replace(best, draft=best.draft.but(pinned=pinned)).plan if rate_of(best.draft) > least_rate else None


def _kind(plan: Plan, profile: Profile, lengths: Sequence[Workload], startup_s: float) -> ReplicaKind:
    """Return a plan's kind of replica. Its rate for each group of lengths is the plan's rate, multiplied by the ratio
    of the group's throughput to the throughput under all lengths. A group's own rate within the bounds is not used. It
    could be zero for long requests, but the bounds need to hold only for all requests of the day together.
    """
    devices, quantile = plan.devices_per_replica, plan.constraint.quantile
    whole = reestimate(plan, profile, plan.workload, quantile)["throughput"]
    relative = [reestimate(plan, profile, season, quantile)["throughput"] / whole for season in lengths]
    return ReplicaKind(
        name=f"{plan.cluster.name}/{devices}",
        plan=plan,
        price_per_hour=devices * (plan.cluster.price_per_device_hour or 1.0),
        rates_per_s=tuple(rate_of(plan) * ratio for ratio in relative),
        start_s=start_s(plan, profile, startup_s),
        drain_s=plan.estimate.latency_s,
    )


def _never_kept(problem: Problem) -> InfeasibleError:
    given = problem.constraint.bounds.given
    binding, kept = next(iter(given)), " and ".join(f"{bound:g} s" for bound in given.values())
    return InfeasibleError(
        f"{binding}: no replica on one node of {problem.cluster.name} keeps {kept} at any arrival rate, "
        "waiting included; loosen the bounds, or ask `xgpt plan` for the nearest bound that can be kept",
        binding=binding,
    )
