"""Compute the number of API servers that an engine needs. An API server tokenises prompts and streams on one core."""

from __future__ import annotations

from math import ceil, inf

from xgpt.core.schema import EngineSpec, PlanDraft, Workload

MOST_BUSY = 0.8
"""Largest share of the time for which an API server may be busy."""


def request_s(engine: EngineSpec, workload: Workload) -> float:
    return engine.tokenise_s * workload.input.mean + engine.stream_s * workload.output.mean


def served_rate(plan: PlanDraft) -> float:
    """Return the total rate, in requests a second, of the replicas that one command starts. They share API servers."""
    capacity = plan.estimate.capacity
    rates = [plan.estimate.throughput_rps if capacity is None else capacity.rate_per_s]
    return max([*rates, plan.constraint.arrival_rate_per_s or 0.0]) / plan.replicas * plan.sharing_replicas


def most_rate(plan: PlanDraft, num_servers: int) -> float:
    """Return the requests a second that these API servers can handle, or infinity if their speed is not known."""
    each_s = 0.0 if plan.engine is None or not plan.engine.stream_s else request_s(plan.engine, plan.workload)
    return MOST_BUSY * num_servers / each_s if each_s else inf


def fronted(plan: PlanDraft, num_servers: int | None) -> PlanDraft:
    """Return the plan with its number of API servers, and a warning if these handle fewer than the plan promises."""
    rate, of_one = served_rate(plan), most_rate(plan, 1)
    needed = max(1, ceil(rate / of_one - 1e-9)) if of_one < inf else 1
    plan = plan.but(api_servers=num_servers or needed)
    if num_servers is None or num_servers >= needed:
        return plan
    servers = "one API server handles" if num_servers == 1 else f"{num_servers} API servers handle"
    text = (
        f"{servers} about {most_rate(plan, num_servers):.0f} requests/s of these lengths, but the devices of one "
        f"command serve {rate:.0f}: use `api_servers={needed}`"
    )
    return plan.with_estimate(warnings=(*plan.estimate.warnings, text))
