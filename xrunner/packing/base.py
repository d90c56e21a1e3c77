"""The contract of products with packed weights: how a CPU keeps a weight, and the call that multiplies by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from xgpt.core.schema import DType

PackedLinear = Callable[[Tensor, Tensor | None], Tensor]
"""activation(x W^T + b) of x and b; gates halve the outputs. # float32 [rows, in], [out] -> [rows, out or out / 2]"""

Shape = tuple[int, int]
"""Of a weight: (out, in)."""


class HighestLinear(Protocol):
    """A product of which only each row's highest sum is wanted."""

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return sums whose highest in each row is that of float32; no other sum is above it.

        # float32 [rows, in] -> [rows, out]

        Args:
            added: to the sums, before the highest is looked for. # float32 [rows, out]
        """


class WeightLayout(NamedTuple):
    """A way to keep a weight on a CPU. Activations enter and leave in float32, whatever the type of the products.

    Attributes:
        dtype: of its products.
        is_available: whether this processor and this torch have it.
        pack: returns the product with a float32 weight [out, in], followed by the activation of that name.
        pack_highest: returns the product that finds the highest sums with a copy of a float32 weight [out, in] in this
            layout, given the product with all of it; None if the layout is not used so.
    """

    dtype: DType
    is_available: Callable[[], bool]
    pack: Callable[[Tensor, str], PackedLinear]
    pack_highest: Callable[[Tensor, PackedLinear], HighestLinear] | None = None
