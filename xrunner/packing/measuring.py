"""Find the fastest layout for each shape of weight, measured on this processor with torch's number of threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from xgpt.core.schema import HEAD, DType
from xrunner.packing.base import Shape
from xrunner.packing.choice import LAYOUTS, layouts_of, pack, pack_highest, shape_name

ROWS = (1, 8, 32, 128, 512)
"""Numbers of rows at which layouts are compared. At each number, times are relative to the fastest layout, so that all
numbers count equally.
"""
MOST_PRODUCT = 2**33
"""Largest product that is timed, as a number of multiplications. A larger product, such as the head of a large
vocabulary, has few rows in a step anyway.
"""
REPEATS = 5
TIE = 1.05
"""Layouts whose mean time is within this factor of the least mean time count as equal, since two measurements of one
product may differ by 5%.
"""
EVICTING = 2**24
"""Number of elements (64 MiB) to read before each product. In a real step, a weight has left a core's cache since it
was last used.
"""


def fastest(shapes: Collection[Shape], dtype: DType, *, is_brief: bool = False) -> dict[str, str]:
    """Return the fastest layout for each shape of weight, or {} if only one is available.

    A weight is stored once, so one layout serves all numbers of rows. For each number in ROWS, a layout's time is
    divided by the fastest layout's time. The layout with the lowest mean of these ratios is chosen. If several tie, the
    first of LAYOUTS is chosen, so that repeated measurements give the same choice.

    Args:
        is_brief: whether to measure at fewer numbers of rows, and fewer times at each, because the machine is busy.
    """
    names = layouts_of(dtype)
    if len(names) < 2:
        return {}
    chosen = {}
    for shape in sorted(set(shapes)):
        weight = torch.randn(shape)
        mean = mean_times({name: LAYOUTS[name].pack(weight, "none") for name in names}, shape, is_brief=is_brief)
        chosen[shape_name(shape)] = next(name for name in mean if mean[name] <= TIE * min(mean.values()))
    return chosen


def fastest_head(shape: Shape, layouts: Mapping[str, str], *, is_brief: bool = False) -> dict[str, str]:
    """Return, under `HEAD`, the eight-bit layout with which the highest sum is found fastest. Return {} if float32 is
    as fast.

    Args:
        layouts: layouts of the products in float32, as `pack` takes them.
    """
    weight = torch.randn(shape)
    whole = pack(weight, "none", "float32", layouts)
    if whole is None:
        return {}
    ways: dict[str, Any] = {"": whole}
    for name in layouts_of("int8"):
        highest = pack_highest(weight, whole, {HEAD: name})
        if highest is not None:
            ways[name] = highest
    mean = mean_times(ways, shape, is_brief=is_brief)
    best = min(mean, key=mean.__getitem__)
    return {HEAD: best} if TIE * mean[best] < mean.get("", math.inf) else {}


def mean_times(
    products: Mapping[str, Callable[..., Tensor]], shape: Shape, *, is_brief: bool = False
) -> dict[str, float]:
    """Return for each product the mean over ROWS of its time divided by the fastest product's time."""
    others = torch.ones(EVICTING)
    rows = [n for n in ROWS[:: 2 if is_brief else 1] if n == 1 or n * shape[0] * shape[1] <= MOST_PRODUCT]
    repeats = 2 if is_brief else REPEATS
    seconds = [_timed(products, torch.randn(n, shape[1]), others, repeats) for n in rows]
    return {name: sum(each[name] / min(each.values()) for each in seconds) / len(seconds) for name in products}


def _timed(products: Mapping[str, Callable[..., Tensor]], x: Tensor, others: Tensor, repeats: int) -> dict[str, float]:
    """Return each product's least time with x. Products take turns. Before each, `others` is read, so that the weights
    leave the cache.
    """
    best = dict.fromkeys(products, float("inf"))
    for repeat in range(1 + repeats):
        for name, product in products.items():
            others.sum()
            started = time.perf_counter()
            product(x, None)
            if repeat:  # the first call allocates memory that the others use
                best[name] = min(best[name], time.perf_counter() - started)
    return best
