"""Small operations of a layer on CPUs, each in one pass; compiled by numba.

In plain torch a norm takes five passes and a rotation some ten, each a call that costs more than a few rows' work: with
12 requests in decode they and the choice of tokens take a tenth of a step. Shares torch's OpenMP threads, as attention
does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from xrunner.cpu.decodes import exp
from xrunner.cpu.threads import compiled, run

OPTIONS: dict[str, Any] = {"fastmath": {"contract", "reassoc"}}
"""Sums may be taken in any order. NaN and infinity stay what they are."""


def runs_on(x: Tensor) -> bool:
    """Whether these are to be used on it."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. # [..., n], [n] -> [..., n]"""
    rows = x.contiguous().view(-1, x.shape[-1])
    y = torch.empty_like(rows)
    run(_RMS_NORM, rows.numel(), rows.numpy(), weight.numpy(), np.float32(eps), y.numpy())
    return y.view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (d, d + dim / 2) by its token's angle.

    # [tokens, heads, dim], two of [tokens, dim / 2] -> like x
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    run(_ROTATE, x.numel(), x.numpy(), cos.numpy(), sin.numpy(), y.numpy())
    return y


def gate(x: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half. # [tokens, 2 width] -> [tokens, width]"""
    x = x.contiguous()
    y = torch.empty(len(x), x.shape[1] // 2)
    run(_GATE, x.numel(), x.numpy(), y.numpy())
    return y


@njit(error_model="numpy", **OPTIONS)
def _squares(x: Any) -> Any:
    total = np.float32(0.0)
    for d in range(len(x)):
        total += x[d] * x[d]
    return total


def _rms_norm(x: Any, weight: Any, eps: Any, y: Any) -> None:
    size = x.shape[1]
    for i in prange(x.shape[0]):
        factor = np.float32(1.0) / np.sqrt(_squares(x[i]) / np.float32(size) + eps)
        for d in range(size):
            y[i, d] = x[i, d] * factor * weight[d]


def _rotate(x: Any, cos: Any, sin: Any, y: Any) -> None:
    half = x.shape[2] // 2
    for i in prange(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(half):
                a, b = x[i, h, d], x[i, h, d + half]
                y[i, h, d] = a * cos[i, d] - b * sin[i, d]
                y[i, h, d + half] = b * cos[i, d] + a * sin[i, d]


@njit(error_model="numpy", **OPTIONS)
def gated(a: Any, b: Any) -> Any:
    """silu(a) * b, of scalars."""
    small = exp(-abs(a))
    return a * (np.float32(1.0) if a >= 0 else small) / (np.float32(1.0) + small) * b


def _gate(x: Any, y: Any) -> None:
    width = y.shape[1]
    for i in prange(x.shape[0]):
        for d in range(width):
            y[i, d] = gated(x[i, d], x[i, width + d])


_GATE = compiled(_gate, **OPTIONS)
_RMS_NORM, _ROTATE = compiled(_rms_norm, **OPTIONS), compiled(_rotate, **OPTIONS)
