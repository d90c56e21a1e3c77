"""A float32 weight laid out once as a CPU's matrix kernels want it.

Plain F.linear lays it out anew in every call, which takes 10% (256 rows) to 60% (8 rows) of its time. MKL's layout is
faster than oneDNN's at every number of rows, by 8 to 20% (docs/PERFORMANCE.md), but oneDNN is on every processor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}

PackedLinear = Callable[[Tensor, Tensor | None], Tensor]
"""activation(x W^T + b) of x and b. # [rows, in], [out] -> [rows, out]"""

_MKL_ROWS = 512
"""For which MKL chooses its layout; the products of all numbers of rows are right with it, and small ones no slower."""

# Our activation, as oneDNN fuses it: name and algorithm.
_ONEDNN = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def pack(weight: Tensor, activation: str) -> PackedLinear | None:
    """The product with a weight [out, in]; None where nothing is gained: no CPU, or no float32."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if torch.backends.mkl.is_available():
        return _with_mkl(weight, activation)
    return _with_onednn(weight, activation) if torch.backends.mkldnn.is_available() else None


def _with_mkl(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
    # Torch asks for the weight as it was, and reads no more of it than its shape.
    shape = torch.empty(1).expand(weight.shape)
    activate = ACTIVATIONS[activation]
    return lambda x, bias: activate(torch.ops.mkl._mkl_linear(x, packed, shape, bias, len(x)))


def _with_onednn(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    name, algorithm = _ONEDNN[activation]
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm)
