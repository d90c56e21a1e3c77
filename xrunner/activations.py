"""Define activation functions and gated activations, by name.

A gate applies the function to the first half of the columns and multiplies the result by the second half.

Source: GLU variants (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.gpu import fused

Activation = Callable[[Tensor], Tensor]

_PLAIN: dict[str, Activation] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _gating(activate: Activation) -> Activation:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activate(gate).mul_(up)

    return gated


def _silu_gate(x: Tensor) -> Tensor:
    return fused.gate(x) if fused.runs_on(x.device.type) else _gating(F.silu)(x)


GATES: dict[str, str] = {name: f"{name}_gate" for name in _PLAIN if name != "none"}
ACTIVATIONS: dict[str, Activation] = (
    _PLAIN | {gate: _gating(_PLAIN[name]) for name, gate in GATES.items()} | {GATES["silu"]: _silu_gate}
)

IN_PLACE: dict[str, Activation] = ACTIVATIONS | {
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}
"""In-place activation functions, for tensors that no other code reads."""
