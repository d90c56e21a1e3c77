"""Serve a plan by vLLM, behind the same endpoint as our own engine."""

from __future__ import annotations

from collections.abc import Callable

from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.server.served import ServedEngine
from xrunner.vllm.engine import VllmEngine
from xrunner.vllm.waa import WaaEngine


def build_vllm_engine(
    plan: Plan, on_step: Callable[[StepRecord], None] | None = None, *, reuse: bool = True
) -> ServedEngine:
    """Return an engine of vLLM with the plan's schedule in it, or one vLLM for each lane of WAA; `close` ends them.

    Args:
        reuse: requests share the K/V of what their prompts have in common, where vLLM can (`reuses`).

    Raises:
        InputError: vLLM cannot run the plan.
        MachineError: vLLM is not installed, or does not start.
    """
    if len(plan.policy.lanes) > 1:
        return WaaEngine(plan, on_step=on_step)
    return VllmEngine(plan, on_step=on_step, reuse=reuse)


def can_change_plan(plan: Plan) -> bool:
    """Return whether vLLM can change to another plan as it runs: only a plan for one device."""
    return plan.num_devices == 1
