"""A whole log replayed on a plan: every window counts, on one replica and on several."""

from __future__ import annotations

import numpy as np

from tests.contract.scenarios import problem
from xgpt.core.load import LogLoad
from xgpt.core.schema import Plan
from xgpt.core.workload import TraceLengths
from xgpt.deciding.load import CarriedLoad
from xscheduler.schedule import Scheduler
from xsimulator.replay import replay


def planned(latency_bound_s: float = 6.0) -> Plan:
    return Scheduler(problem("opt-13b", "h200x1", "summarization", latency_bound_s)).best(("chunked",))


def log(noon_per_s: float, number: int = 6000) -> LogLoad:
    """A log whose second half arrives at `noon_per_s`, and whose first half hardly arrives."""
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.exponential(2.0, number // 2), rng.exponential(1 / noon_per_s, number // 2)])
    inputs, outputs = rng.integers(50, 500, number), rng.integers(5, 60, number)
    return LogLoad.of("log", TraceLengths(inputs, outputs, np.cumsum(gaps) - gaps[0]))


def test_the_busy_half_decides() -> None:
    """Of a log that begins at midnight only the first 50,000 requests were replayed: no request was late."""
    plan = planned()
    profile = problem("opt-13b", "h200x1", "summarization").profile
    quiet, busy = (CarriedLoad(rate, log=log(rate)).kept(plan, profile) for rate in (0.5, 400.0))
    assert quiet is not None and quiet.holds(0.99)
    assert busy is not None and not busy.holds(0.99)
    assert busy.worst is not None and busy.worst.start_s > 2000
    assert busy.share > (busy.worst_share or 0)


def test_a_plan_is_judged_by_its_own_bounds() -> None:
    """A plan found under looser bounds was replayed once, and its shares stood beside the bounds that were asked."""
    plan, load = planned(), CarriedLoad(20.0, log=log(20.0, 2000))
    profile = problem("opt-13b", "h200x1", "summarization").profile
    loose, asked = (load.kept(plan.but(constraint=plan.constraint.but(latency_bound_s=s)), profile) for s in (6.0, 0.2))
    assert loose is not None and asked is not None and asked.share < loose.share


def test_replicas_take_turns_and_serve_every_request() -> None:
    plan = planned()
    profile = problem("opt-13b", "h200x1", "summarization").profile
    one, two = (replay(plan.but(replicas=count), profile, log(20.0, 2000)) for count in (1, 2))
    assert one is not None and two is not None
    assert len(two.whole_s) == 2000 and np.isfinite(two.whole_s).all()
    assert two.whole_s.mean() < one.whole_s.mean()
