"""Fit a profile to steps that a real engine has executed.

A profile's tables are measured part by part. In a serving engine, the parts run concurrently and other work loads the
machine. One factor for each table corrects this:

    measured step = a tokens(n) + b encode attention + c decode attention + d head(k) + e overhead(r)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import Calibration, CrossTimes, PlanDraft, Profile
from xgpt.core.schema.step_log import StepRecord
from xsimulator.costs.step_cost import LaneCost, StepParts
from xsimulator.executed import executed
from xsimulator.stages import whole

Array = npt.NDArray[np.float64]

PARTS = StepParts._fields
MIN_STEPS = 50
PRIOR = 0.001
"""Weight of a factor's distance from 1 in the fit. The relative errors of all steps together have weight 1."""
LEAST, MOST = 0.2, 5.0
OUTLIER = 4.0
"""A step is an outlier if its error differs from the median error by more than this number of standard deviations. They
are estimated from the median deviation.
"""


@dataclass(frozen=True)
class Steps:
    """The measured times of executed steps, and the predicted times of the steps' parts.

    Attributes:
        parts: predicted seconds of each part. # [steps, PARTS]
    """

    parts: Array
    seconds: Array
    first_request: npt.NDArray[np.int_]

    def where(self, mask: npt.NDArray[np.bool_]) -> Steps:
        return Steps(self.parts[mask], self.seconds[mask], self.first_request[mask])


def steps_of(plan: PlanDraft, profile: Profile, log: Sequence[StepRecord]) -> Steps:
    """Return the steps of a log, with the predicted time of each part. Each replica must have one device."""
    if plan.devices_per_replica > 1:
        says = "calibrate with a plan for one device"
        raise InputError("plan", f"{plan.devices_per_replica} devices a replica", says)
    cost = LaneCost(plan.model, profile, whole(plan.model))
    parts, seconds, first = [], [], []
    for record, counts, step_s in executed(plan, log):
        parts.append(cost.parts(counts)[0])
        seconds.append(step_s)
        first.append(min([*record.decode, *(id_ for id_, _, _ in record.encode)]))
    return Steps(np.asarray(parts), np.asarray(seconds), np.asarray(first))


def calibrate(plan: PlanDraft, profile: Profile, log: Sequence[StepRecord]) -> tuple[Profile, Calibration]:
    """Fit a profile to the steps of the first half of the requests. Compute its error on the steps of the second half.

    Raises:
        InputError: `log` has too few steps, or a replica of `plan` has several devices.
    """
    steps = steps_of(plan, profile, log)
    middle = int(np.quantile(steps.first_request, 0.5))
    newest = max(arrival.id for record in log for arrival in record.arrivals)
    # If a step's lowest id is in the second half, the step has no request of the first half.
    used, unused = steps.where(steps.first_request < middle), steps.where(steps.first_request >= middle)
    if min(len(used.seconds), len(unused.seconds)) < MIN_STEPS:
        says = f"calibration needs at least {2 * MIN_STEPS} steps; replay more requests"
        raise InputError("num_requests", newest + 1, says)
    factors = fit(used)
    calibration = Calibration(
        factors=dict(zip(PARTS, (round(float(f), 4) for f in factors), strict=True)),
        num_steps_used=len(used.seconds),
        num_steps_unused=len(unused.seconds),
        error_before=error(unused, np.ones(len(PARTS))),
        error_after=error(unused, factors),
        bias_before=bias(unused, np.ones(len(PARTS))),
        bias_after=bias(unused, factors),
    )
    text = f"{calibration.num_steps_used} measured steps"
    return corrected(profile, calibration.factors, "calibration", text), calibration


def fit(steps: Steps, around: float = 1.0, prior_weight: float = PRIOR) -> Array:
    """Return one factor for each part, by least squares of the relative errors.

    Args:
        around: the value near which factors stay if the steps hardly determine them.
        prior_weight: weight of a factor's relative distance from `around`.
    """
    from scipy.optimize import lsq_linear

    weighted = around * steps.parts / steps.seconds[:, None]
    keep = np.ones(len(weighted), bool)
    factors = np.ones(len(PARTS))
    for _ in range(3):
        prior = np.sqrt(prior_weight * keep.sum()) * np.eye(len(PARTS))
        weight = np.sqrt(steps.seconds[keep] / steps.seconds[keep].mean())
        rows = np.vstack([weight[:, None] * weighted[keep], prior])
        targets = np.concatenate([weight, np.diag(prior)])
        factors = np.asarray(lsq_linear(rows, targets, bounds=(LEAST, MOST)).x)
        keep = _ordinary(weighted @ factors - 1, steps.parts[:, PARTS.index("encode_attention")] > 0)
    return around * factors


def _ordinary(residual: Array, encodes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    keep = np.ones(len(residual), bool)
    for kind in (encodes, ~encodes):
        if kind.any():
            distance = np.abs(residual[kind] - np.median(residual[kind]))
            keep[kind] = distance <= OUTLIER * max(1.4826 * float(np.median(distance)), 1e-6)
    return keep


def error(steps: Steps, factors: Array) -> float:
    """Return the mean absolute error of the predicted step times, relative to the measured times."""
    return float(np.mean(np.abs(steps.parts @ factors / steps.seconds - 1)))


def bias(steps: Steps, factors: Array) -> float:
    """Return the relative error of the predicted total time of all steps. It is also the error of throughput."""
    return float((steps.parts @ factors).sum() / steps.seconds.sum() - 1)


def corrected(profile: Profile, by: Mapping[str, float], name: str, source: str) -> Profile:
    """Return the profile with each table multiplied by its factor and an entry about the factors in its provenance."""
    layers = tuple(
        layer.but(
            rest=layer.rest.times(by["tokens"]),
            last=None if layer.last is None else layer.last.times(by["tokens"]),
            encode_attention=layer.encode_attention.times(by["encode_attention"]),
            decode_attention=layer.decode_attention.times(by["decode_attention"]),
            cross=None if layer.cross is None else _crossed(layer.cross, by),
            head=None if layer.head is None else layer.head.times(by["head"]),
        )
        for layer in profile.layers
    )
    encoder_layers = tuple(
        layer.but(rest=layer.rest.times(by["tokens"]), attention=layer.attention.times(by["encode_attention"]))
        for layer in profile.encoder_layers
    )
    text = ", ".join(f"{part} x{factor:g}" for part, factor in by.items())
    return profile.but(
        layers=layers,
        encoder_layers=encoder_layers,
        embedding=profile.embedding.times(by["tokens"]),
        head=profile.head.times(by["head"]),
        overhead=profile.overhead.times(by["overhead"]),
        provenance=profile.provenance | {name: f"{text}; {source}"},
    )


def _crossed(cross: CrossTimes, by: Mapping[str, float]) -> CrossTimes:
    return CrossTimes(
        keys_values=cross.keys_values.times(by["tokens"]), attention=cross.attention.times(by["decode_attention"])
    )
