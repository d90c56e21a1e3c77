"""Find the plans that may replace a running one, in place or on another placement."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Plan
from xgpt.core.schema.policy import POLICY_GROUPS
from xscheduler.objectives.best_plans import variables_of
from xscheduler.replanning.judge import Judge, replaced
from xscheduler.space import runnable
from xsimulator.forecast import CHOICES, FORECASTS, TUNED

SWAPPABLE = tuple(kind for kind, forecast in FORECASTS.items() if forecast.swaps_between_steps)
"""Policies that can be swapped in between two steps; a static batch must end first, and waa's lanes must drain."""
ON_ONE_DEVICE = tuple(kind for kind, forecast in FORECASTS.items() if len(forecast.settings.lanes) == 1)


class Replacements(NamedTuple):
    """The best plans that may replace the running one.

    Attributes:
        anywhere: the best plan on any placement of the server's devices.
        swap: the best plan on the running plan's stages, with a policy that can be swapped in between two steps; None
            if no such plan keeps the bounds.
    """

    anywhere: Plan
    swap: Plan | None


def within_pins(plan: Plan, kinds: Collection[str]) -> tuple[str, ...]:
    """Return the given policies that the user's requirements on a plan allow and under which its model can run."""
    asked = plan.pinned.policy
    if asked != "auto":
        choices = POLICY_GROUPS.get(asked, (TUNED.get(asked, asked),))
        kinds = [choice for choice in choices if CHOICES[choice].settings.model_fields["kind"].default in kinds]
    left = [kind for kind in runnable(kinds, plan.model) if plan.pinned.fixed.keys() <= variables_of(kind)]
    return tuple(left) or (plan.policy.kind,)


def find_candidates(judge: Judge) -> Replacements:
    """Return the best plans that may replace the running one.

    Raises:
        InfeasibleError: no plan keeps the bounds.
    """
    plan = judge.plan
    kinds = within_pins(plan, SWAPPABLE) if plan.policy.kind in SWAPPABLE else (plan.policy.kind,)
    is_alone = plan.num_devices == 1
    anywhere = judge.best(within_pins(plan, ON_ONE_DEVICE if is_alone else tuple(FORECASTS)), in_place=False)
    if is_alone and anywhere.policy.kind in kinds:  # one device has no other placement
        return Replacements(anywhere, replaced(plan, anywhere, in_place=True))
    try:
        return Replacements(anywhere, judge.best(kinds, in_place=True))
    except InfeasibleError:
        return Replacements(anywhere, None)
