"""Weights packed for the matrix products of torch's own libraries, MKL and oneDNN.

Plain F.linear rearranges a weight in every call, which takes 10% (256 rows) to 60% (8 rows) of its time.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from xrunner.activations import IN_PLACE
from xrunner.eight_bits import quantise
from xrunner.packing.base import PackedLinear, WeightLayout

_MKL_ROWS = 512
"""Number of rows for which MKL chooses its layout. Products with other numbers of rows are correct too, and no slower
if rows are few.
"""

ZERO = 128
"""The number that represents zero in rows of unsigned eight-bit numbers. Signed rows take hundreds of times as long on
Zen 4."""

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
    """Return the product with a weight in eight bits, with a scale for each output. Each call rounds its activations,
    with a scale for each row.

    Sums are exact in 32 bits. Scales, bias and activation function are float32.
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
    """Return whether the largest sums of products in eight bits are right. On processors without instructions for such
    products, pairs of products saturate at 16 bits.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    product = _with_onednn_int8(torch.full((16, 64), 127.0), "none")
    return bool(torch.allclose(product(torch.ones(2, 64), None), torch.full((2, 16), 127.0 * 64)))


LAYOUTS: dict[str, WeightLayout] = {
    "mkl": WeightLayout("float32", torch.backends.mkl.is_available, _with_mkl),
    "onednn": WeightLayout("float32", torch.backends.mkldnn.is_available, _with_onednn),
    "onednn-bfloat16": WeightLayout("bfloat16", torch.backends.mkldnn.is_available, _with_onednn_bfloat16),
    "onednn-int8": WeightLayout("int8", _int8_is_exact, _with_onednn_int8),
}
