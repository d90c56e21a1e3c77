"""Run a plan in vLLM, behind the same endpoint as our own engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from xgpt.schema import Plan, WaaSettings

if TYPE_CHECKING:
    from xgpt.schema.step_log import StepRecord
    from xrunner.server.served import ServedEngine

logger = logging.getLogger(__name__)


def check_plan_for_vllm(plan: Plan) -> str:
    """Refuse a plan that vLLM cannot serve here.

    Returns:
        vLLM's version.

    Raises:
        InputError: the plan is for another engine, vLLM cannot run its policy, or there are no weights.
        MachineError: there is no vLLM, or the plan's devices or memory are not here.
    """
    from xgpt.app.checking import check_runs
    from xrunner.vllm import TESTED_VERSION
    from xrunner.vllm.process import package_path, python, version_of

    check_runs(plan, engine="vllm")
    check_vllm_runs(plan)
    with package_path() as packages:
        found = version_of(python(), packages)
    if found != TESTED_VERSION:
        logger.warning("xgpt is tested with vLLM %s, this is %s", TESTED_VERSION, found)
    if plan.profile.engine_version not in (None, found):
        logger.warning("the plan's profile is of vLLM %s, this is %s", plan.profile.engine_version, found)
    return found


def check_vllm_runs(plan: Plan) -> None:
    """Refuse a plan that vLLM cannot run anywhere.

    Raises:
        InputError: says why.
    """
    from xrunner.vllm.command import launch
    from xrunner.vllm.waa import check_waa

    if isinstance(plan.policy, WaaSettings):
        check_waa(plan)
    else:
        launch(plan, plan_path="plan.json")


def build_vllm_engine(plan: Plan, on_step: Callable[[StepRecord], None] | None = None) -> ServedEngine:
    """vLLM with the plan's schedule in it, or one vLLM for each lane of WAA. `close` ends them.

    Raises:
        InputError: vLLM cannot run the plan.
        MachineError: vLLM is not here, or does not start.
    """
    from xrunner.vllm.engine import VllmEngine
    from xrunner.vllm.waa import WaaEngine

    return (WaaEngine if isinstance(plan.policy, WaaSettings) else VllmEngine)(plan, on_step=on_step)


def can_change_plan(plan: Plan) -> bool:
    """Whether vLLM goes over to other plans as it runs: a plan for several devices it keeps as it is."""
    return plan.replicas * plan.devices_per_replica == 1
