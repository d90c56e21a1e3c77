"""List the weight layouts of xgpt's own CPU kernels by name. Each dtype's first available layout is the default."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from xrunner.activations import GATES, IN_PLACE
from xrunner.cpu import matrix_panels, panels
from xrunner.cpu.highest import Screen
from xrunner.eight_bits import quantise
from xrunner.packing.base import PackedLinear, WeightLayout


def _activated(product: PackedLinear, activation: str) -> PackedLinear:
    activate = IN_PLACE[activation]
    return product if activation == "none" else lambda x, bias: activate(product(x, bias))


def _in_panels(pack: Callable[..., PackedLinear], activation: str) -> PackedLinear:
    """The kernel itself applies SiLU gates."""
    return pack(gated=True) if activation == GATES["silu"] else _activated(pack(), activation)


def _panels(weight: Tensor, activation: str) -> PackedLinear:
    return _in_panels(partial(panels.pack, weight), activation)


def _bfloat16_panels(weight: Tensor, activation: str) -> PackedLinear:
    """Return a function that multiplies in bfloat16: weights and activations are rounded. Sums, bias and activation
    function are float32.
    """
    return _in_panels(partial(panels.pack_bfloat16, weight.bfloat16()), activation)


def _int8_panels(weight: Tensor, activation: str) -> PackedLinear:
    """Return a function that multiplies in int8, with a scale per output and per row of activations. Sums are int32."""
    return _in_panels(partial(panels.pack_int8, *quantise(weight)), activation)


def _int8_matrix_panels(weight: Tensor, activation: str) -> PackedLinear:
    return _activated(matrix_panels.pack(*quantise(weight)), activation)


def _highest(pack: Callable[[Tensor, str], PackedLinear]) -> Callable[[Tensor, PackedLinear], Screen]:
    return lambda weight, whole: Screen(weight, pack(weight, "none"), whole)


LAYOUTS: dict[str, WeightLayout] = {
    "panels": WeightLayout("float32", panels.is_available, _panels),
    "panels-bfloat16": WeightLayout("bfloat16", partial(panels.is_available, "bfloat16"), _bfloat16_panels),
    "matrix-panels-int8": WeightLayout(
        "int8", matrix_panels.is_available, _int8_matrix_panels, _highest(_int8_matrix_panels)
    ),
    "panels-int8": WeightLayout("int8", partial(panels.is_available, "int8"), _int8_panels, _highest(_int8_panels)),
}
