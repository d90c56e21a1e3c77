"""Simulate sessions on all replicas of a plan, with a router that sends each turn to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xgpt.core.policies.routing import ReplicaRouter
from xgpt.core.schema import PlanDraft, Profile, StageLane
from xgpt.core.workload import TraceLengths
from xsimulator.costs.step_cost import LaneCost, lanes_of
from xsimulator.counts.routed import BY_LOAD, BY_PREFIX, BY_SESSION
from xsimulator.sessions import TurnTimes, counted_turns, counts_turns

Route = Literal["session", "prefix", "load"]
"""session: the replica of the session's first turn. prefix: the one that has the prompt, unless it is much busier
(`ReplicaRouter`). load: the one with the fewest requests.
"""
KINDS: dict[Route, int] = {"session": BY_SESSION, "prefix": BY_PREFIX, "load": BY_LOAD}


def counts_routes(plan: PlanDraft) -> bool:
    """Return whether sessions can be simulated on all replicas: if they do not fork, and steps can be counted."""
    law = plan.workload.sessions
    return law is not None and law.subagents is None and counts_turns(plan)


def run_routed(
    plan: PlanDraft,
    profile: Profile,
    trace: TraceLengths,
    route: Route,
    lanes: Mapping[StageLane, LaneCost] | None = None,
) -> TurnTimes:
    """Run sessions whose first turns arrive at the trace's times on all replicas. The plan must be one that
    `counts_routes`.
    """
    slack = ReplicaRouter.of(plan).slack
    counted = counted_turns(plan, lanes or lanes_of(plan, profile), trace, KINDS[route], slack)
    assert counted is not None
    return counted
