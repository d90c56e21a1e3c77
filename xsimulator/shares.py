"""Divide a trace's requests among the replicas of a plan."""

from __future__ import annotations

import numpy as np

from xgpt.core.schema import PlanDraft
from xgpt.core.workload import Ints, TraceLengths


def share_of_replica(trace: TraceLengths, plan: PlanDraft) -> TraceLengths:
    """Return the requests of a trace that would be routed to the first replica of a plan."""
    return trace if plan.replicas == 1 else trace.take(routed(trace, plan)[0])


def routed(trace: TraceLengths, plan: PlanDraft) -> list[Ints]:
    """Return for each replica of a plan the places of a trace's requests that would be routed to it.

    As many requests run as in the plan: when a further request arrives, the oldest one ends. If the trace has no
    prefixes, the replicas take turns.
    """
    places = np.arange(len(trace.input))
    if plan.replicas == 1 or trace.prefixes is None:
        return [places[replica :: plan.replicas] for replica in range(plan.replicas)]
    from xsimulator.counts.homes import homes_of  # imported here, since importing numba takes half a second

    homes = homes_of(trace.prefixes, trace.input, plan)
    return [places[homes == replica] for replica in range(plan.replicas)]
