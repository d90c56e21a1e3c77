"""Predict a plan for lengths or a pace for which it was not made.

Requests are assumed to be always waiting (saturation). The plan's computed numbers stay the same: for example, rra
encodes the planned number of prompt tokens in a phase, whatever the number of requests.
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
    """Return a plan's predictions for other lengths, with its computed numbers unchanged.

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
