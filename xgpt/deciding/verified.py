"""Say which parts of a prediction published measurements have not checked."""

from __future__ import annotations

from xgpt.core.schema import PlanDraft


def unverified(plan: PlanDraft) -> tuple[str, ...]:
    """Return what of a plan fewer than ten published measurements check (docs/results/truth.md), in words.

    Empty if the plan's step times were measured where it runs."""
    if plan.profile.source == "measured":
        return ()
    found, device = [], plan.cluster.device
    if device.efficiency is not None and device.efficiency.like is not None:
        found.append(f"{device.name}, whose efficiency is derived from that of {device.efficiency.like}")
    if shape := unverified_shape(plan):
        found.append(shape)
    if plan.speculation is not None:
        found.append("drafts")
    if any(block.recurrent is not None for block in plan.model.blocks):
        found.append("recurrent layers")
    return tuple(found)


def unverified_shape(plan: PlanDraft) -> str:
    """Return the class of a plan's placement if few measurements check it, in words, or ""."""
    if plan.profile.source == "measured":
        return ""
    if len({stage.lane for stage in plan.stages}) > 1:
        return "prefill and decode on separate devices"
    if len(plan.stages) > 1:
        return "pipelines"
    return "attention by data with shared experts" if any(stage.ep > stage.tp for stage in plan.stages) else ""
