"""What a plan does under other lengths than it was made for, or at another pace.

Assumptions: requests wait (saturation), and the plan keeps its resolved numbers: rra encodes the planned prompt tokens
a phase, whatever the number of requests that bring them.
"""

from __future__ import annotations

import numpy as np

from xgpt.policies.rule import ADJUSTMENT
from xgpt.schema import (
    ChunkedSettings,
    Histogram,
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


def at_pace(plan: Plan, slowdown: float | None) -> Plan:
    """The plan with steps that last so many times as long as its profile says; None: as they do."""
    if slowdown is None:
        return plan
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"slowdown": slowdown})})


def within_context(workload: Workload, max_context: int) -> Workload:
    """The workload with its longest outputs and inputs cut, so that any input goes with any output.

    Each request fitted; the longest input came with a shorter output than the longest. What outputs were allowed but
    did not take goes first: a chat without a limit may fill the context.
    """
    workload = workload.model_copy(update={"output": _without_idle_tail(workload, max_context)})
    room = max_context - workload.output.lengths[-1]
    if workload.input.lengths[-1] <= room:
        return workload
    kept = [(n, p) for n, p in zip(workload.input.lengths, workload.input.probabilities, strict=True) if n < room]
    rest = 1 - sum(p for _, p in kept)
    lengths, probabilities = zip(*kept, (max(1, room), rest), strict=True)
    return workload.model_copy(update={"input": Histogram(lengths=lengths, probabilities=probabilities)})


def _without_idle_tail(workload: Workload, max_context: int) -> Histogram:
    """Outputs, with what is allowed beyond the longest that came cut to the room that the longest input leaves."""
    output = workload.output
    room = max_context - workload.input.lengths[-1]
    if output.probabilities[-1] or output.lengths[-1] <= room or len(output.lengths) == 1:
        return output
    lengths, probabilities = output.lengths[:-1], output.probabilities[:-1]
    if room > lengths[-1]:
        lengths, probabilities = (*lengths, room), (*probabilities, 0.0)
    return Histogram(lengths=lengths, probabilities=probabilities)


def under(plan: Plan, profile: Profile, workload: Workload, quantile: float, ratio: float = 1.0) -> dict[str, float]:
    """What a plan does under other lengths, its resolved numbers kept.

    Args:
        ratio: what the closed form's latency is multiplied by.
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
        found = _under_one_lane(plan, plan.policy, OneLaneModel(lanes["both"], lengths, quantile), inside)
    return found | {"throughput": plan.replicas * found["throughput"], "latency": ratio * found["latency"]}


def _under_one_lane(plan: Plan, settings: SingleLaneSettings, model: OneLaneModel, inside: float) -> dict[str, float]:
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
