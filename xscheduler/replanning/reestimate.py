"""What a plan does under other lengths than it was made for, or at another pace.

Assumptions: requests are always waiting (saturation), and the plan keeps its resolved numbers: rra encodes the planned
prompt tokens a phase, whatever the number of requests that they belong to.
"""

from __future__ import annotations

import numpy as np

from xgpt.policies.rule import ADJUSTMENT
from xgpt.schema import (
    ChunkedSettings,
    OrcaSettings,
    Plan,
    Profile,
    RraSettings,
    SingleLaneSettings,
    StaticSettings,
    WaaSettings,
    Workload,
)
from xgpt.workload import decoding_share
from xsimulator.forecast import FORECASTS, OneLaneModel, TwoLaneModel, estimate
from xsimulator.lengths import Lengths
from xsimulator.memory import capacity
from xsimulator.step_cost import lanes_of


def reestimate(
    plan: Plan, profile: Profile, workload: Workload, quantile: float, ratio: float = 1.0
) -> dict[str, float]:
    """Return what a plan does under other lengths, its resolved numbers kept.

    Args:
        ratio: factor on the closed form's latency.
    """
    lengths = Lengths(workload)
    lanes = lanes_of(plan, profile)
    blocks = min(stage.kv_blocks for stage in plan.stages if stage.lane != "encode")
    inside = float(capacity(lengths, blocks, plan.block_size, plan.admission.kv))
    inside = max(1.0, min(inside, plan.admission.max_running or np.inf))
    if isinstance(plan.policy, WaaSettings):
        two = TwoLaneModel(lanes["encode"], lanes["decode"], lengths, quantile)
        cap = min(plan.policy.max_decode_batch, int(inside))
        batch = min(plan.estimate.encode_tokens / lengths.mean_input, cap)
        micro = plan.policy.decode_microbatches
        columns = {"encode_batch": batch, "max_decode_batch": cap, "decode_microbatches": micro}
        found = FORECASTS["waa"].evaluate(two, **columns).at(0)
    else:
        found = _one_lane(plan, plan.policy, OneLaneModel(lanes["both"], lengths, quantile), inside)
    return found | {"throughput": plan.replicas * found["throughput"], "latency": ratio * found["latency"]}


def _one_lane(plan: Plan, settings: SingleLaneSettings, model: OneLaneModel, inside: float) -> dict[str, float]:
    """Args:
    inside: requests that K/V memory holds.
    """
    match settings:
        case RraSettings() as rra:
            batch = _encode_batch(plan, rra, model)
            peak = _rra(model, rra, batch)["peak_requests"]
            return _rra(model, rra, min(batch, batch * inside / peak))
        case OrcaSettings() as orca:
            most = min(orca.max_batch, int(inside))
            return FORECASTS["orca"].evaluate(model, max_batch=most, microbatches=orca.microbatches).at(0)
        case ChunkedSettings() as chunked:
            most, budget = min(chunked.max_batch, int(inside)), chunked.token_budget
            micro = chunked.microbatches
            columns = {"max_batch": most, "token_budget": budget, "microbatches": micro}
            return FORECASTS["chunked"].evaluate(model, **columns).at(0)
        case StaticSettings() as static:
            return estimate(model, static.model_copy(update={"batch": min(static.batch, int(inside))}))


def _rra(model: OneLaneModel, settings: RraSettings, encode_batch: float) -> dict[str, float]:
    return (
        FORECASTS["rra"]
        .evaluate(
            model,
            encode_batch=encode_batch,
            decode_iterations=settings.decode_iterations,
            microbatches=settings.microbatches,
        )
        .at(0)
    )


def _encode_batch(plan: Plan, settings: RraSettings, model: OneLaneModel) -> float:
    """Requests a phase that the planned prompt tokens come to under the model's lengths.

    Where more or fewer requests than planned stay in decode, the rule adjusts its target (ExeGPT sec. 5.2): the batch
    settles at the threshold, or as far from its target as the adjustment reaches.
    """
    estimate = plan.estimate
    batch = estimate.encode_tokens / model.lengths.mean_input
    one = _rra(model, settings, batch)
    carried_each = max(one["decode_batch"] / batch - model.lengths.survival[0], 1e-9)
    planned = estimate.decode_batch - settings.encode_batch * decoding_share(plan.workload)
    slack = ADJUSTMENT * estimate.decode_batch
    low, high = ((planned + sign * slack) / carried_each for sign in (-1, 1))
    return float(np.clip(np.clip(batch, low, high), (1 - ADJUSTMENT) * batch, (1 + ADJUSTMENT) * batch))
