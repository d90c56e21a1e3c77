"""Predict a plan under lengths or at a pace for which it was not made.

Assumptions: requests are always waiting (saturation), and the plan keeps its resolved numbers: for example, rra encodes
the planned number of prompt tokens in a phase, however many requests they belong to.
"""

from __future__ import annotations

import numpy as np

from xgpt.core.schema import Plan, Profile, Workload
from xscheduler.problem import reused_by
from xsimulator.costs.step_cost import lanes_of
from xsimulator.forecast import FORECASTS
from xsimulator.lengths import Lengths
from xsimulator.memory import capacity


def reestimate(
    plan: Plan, profile: Profile, workload: Workload, quantile: float, ratio: float = 1.0
) -> dict[str, float]:
    """Return a plan's predictions under other lengths, with its resolved numbers unchanged.

    Args:
        ratio: factor by which the closed form's latency is multiplied.
    """
    lengths = Lengths(workload, reused_by(plan, workload))
    lanes = lanes_of(plan, profile)
    blocks = min(stage.kv_blocks for stage in plan.stages if stage.lane != "encode")
    kept = 0
    if plan.estimate.reuse is not None and plan.policy.lanes == ("both",):
        kept = plan.estimate.reuse.kept_blocks
    inside = float(capacity(lengths, blocks, plan.block_size, plan.admission.kv, kept))
    inside = max(1.0, min(inside, plan.admission.max_running or np.inf))
    forecast = FORECASTS[plan.policy.kind]
    model = forecast.model(*(lanes[name] for name in plan.policy.lanes), lengths, quantile)
    found = forecast.reestimate(plan, model, inside)
    return found | {"throughput": plan.replicas * found["throughput"], "latency": ratio * found["latency"]}
