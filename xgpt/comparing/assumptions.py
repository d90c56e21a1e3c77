"""Compute how a plan's gain depends on assumptions: the cost of mixed steps, the pace of steps, request lengths, and
bursts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from xgpt.core.load import Growth
from xgpt.core.schema import Plan, Profile, Workload
from xgpt.core.schema.documents import RangeOutput
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import TraceLengths, binned, fitting
from xgpt.resolve import load_engine
from xscheduler.objectives.capacities import closed_objective, with_capacity
from xscheduler.problem import Problem

MIXING = (-0.2, 0.2)
"""Changes that are tried in an engine's cost of mixed steps, as shares of the time of a step's decodes."""
PACES = (0.9, 1.15)
"""Factors to try on the profile's step times."""
OUTPUTS = (0.85, 1.15)
"""Factors to try on output lengths, if there is no trace whose two halves can be compared."""
BURSTS = 2.0
"""Factor on the coefficient of variation of the time between arrivals."""


class Assumption(NamedTuple):
    """An assumption that differs from the plan's own.

    Attributes:
        mixing: number added to the engine's `mixing`: the share by which prompts in a step slow its decodes.
        pace: factor on step times.
        workload: other request lengths. None means the plan's.
    """

    name: str
    mixing: float = 0.0
    pace: float = 1.0
    workload: Workload | None = None


def assumptions(workload: Workload, trace: TraceLengths | None) -> list[Assumption]:
    """Return alternative assumptions. Each differs in one way from the plan's assumptions."""
    varied = [
        Assumption(f"mixed steps slow decodes by {100 * abs(change):.0f} percentage points {word}", mixing=change)
        for change, word in zip(MIXING, ("less", "more"), strict=True)
    ]
    varied += [Assumption(f"steps take {100 * pace:.0f}% of the predicted time", pace=pace) for pace in PACES]
    if trace is not None and len(trace.input) >= 2:
        half = len(trace.input) // 2
        for name, part in (("first", slice(half)), ("second", slice(half, None))):
            lengths = workload.but(input=binned(trace.input[part]), output=binned(trace.output[part]))
            varied.append(Assumption(f"lengths of the trace's {name} half", workload=lengths))
        return varied
    for factor in OUTPUTS:
        other = Growth(outputs=factor).workload(workload)
        varied.append(Assumption(f"outputs have {100 * factor:.0f}% of their planned length", workload=other))
    return varied


def changes(plan: Plan, profile: Profile, among: Sequence[Assumption]) -> list[float]:
    """Return the factors by which a plan's rate changes: one for each assumption, in closed form, and a last one for
    bursts, by simulation.
    """
    now = _closed(plan, profile, Assumption("as planned"))
    if now <= 0:
        return [1.0] * (len(among) + 1)
    factors = [_closed(plan, profile, each) / now for each in among]
    constraint, rate = plan.constraint.but(burstiness=BURSTS * plan.constraint.burstiness), rate_of(plan)
    burst = with_capacity(plan.but(constraint=constraint), profile, rate, edges=False).estimate.capacity
    return [*factors, 1.0 if burst is None or rate <= 0 else burst.rate_per_s / rate]


def ranges(
    plans: Mapping[str, Plan], profile: Profile, current: Plan, current_profile: Profile, trace: TraceLengths | None
) -> dict[str, RangeOutput]:
    """Return the range of each plan's gain per device over the current deployment. What keeps the bounds at no rate has
    none.
    """
    among = assumptions(current.workload, trace)
    names = [*(each.name for each in among), f"gaps between arrivals vary {BURSTS:g} times as much"]
    now = np.asarray(changes(current, current_profile, among))
    by_policy = {}
    for kind, plan in plans.items():
        if not rate_of(plan):
            continue
        gain = rate_of(plan) / plan.num_devices / (rate_of(current) / current.num_devices)
        then = np.asarray(changes(plan, profile, among))
        each = gain * np.divide(then, now, out=np.where(then > 0, inf, 1.0), where=now > 0)
        least, most = min(gain, float(each.min())), max(gain, float(each.max()))
        by_policy[kind] = RangeOutput(
            least=least,
            most=None if most == inf else most,
            worst=names[int(each.argmin())],
            each={name: None if factor == inf else factor for name, factor in zip(names, each.tolist(), strict=True)},
        )
    return by_policy


def _closed(plan: Plan, profile: Profile, under: Assumption) -> float:
    """Return a plan's value of the objective under an assumption, computed in closed form. The settings are not
    optimised again for the assumption.
    """
    engine = plan.engine or load_engine("xgpt")
    engine = engine.but(mixing=max(0.0, engine.mixing + under.mixing))
    problem = Problem.of(plan, profile.slowed(under.pace))
    workload = plan.workload if under.workload is None else fitting(under.workload, plan.model)
    return closed_objective(plan, replace(problem, engine=engine, workload=workload))
