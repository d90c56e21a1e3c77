"""The layouts of a weight by name (those of xgpt's own kernels and of torch's libraries), and the choice among them.

Which layout is fastest differs between processors: measuring.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from xgpt.core.schema import HEAD, DType
from xrunner import cpu
from xrunner.packing import libraries
from xrunner.packing.base import HighestLinear, PackedLinear, Shape, WeightLayout

LAYOUTS: dict[str, WeightLayout] = cpu.LAYOUTS | libraries.LAYOUTS
"""Layouts by the name that profiles and plans use. Without a measurement, the first available one is used."""


def layouts_of(dtype: DType) -> list[str]:
    """Return the layouts that are available for products in this dtype."""
    return [name for name, layout in LAYOUTS.items() if layout.dtype == dtype and layout.is_available()]


def shape_name(shape: Shape) -> str:
    """Return the name that profiles and plans give to a weight's shape: OUTxIN."""
    return f"{shape[0]}x{shape[1]}"


def pack(
    weight: Tensor, activation: str, dtype: DType = "float32", layouts: Mapping[str, str] | None = None
) -> PackedLinear | None:
    """Return the product with a weight [out, in], or None if it is not on a CPU, or no layout is available for the
    dtype.

    Args:
        layouts: layout to use for each shape, by `shape_name`. Layouts that are not available here are ignored.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    available = layouts_of(dtype)
    if not available:
        return None
    wanted = (layouts or {}).get(shape_name((weight.shape[0], weight.shape[1])))
    return LAYOUTS[wanted if wanted in available else available[0]].pack(weight, activation)


def pack_highest(weight: Tensor, whole: PackedLinear, layouts: Mapping[str, str] | None = None) -> HighestLinear | None:
    """Return the product for which only each row's highest sum is needed, or None if the whole product is used instead.

    Args:
        whole: the product with the same weight in float32.
        layouts: under `HEAD`, the layout of a copy of the weight in eight bits.
    """
    name = (layouts or {}).get(HEAD)
    if name is None or name not in layouts_of("int8"):
        return None
    pack_highest = LAYOUTS[name].pack_highest
    return None if pack_highest is None else pack_highest(weight, whole)
