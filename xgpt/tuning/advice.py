"""Turn what is believed of an engine's settings into a recommendation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xgpt.core.schema.recommendation import Action, Gain, Offer, Process, Ranged, Recommendation
from xgpt.reporting.plan_text import settings_text
from xscheduler.tuning.belief import SURE, TOLERANCE, Array
from xscheduler.tuning.tuner import Tuner

INSIDE = (0.05, 0.95)
PORT = 8000


def advise(
    tuner: Tuner, now: int | None, command: Callable[[int], str | None], unit: str = "requests/s"
) -> Recommendation:
    model, draws = tuner.model, tuner.belief.draws
    standing = tuner.standing()
    means = draws.mean(axis=0)
    best = standing.best if standing.best is not None else int(means.argmax())
    if now is not None and standing.best in (None, now):
        best = _rival(draws, now)
    ratio = draws[:, best] / np.maximum(draws[:, now], 1e-9) if now is not None else None
    gains = None if ratio is None else float(np.mean(ratio >= 1 + TOLERANCE))
    changes = ratio is None or (gains is not None and gains >= 0.5)
    action: Action = "run" if now is None else "change" if changes else "keep"
    chosen = best if changes or now is None else now
    problem = model.problem
    value = None if now is None else float(np.median(draws[:, now]))
    factor = None if ratio is None or not value else Ranged(value=float(np.median(ratio)), **_range(ratio))
    gain = None
    if value is not None:
        gain = Gain(unit=f"{unit} within the bounds", now=value, then=float(np.median(draws[:, best])), factor=factor)
    sure = standing.sure if now is None else gains if changes else 1 - (gains or 0.0)
    return Recommendation(
        action=action,
        model=problem.model.name,
        devices=f"{problem.cluster.num_devices} x {problem.cluster.device.name}",
        workload=problem.workload.name,
        best=_offer(tuner, draws, chosen, command),
        now=None if now is None else _offer(tuner, draws, now, command),
        gain=gain,
        rejected=_offer(tuner, draws, best, command) if action == "keep" else None,
        confidence=sure,
        why=_why(action, sure or 0.0, unit),
        limit_per_s=standing.most,
        limit_gap=None if not means[chosen] else max(0.0, standing.most / float(means[chosen]) - 1),
    )


def _why(action: Action, sure: float, unit: str) -> str:
    words = {
        "keep": f"no other setting gains {100 * TOLERANCE:.0f}%, with a probability of {100 * sure:.0f}%",
        "change": f"it gains at least {100 * TOLERANCE:.0f}%, with a probability of {100 * sure:.0f}%",
        "run": f"no other setting is more than {100 * TOLERANCE:.0f}% better, with a probability of {100 * sure:.0f}%",
    }
    more = "" if sure >= SURE or action == "run" or unit != "requests/s" else "; `xgpt tune` measures until it is 95%"
    return words[action] + more


def _rival(draws: Array, now: int) -> int:
    gains = np.maximum(draws - draws[:, [now]], 0.0).mean(axis=0)
    gains[now] = -1.0
    return int(gains.argmax())


def _range(values: Array) -> dict[str, float]:
    low, high = np.quantile(values, INSIDE)
    return {"low": float(low), "high": float(high)}


def rate_of_candidate(draws: Array, candidate: int) -> Ranged:
    return Ranged(value=float(np.median(draws[:, candidate])), **_range(draws[:, candidate]))


def _offer(tuner: Tuner, draws: Array, candidate: int, command_of: Callable[[int], str | None]) -> Offer:
    plan = tuner.model.plan(candidate)
    command = command_of(candidate)
    devices = () if plan.cluster.device.type == "cpu" else tuple(range(plan.num_devices))
    return Offer(
        name=plan.policy.kind,
        policy=plan.policy.kind,
        settings=settings_text(plan),
        engine="" if plan.engine is None else plan.engine.name,
        needs_xgpt=False,
        num_devices=plan.num_devices,
        processes=() if command is None else (Process(command=command, port=PORT, devices=devices),),
        rate_per_s=rate_of_candidate(draws, candidate),
    )
