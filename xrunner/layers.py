"""The blocks that every model family is built of. They know one device and no parallelism.

Each takes `empty`, which allocates: `torch.empty` with dtype and device bound. Values come later (weights.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Empty = Callable[..., Tensor]
"""Allocates a parameter of the given shape."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Self-attention of one layer. # q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads * dim]"""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}

# Our activation, as oneDNN fuses it: name and algorithm.
_ONEDNN = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Linear(nn.Module):
    """activation(x W^T + b), perhaps several projections of the same input fused into one.

    Args:
        out_features: output size of each fused part; a checkpoint stores them apart.
        weight: use this one (a tied head) instead of an own one.
    """

    def __init__(
        self,
        empty: Empty,
        in_features: int,
        *out_features: int,
        bias: bool,
        activation: str = "none",
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.parts = out_features
        self.activation = activation
        total = sum(out_features)
        self.weight: nn.Parameter | None = weight
        if weight is None:
            self.weight = parameter(empty(total, in_features))
        self.bias = parameter(empty(total)) if bias else None
        self._packed: Tensor | None = None

    def prepack(self) -> None:
        """Lay the weight out as oneDNN's kernels want it, where that exists: float32 on a CPU.

        Plain F.linear lays it out anew in every call, which takes 10% (256 tokens) to 60% (8 tokens) of its time.
        A weight that is not shared is given up; a tied one stays with the embedding, so this costs its size.
        """
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.data)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:  # [tokens, in] -> [tokens, sum of parts]
        if self._packed is not None:
            name, algorithm = _ONEDNN[self.activation]
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, name, [], algorithm)
        assert self.weight is not None
        return ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


class LayerNorm(nn.Module):
    def __init__(self, empty: Empty, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(empty(size))
        self.bias = parameter(empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    """Rows of a table. `offset` is added to each index (OPT's positions start at row 2)."""

    def __init__(self, empty: Empty, num_rows: int, size: int, offset: int = 0) -> None:
        super().__init__()
        self.weight = parameter(empty(num_rows + offset, size))
        self.offset = offset

    def forward(self, index: Tensor) -> Tensor:  # int64 [tokens] -> [tokens, size]
        return F.embedding(index + self.offset if self.offset else index, self.weight)


class Attention(nn.Module):
    """Projections around self-attention; `attend` does the attending and owns the cache."""

    def __init__(
        self,
        empty: Empty,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
    ) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.qkv = Linear(empty, hidden_size, *(n * head_dim for n in self.heads), bias=qkv_bias)
        self.out = Linear(empty, num_heads * head_dim, hidden_size, bias=out_bias)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:  # [tokens, hidden] -> same
        qkv = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=1)
        return self.out(attend(q, k, v))


class Mlp(nn.Module):
    """Two projections with an activation between."""

    def __init__(self, empty: Empty, hidden_size: int, ffn_size: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.up = Linear(empty, hidden_size, ffn_size, bias=bias, activation=activation)
        self.down = Linear(empty, ffn_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [tokens, hidden] -> same
        return self.down(self.up(hidden))
