"""Compute the least seconds that a workload takes on this machine if all requests are present at the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from benchmarks import roofline
from xgpt.core.schema import ModelSpec, Precision, RunDType

SECONDS = 4.0
"""Seconds for which each dtype's rates are measured."""


class Rates(NamedTuple):
    """The machine's rates of reading memory and of one large matrix product."""

    bytes_per_s: float
    flops_per_s: float


def measured_rates(dtypes: Iterable[RunDType], seconds: float = SECONDS) -> dict[RunDType, Rates]:
    found = {}
    with torch.inference_mode():
        for dtype in dtypes:
            points = roofline.machine("cpu", dtype)
            roofline.in_rounds(points, seconds)
            found[dtype] = Rates(*roofline.rates(points).values())
    return found


def floor_s(spec: ModelSpec, lengths: Sequence[tuple[int, int]], dtype: RunDType, rates: Rates) -> float:
    """Return the seconds of all prompts' products plus the decode steps of the longest output.

    A step takes the longer of two times, to read the weights or to compute the products, plus the time to read K/V.

    Args:
        lengths: input and output length of each request.
    """
    seconds = sum(roofline.prompt_flops(spec, n) for n, _ in lengths) / rates.flops_per_s
    of_row = 2 * (roofline.layer_params(spec) + roofline.head_params(spec))
    kept = spec.kv_bytes_per_token(Precision.of(dtype, "cpu").kv)
    reading_s = roofline.matrix_bytes(spec, dtype) / rates.bytes_per_s
    for step in range(1, max(num_output for _, num_output in lengths)):
        contexts = [num_input + step for num_input, num_output in lengths if num_output > step]
        multiplying_s = len(contexts) * of_row / rates.flops_per_s
        seconds += max(reading_s, multiplying_s) + sum(contexts) * kept / rates.bytes_per_s
    return seconds
