"""Say which parts of a prediction published measurements have not checked."""

from __future__ import annotations

from xgpt.core.schema import Plan


def unverified(plan: Plan) -> tuple[str, ...]:
    """Return what of a plan fewer than ten published measurements check (docs/results/truth.md), in words.

    Empty if the plan's step times were measured where it runs.
    """
    if plan.profile.source == "measured":
        return ()
    found, device = [], plan.cluster.device
    if device.efficiency is not None and device.efficiency.like is not None:
        found.append(f"{device.name}, whose efficiency is derived from that of {device.efficiency.like}")
    lanes = {stage.lane for stage in plan.stages}
    if len(lanes) > 1:
        found.append("prefill and decode on separate devices")
    elif len(plan.stages) > 1:
        found.append("pipelines")
    if any(stage.ep > stage.tp for stage in plan.stages):
        found.append("attention by data with shared experts")
    if plan.speculation is not None:
        found.append("drafts")
    if any(block.recurrent is not None for block in plan.model.blocks):
        found.append("recurrent layers")
    return tuple(found)
