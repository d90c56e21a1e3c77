"""Compute given plans' highest arrival rates and other objective values, in closed form or by simulation. Also find the
cost of mixed steps above which another policy is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xgpt.core.schema import MixingEdge, PlanDraft, Profile, ReuseEstimate
from xgpt.core.schema.estimate import SessionEstimate
from xgpt.resolve import load_engine
from xscheduler.arrival_rate import closed_rate
from xscheduler.candidates import Candidates
from xscheduler.expression import maximised
from xscheduler.found import Found
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.tolerances import TOLERANCES
from xsimulator.capacity import capacity
from xsimulator.forecast import FORECASTS
from xsimulator.session_rate import SessionTrial, per_session, session_capacity
from xsimulator.session_routes import Route, counts_routes


def with_capacities(found: dict[str, Found], profile: Profile) -> dict[str, Found]:
    """Missing capacities are simulated. The first plan is also simulated under slightly tighter and looser bounds."""
    return {
        kind: one if one.draft.estimate.capacity else replace(one, draft=rated(one.draft, profile, edges=not i))
        for i, (kind, one) in enumerate(found.items())
    }


def rated(plan: PlanDraft, profile: Profile, *, edges: bool = True) -> PlanDraft:
    return with_capacity(plan, profile, predicted_rate(plan, profile), edges=edges)


def predicted_rate(plan: PlanDraft, profile: Profile) -> float | None:
    if not plan.constraint.bounds_latency:
        return None
    return _closed_rate(plan, Problem.of(plan, profile))


def closed_objective(plan: PlanDraft, problem: Problem) -> float:
    """Compute in closed form the objective's value that a plan's settings reach in another problem."""
    if plan.constraint.maximises_arrivals:
        return _closed_rate(plan, problem)
    space = Candidates(problem).space(plan.policy.kind, Placement.of(plan))
    return plan.replicas * space.forecast.estimate(space.models.model, plan.policy)["throughput"]


def _closed_rate(plan: PlanDraft, problem: Problem) -> float:
    in_engine = problem.under(plan.constraint.less(plan.request_path_s))
    return closed_rate(Candidates(in_engine).space(plan.policy.kind, Placement.of(plan)), plan.policy)


def with_capacity(
    plan: PlanDraft, profile: Profile, predicted: float | None = None, *, edges: bool = True
) -> PlanDraft:
    """A plan without bounds is returned unchanged."""
    if plan.workload.sessions is not None and plan.constraint.bounds_latency:
        trial = SessionTrial(plan, profile)
        return in_sessions(trial, trial.highest(predicted and predicted / trial.turns))
    found = capacity(plan, profile, predicted, edges=edges, precision=TOLERANCES.rate)  # that of the best plan
    return plan.with_estimate(capacity=found)


ROUTES: tuple[Route, ...] = ("session", "prefix", "load")
COARSE, FINE, FULL = 0.1, 0.02, 0.99
"""FULL: share of what could be found, above which a host's memory cannot help."""


def in_sessions(trial: SessionTrial, rate: float, *, decides: bool = False) -> PlanDraft:
    """Return a plan with the highest rate of sessions that it serves, and with what their turns find."""
    plan, profile = trial.plan, trial.profile
    found, sessions = session_capacity(trial, rate)
    if sessions is None:
        return plan.with_estimate(capacity=found)
    reuse = ReuseEstimate(
        share=trial.at(rate).times.reused_share,
        most_share=trial.most_share,
        kept_blocks=min(
            int(sessions.kept_tokens / plan.replicas) // plan.block_size, min(stage.kv_blocks for stage in plan.stages)
        ),
    )
    if decides:
        alone = SessionTrial(plan, profile, keeps_nothing=True).highest(rate, COARSE)
        routed = (
            {route: _under(plan, profile, route, rate) for route in ROUTES}
            if plan.replicas > 1 and counts_routes(plan)
            else {}
        )
        sessions = sessions.but(alone_per_s=alone, routed=routed)
        if plan.cluster.host is not None and counts_routes(plan) and reuse.share < FULL * trial.most_share:
            sessions = _offloaded(plan, profile, sessions)
    return plan.with_estimate(capacity=found, sessions=sessions, reuse=reuse)


def _offloaded(plan: PlanDraft, profile: Profile, sessions: SessionEstimate) -> SessionEstimate:
    trial = SessionTrial(plan, profile, from_host=True)
    rate = trial.highest(sessions.rate_per_s, FINE)
    if not rate:
        return sessions.but(from_host_per_s=0.0)
    run, _, counts = trial.at(rate)
    tokens = rate * float(per_session(run, counts, run.kept_token_s).mean())
    return sessions.but(
        from_host_per_s=rate, host_bytes=round(tokens * plan.model.kv_bytes_per_token(plan.precision.kv))
    )


def _under(plan: PlanDraft, profile: Profile, route: Route, rate: float) -> tuple[float, float]:
    run, _, counts = SessionTrial(plan, profile, route=route).at(rate)
    waits = per_session(run, counts, run.ttft_s)
    return run.reused_share, float(np.quantile(waits, plan.constraint.quantile))


DEAREST = 0.4
"""Largest cost of mixing that is tried, as a share of the time of a step's decodes."""
HALVINGS = 5


def mixing_edge(plans: Sequence[PlanDraft], profile: Profile) -> MixingEdge | None:
    """Return the cost of mixed steps above which another plan is better than the first one, unless one is already."""
    best, rivals = plans[0], [plan for plan in plans if _mixes(plan) != _mixes(plans[0])]
    if profile.source == "measured" or not rivals:
        return None
    rival = max(rivals, key=maximised)
    if maximised(rival) >= maximised(best):
        return None
    mixed, other = (best, rival) if _mixes(best) else (rival, best)
    now = 0.0 if best.engine is None else best.engine.mixing
    closed = _closed(mixed, profile, now)

    def is_mixed_better(mixing: float) -> bool:
        return maximised(mixed) * _closed(mixed, profile, mixing) > maximised(other) * closed

    far = DEAREST if mixed is best else 0.0
    if closed <= 0 or is_mixed_better(far) == (mixed is best):
        return None
    near = now
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if is_mixed_better(middle) == (mixed is best) else (near, middle)
    return MixingEdge(mixing=round((near + far) / 2, 3), policy=rival.policy.kind)


def _mixes(plan: PlanDraft) -> bool:
    return FORECASTS[plan.policy.kind].stations.admits_each_step


def _closed(plan: PlanDraft, profile: Profile, mixing: float) -> float:
    engine = (plan.engine or load_engine("xgpt")).but(mixing=mixing)
    return closed_objective(plan, replace(Problem.of(plan, profile), engine=engine))
