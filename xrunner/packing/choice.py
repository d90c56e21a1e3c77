"""List the weight layouts by name, of xgpt's own kernels and of torch's libraries, and choose among them.

Which layout is fastest depends on the processor: `fastest` compares them. torch's libraries are MKL and oneDNN. Without
packing, F.linear rearranges the weight in every call, which takes 10% (256 rows) to 60% (8 rows) of the call's time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xgpt.core.schema import HEAD, DType
from xrunner import cpu
from xrunner.activations import IN_PLACE
from xrunner.eight_bits import quantise
from xrunner.packing.base import HighestLinear, PackedLinear, Shape, WeightLayout

_MKL_ROWS = 512
"""Number of rows for which MKL chooses its layout. Other numbers of rows work, too, and small ones are no slower."""

ZERO = 128
"""The number that represents zero in rows, which are uint8. Signed rows would take hundreds of times as long on Zen 4.
"""

# oneDNN's name and algorithm for each activation function that it fuses.
_ONEDNN = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def _with_mkl(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
    # Torch requires the original weight, but reads only its shape.
    shape = torch.empty(1).expand(weight.shape)
    activate = IN_PLACE[activation]
    return lambda x, bias: activate(torch.ops.mkl._mkl_linear(x, packed, shape, bias, len(x)))


def _with_onednn(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    fuses = activation in _ONEDNN
    (name, algorithm), activate = _ONEDNN[activation if fuses else "none"], IN_PLACE["none" if fuses else activation]
    return lambda x, bias: activate(torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm))


def _with_onednn_bfloat16(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    activate = IN_PLACE[activation]

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, None, "none", [], "").float()
        return activate(y if bias is None else y.add_(bias))

    return product


def _with_onednn_int8(weight: Tensor, activation: str) -> PackedLinear:
    """Return a function that multiplies in int8, with a scale per output. Each call rounds x, with a scale per row.

    Sums are int32. Scales, bias and activation function are float32.
    """
    numbers, scales = quantise(weight)
    packed = torch.ops.onednn.qlinear_prepack(numbers, None)
    zero_points = torch.zeros(len(scales), dtype=torch.int32)
    activate = IN_PLACE[activation]

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        rows, scale = quantise(x)
        unsigned = rows.view(torch.uint8).bitwise_xor_(ZERO)
        y = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, ZERO, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(scale[:, None])
        return activate(y if bias is None else y.add_(bias))

    return product


@cache
def _int8_is_exact() -> bool:
    """Return whether oneDNN's int8 products are exact. On processors without int8 dot-product instructions, the sum of
    two products saturates at 16 bits.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    product = _with_onednn_int8(torch.full((16, 64), 127.0), "none")
    return bool(torch.allclose(product(torch.ones(2, 64), None), torch.full((2, 16), 127.0 * 64)))


_OF_TORCH = {
    "mkl": WeightLayout("float32", torch.backends.mkl.is_available, _with_mkl),
    "onednn": WeightLayout("float32", torch.backends.mkldnn.is_available, _with_onednn),
    "onednn-bfloat16": WeightLayout("bfloat16", torch.backends.mkldnn.is_available, _with_onednn_bfloat16),
    "onednn-int8": WeightLayout("int8", _int8_is_exact, _with_onednn_int8),
}


LAYOUTS: dict[str, WeightLayout] = cpu.LAYOUTS | _OF_TORCH
"""Layouts by the name that profiles and plans use. Without a measurement, the first available one is used."""


def layouts_of(dtype: DType) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout.dtype == dtype and layout.is_available()]


def shape_name(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def pack(
    weight: Tensor, activation: str, dtype: DType = "float32", layouts: Mapping[str, str] | None = None
) -> PackedLinear | None:
    """Return a function that multiplies by a weight [out, in]. Return None if the weight is not float32 on a CPU, or if
    no layout is available for `dtype`.

    Args:
        layouts: the layout for each shape, by `shape_name`. If it is missing or not available here, the first available
            layout is used.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    available = layouts_of(dtype)
    if not available:
        return None
    wanted = (layouts or {}).get(shape_name((weight.shape[0], weight.shape[1])))
    return LAYOUTS[wanted if wanted in available else available[0]].pack(weight, activation)


def pack_highest(weight: Tensor, whole: PackedLinear, layouts: Mapping[str, str] | None = None) -> HighestLinear | None:
    """Return a function that computes only each row's argmax exactly. Return None if `layouts` names no layout for
    this.

    Args:
        layouts: has the name of an int8 layout under `HEAD`.
    """
    name = (layouts or {}).get(HEAD)
    if name is None or name not in layouts_of("int8"):
        return None
    pack_highest = LAYOUTS[name].pack_highest
    return None if pack_highest is None else pack_highest(weight, whole)


ROWS = (1, 8, 32, 128, 512)
MOST_PRODUCT = 2**33
"""Largest product that is timed, as a number of multiplications."""
REPEATS = 5
TIE = 1.05
"""Layouts whose mean time is within this factor of the least mean time count as equal, since two measurements of one
product may differ by 5%.
"""
EVICTING = 2**24
"""Number of float32 numbers (64 MiB) to read before each product. In a real step, too, a weight is no longer in a
core's cache.
"""


def fastest(shapes: Collection[Shape], dtype: DType, *, is_brief: bool = False) -> dict[str, str]:
    """Return the name of the fastest layout for each shape of weight, or {} if fewer than two are available.

    A weight is stored once, so one layout serves all numbers of rows. For each number in ROWS, a layout's time is
    divided by the fastest layout's time, and the layout with the lowest mean ratio is chosen. Of several within `TIE`,
    it is the first of LAYOUTS, so that repeated measurements agree.
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
    """Return, under `HEAD`, the name of the int8 layout that finds each row's argmax fastest. Return {} if none is
    clearly faster than float32.
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
    others = torch.ones(EVICTING)
    rows = [n for n in ROWS[:: 2 if is_brief else 1] if n == 1 or n * shape[0] * shape[1] <= MOST_PRODUCT]
    repeats = 2 if is_brief else REPEATS
    seconds = [_timed(products, torch.randn(n, shape[1]), others, repeats) for n in rows]
    return {name: sum(each[name] / min(each.values()) for each in seconds) / len(seconds) for name in products}


def _timed(products: Mapping[str, Callable[..., Tensor]], x: Tensor, others: Tensor, repeats: int) -> dict[str, float]:
    """Return each product's shortest time with x, in seconds. Products take turns. Before each call, `others` is read,
    so that the weights leave the cache.
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
