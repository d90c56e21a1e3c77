"""Define the contract of matrix products with packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from xgpt.core.schema import DType

PackedLinear = Callable[[Tensor, Tensor | None], Tensor]
"""Returns activation(x W^T + b) for x and b. A gate halves the number of outputs.
# float32 [rows, in], [out] -> [rows, out or out / 2]
"""

Shape = tuple[int, int]
"""The shape of a weight: (out, in)."""


HighestLinear = Callable[[Tensor, Tensor | None], Tensor]
"""Returns x W^T plus the given numbers. Each row's argmax is that of the float32 sums. The row's other sums may be
wrong, but are never higher. # float32 [rows, in], [rows, out] -> [rows, out]
"""


class WeightLayout(NamedTuple):
    """A way to store a weight on a CPU, and the functions that use it. Inputs and results are float32, whatever the
    dtype of the products.

    Attributes:
        is_available: returns whether this processor and this torch support the layout.
        pack: packs a float32 weight [out, in]. Returns a function that multiplies by it and applies the named
            activation function.
        pack_highest: packs a float32 weight [out, in], given also the function that multiplies by it in float32.
            Returns a function that finds each row's argmax. None means that the layout is not used for this.
    """

    dtype: DType
    is_available: Callable[[], bool]
    pack: Callable[[Tensor, str], PackedLinear]
    pack_highest: Callable[[Tensor, PackedLinear], HighestLinear] | None = None
