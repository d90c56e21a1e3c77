"""Find the argmax of a matrix product exactly, starting from the product in eight bits.

Greedy sampling needs only the highest logit, and an output head for 150,000 tokens has a quarter of a small model's
weights. In eight bits, the head's product reads a quarter of the bytes, and each output's error has a bound. By this
bound, only some tens of outputs can be the highest. They are computed again in float32. So the chosen token is that of
the product in float32.

Source: the bound is the Cauchy-Schwarz inequality. For screening before exact products, see Teflioudi et al., LEMP
(SIGMOD 2015).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from xrunner.cpu.scalars import INNER, OPTIONS
from xrunner.cpu.threads import compiled, run
from xrunner.eight_bits import quantise
from xrunner.packing.base import PackedLinear

MOST_CANDIDATES = 32
"""At most one in this many outputs is computed again in float32. To read more of them one by one would take as long as
to read the whole weight.
"""
MOST_REST = 63
"""Largest number of calls without screening after repeated failures. So failures cost almost no time."""
_AT_ONCE = 4096
"""Number of outputs whose errors are computed at a time, to save memory."""
_BLOCK = 256
_ROUNDING = 2.0**-20
"""Bound on the error of float32 sums of thousands of products, relative to the product of the two vectors' norms."""


class Screen:
    """Multiplies by a weight if only each row's argmax is needed.

    The weight is not copied. Only `rounded` takes additional memory.

    Args:
        rounded: multiplies by the weight as rounded by `quantise`.
        whole: multiplies by the weight in float32. Used for rows in which too many outputs can be the highest.
    """

    def __init__(self, weight: Tensor, rounded: PackedLinear, whole: PackedLinear) -> None:
        self._weight, self._whole = weight, whole
        self._product = rounded
        errors, norms = zip(*map(_errors, weight.split(_AT_ONCE)), strict=True)
        self._errors, self._norms = torch.cat(errors), torch.cat(norms)
        self._is_bounded = bool(torch.isfinite(self._errors + self._norms).all())
        self._most = len(weight) // MOST_CANDIDATES
        self._rest = self._left = 0

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return sums with the same argmax in each row as the float32 product. A row's other sums may be wrong, but are
        never higher.

        # float32 [rows, in] -> [rows, out]

        Args:
            added: numbers to add to the product. # float32 [rows, out]
        """
        if self._left or not self._is_bounded:
            self._left = max(self._left - 1, 0)
            return self._exact(x, added)
        x = x.contiguous()
        sums = self._product(x, None)
        if added is None:
            added = sums[:, :0]
        else:
            sums += added
        rounded, scale = quantise(x)
        norms, lost = x.norm(dim=1), (x - rounded * scale[:, None]).norm(dim=1)
        is_right = torch.empty(len(x), dtype=torch.bool)
        of_x = x.numpy(), norms.numpy(), lost.numpy()
        of_weight = self._weight.numpy(), self._errors.numpy(), self._norms.numpy()
        run(_KERNEL, sums.numel(), sums.numpy(), *of_x, *of_weight, self._most, added.numpy(), is_right.numpy())
        if is_right.all():
            self._rest = 0
        else:
            sums[~is_right] = self._exact(x[~is_right], added[~is_right] if added.shape[1] else None)
            self._left = self._rest = min(2 * self._rest + 1, MOST_REST)
        return sums

    def _exact(self, x: Tensor, added: Tensor | None) -> Tensor:
        sums = self._whole(x, None)
        return sums if added is None else sums.add_(added)


def _errors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two norms for each output: of its weights' rounding errors (with an allowance for float32's own), and of
    its rounded weights. # float32 [out]
    """
    rounded, scales = quantise(weight)
    kept = rounded * scales[:, None]
    norms = kept.norm(dim=1)
    return (weight - kept).norm(dim=1) + _ROUNDING * norms, norms


@njit(**(OPTIONS | {"fastmath": True}), **INNER)
def _highest(sums: Any, norm: Any, lost: Any, errors: Any, norms: Any) -> Any:
    highest = sums[0] + (norm * errors[0] + lost * norms[0])
    for i in range(len(sums)):
        highest = max(highest, sums[i] + (norm * errors[i] + lost * norms[i]))
    return highest


@njit(**(OPTIONS | {"fastmath": True}), **INNER)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@njit(**OPTIONS, **INNER)
def _rescore(
    sums: Any, x: Any, norm: Any, lost: Any, weight: Any, errors: Any, norms: Any, most: Any, added: Any
) -> Any:
    """Replace the sums of a row's candidates by sums in float32. Return False if there are more than `most` candidates,
    or if the norm of x is not finite.

    Args:
        added: numbers that `sums` already include, or empty.
    """
    if not np.isfinite(norm * norm):
        return False  # without this check there would be no bound, since fastmath assumes finite numbers
    certain, count = _highest(sums, -norm, -lost, errors, norms), 0
    for first in range(0, len(sums), _BLOCK):
        block = slice(first, min(first + _BLOCK, len(sums)))
        if _highest(sums[block], norm, lost, errors[block], norms[block]) < certain:
            continue
        for i in range(block.start, block.stop):
            if sums[i] + (norm * errors[i] + lost * norms[i]) >= certain:
                count += 1
                if count > most:
                    return False
                sums[i] = _dot(x, weight[i]) + (added[i] if len(added) else np.float32(0.0))
    return True


def _rescore_all(
    sums: Any, x: Any, norm: Any, lost: Any, weight: Any, errors: Any, norms: Any, most: Any, added: Any, is_right: Any
) -> None:
    for i in prange(len(x)):
        is_right[i] = _rescore(sums[i], x[i], norm[i], lost[i], weight, errors, norms, most, added[i])


_KERNEL = compiled(_rescore_all)
