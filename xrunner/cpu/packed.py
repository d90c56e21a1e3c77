"""Weights laid out once for a CPU's matrix kernels, in the precision of the model's products.

Plain F.linear lays a weight out anew in every call, which takes 10% (256 rows) to 60% (8 rows) of its time. Which
library's layout is the fastest differs from one processor to another: `fastest` measures it. Activations enter and
leave in float32, whatever the precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.schema import DType
from xrunner.cpu import matrix_panels, panels, small, split_panels, strassen
from xrunner.cpu.panels import Finish
from xrunner.cpu.quantised import quantise, rescale
from xrunner.gpu import fused

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _gating(activate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activate(gate).mul_(up)

    return gated


def _silu_gate(x: Tensor) -> Tensor:
    if fused.runs_on(x.device.type):
        return fused.gate(x)
    return small.gate(x) if small.runs_on(x) else _gating(F.silu)(x)


GATES: dict[str, str] = {name: f"{name}_gate" for name in ACTIVATIONS if name != "none"}
"""To each activation, what applies it to the first half of the outputs and multiplies the second by it.

Source: GLU variants (arXiv 2002.05202).
"""
ACTIVATIONS |= {gate: _gating(ACTIVATIONS[name]) for name, gate in GATES.items()} | {GATES["silu"]: _silu_gate}

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = ACTIVATIONS | {
    "none": lambda x: x,
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}
"""The same on a product's own result; gates write half of it elsewhere."""

PackedLinear = Callable[[Tensor, Tensor | None], Tensor]
"""activation(x W^T + b) of x and b, of which gates leave half. # float32 [rows, in], [out] -> [rows, out or out / 2]"""

Shape = tuple[int, int]
"""Of a weight: (out, in)."""

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

ROWS = (1, 8, 32, 128, 512)
"""Numbers of rows at which layouts are compared; each counts alike, relative to the fastest."""
MOST_PRODUCT = 2**33
"""Multiplications of a product that is timed: heads over large vocabularies meet few rows at once."""
REPEATS = 5
HOPELESS = 5.0
"""Times the fastest with one row, above which a layout is not timed with more: oneDNN's eight bits, kept from matrix
registers, took two hundred times as long, and would have taken ten seconds with 512 rows."""
TIE = 1.05
"""Times the least mean that count as equal: two measurements of one product may differ by 5%."""
EVICTING = 2**24
"""Elements that are read before each product, 64 MiB: in a step, a weight has left a core's cache since the last."""


class WeightLayout(NamedTuple):
    """A way to keep a weight.

    Attributes:
        dtype: of its products.
        is_available: whether this torch has it.
        pack: the product with a float32 weight [out, in] and an activation's name.
    """

    dtype: DType
    is_available: Callable[[], bool]
    pack: Callable[[Tensor, str], PackedLinear]


def _with_mkl(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
    # Torch asks for the weight as it was, and reads no more of it than its shape.
    shape = torch.empty(1).expand(weight.shape)
    activate = _IN_PLACE[activation]
    return lambda x, bias: activate(torch.ops.mkl._mkl_linear(x, packed, shape, bias, len(x)))


def _with_onednn(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    fuses = activation in _ONEDNN
    (name, algorithm), activate = _ONEDNN[activation if fuses else "none"], _IN_PLACE["none" if fuses else activation]
    return lambda x, bias: activate(torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm))


def _finished(pack: Callable[..., PackedLinear], activation: str) -> PackedLinear:
    """A product of our own, which leaves out what is negative by itself."""
    product, activate = pack(relu=activation == "relu"), _IN_PLACE[activation]
    return product if activation == "relu" else lambda x, bias: activate(product(x, bias))


_FINISHES = {"none": Finish.NOTHING, "relu": Finish.RELU, GATES["silu"]: Finish.GATE}
"""What panels do by themselves."""


def _in_panels(pack: Callable[[Finish], PackedLinear], activation: str) -> PackedLinear:
    if activation in _FINISHES:
        return pack(_FINISHES[activation])
    product, activate = pack(Finish.NOTHING), _IN_PLACE[activation]
    return lambda x, bias: activate(product(x, bias))


def _with_panels(weight: Tensor, activation: str) -> PackedLinear:
    return _in_panels(partial(panels.pack, weight), activation)


def _with_strassen(weight: Tensor, activation: str) -> PackedLinear:
    return _in_panels(partial(strassen.pack, weight), activation)


def _with_split_panels(weight: Tensor, activation: str) -> PackedLinear:
    return _finished(partial(split_panels.pack, weight), activation)


def _with_bfloat16_panels(weight: Tensor, activation: str) -> PackedLinear:
    """Weight and activations rounded to bfloat16; sums, bias and activation function in float32."""
    return _in_panels(partial(panels.pack_bfloat16, weight.bfloat16()), activation)


def _with_bfloat16_matrix_panels(weight: Tensor, activation: str) -> PackedLinear:
    return _finished(partial(matrix_panels.pack_bfloat16, weight.bfloat16()), activation)


def _with_bfloat16(weight: Tensor, activation: str) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    activate = _IN_PLACE[activation]

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, None, "none", [], "").float()
        return activate(y if bias is None else y.add_(bias))

    return product


def _with_int8(weight: Tensor, activation: str) -> PackedLinear:
    """Weight in eight bits, a scale for each output; activations in eight bits as they come, a scale for each row.

    Sums are exact in 32 bits; scales, bias and activation function are float32.
    """
    quantised, scales = in_eight_bits(weight)
    packed = torch.ops.onednn.qlinear_prepack(quantised, None)
    zero_points = torch.zeros(len(scales), dtype=torch.int32)
    activate = _IN_PLACE[activation]

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        rows, scale = quantise(x)
        y = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = rescale(y, scale, bias, relu=activation == "relu")
        return y if activation == "relu" else activate(y)

    return product


def _with_int8_panels(weight: Tensor, activation: str) -> PackedLinear:
    return _in_panels(partial(panels.pack_int8, *in_eight_bits(weight)), activation)


def _with_int8_matrix_panels(weight: Tensor, activation: str) -> PackedLinear:
    return _finished(partial(matrix_panels.pack_int8, *in_eight_bits(weight)), activation)


def in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's numbers, and the scale of each output. # float32 [out, in] -> int8 [out, in], float32 [out]"""
    scales = (weight.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _int8_is_exact() -> bool:
    """Whether sums of products in eight bits are right at their largest: without the instructions for them, pairs of
    products saturate at 16 bits."""
    if not torch.backends.mkldnn.is_available():
        return False
    product = _with_int8(torch.full((16, 64), 127.0), "none")
    return bool(torch.allclose(product(torch.ones(2, 64), None), torch.full((2, 16), 127.0 * 64)))


LAYOUTS: dict[str, WeightLayout] = {
    "split-panels": WeightLayout("float32", split_panels.is_available, _with_split_panels),
    "strassen": WeightLayout("float32", panels.is_available, _with_strassen),
    "panels": WeightLayout("float32", panels.is_available, _with_panels),
    "mkl": WeightLayout("float32", torch.backends.mkl.is_available, _with_mkl),
    "onednn": WeightLayout("float32", torch.backends.mkldnn.is_available, _with_onednn),
    "matrix-panels-bfloat16": WeightLayout(
        "bfloat16", partial(matrix_panels.is_available, "bfloat16"), _with_bfloat16_matrix_panels
    ),
    "panels-bfloat16": WeightLayout("bfloat16", partial(panels.is_available, "bfloat16"), _with_bfloat16_panels),
    "onednn-bfloat16": WeightLayout("bfloat16", torch.backends.mkldnn.is_available, _with_bfloat16),
    "matrix-panels-int8": WeightLayout("int8", partial(matrix_panels.is_available, "int8"), _with_int8_matrix_panels),
    "panels-int8": WeightLayout("int8", partial(panels.is_available, "int8"), _with_int8_panels),
    "onednn-int8": WeightLayout("int8", cache(_int8_is_exact), _with_int8),
}
"""By the name that profiles and plans give it; of a dtype the first at hand is taken where nothing was measured."""


FEW_ROWS_AS = {"strassen": ("panels", strassen.LEAST_ROWS)}
"""Of layouts that are another one in memory, and multiply fewer rows as it does: that one, and the first other rows."""


def layouts_of(dtype: DType) -> list[str]:
    """The layouts at hand for products in that dtype."""
    return [name for name, layout in LAYOUTS.items() if layout.dtype == dtype and layout.is_available()]


def shape_name(shape: Shape) -> str:
    """What profiles and plans call a weight's shape: OUTxIN."""
    return f"{shape[0]}x{shape[1]}"


def pack(
    weight: Tensor, activation: str, dtype: DType = "float32", layouts: Mapping[str, str] | None = None
) -> PackedLinear | None:
    """The product with a weight [out, in]; None where there is nothing to choose: no CPU, or no layout for the dtype.

    Args:
        layouts: which to take for each shape, by `shape_name`; one that is not here is done without.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    at_hand = layouts_of(dtype)
    if not at_hand:
        return None
    wanted = (layouts or {}).get(shape_name((weight.shape[0], weight.shape[1])))
    return LAYOUTS[wanted if wanted in at_hand else at_hand[0]].pack(weight, activation)


def fastest(shapes: Collection[Shape], dtype: DType) -> dict[str, str]:
    """The fastest layout for each shape of weight, measured here with the threads at hand; {} where there is one alone.

    A weight lies in memory once, so one layout serves all numbers of rows: that of the least mean time over ROWS,
    relative to the fastest at each; of those that tie, the first of LAYOUTS, so that a choice does not change from one
    measurement to the next. What multiplies few rows as another layout does is compared with it by the others alone.
    """
    names = layouts_of(dtype)
    if len(names) < 2:
        return {}
    chosen = {}
    for shape in sorted(set(shapes)):
        weight = torch.randn(shape)
        seconds = _by_rows({name: LAYOUTS[name].pack(weight, "none") for name in names}, shape)
        mean = _means(seconds)
        for name, (other, least_rows) in FEW_ROWS_AS.items():
            if name in mean and other in mean:
                more = {rows: {n: of[n] for n in (name, other)} for rows, of in seconds.items() if rows >= least_rows}
                is_faster = bool(more) and (mean_of_more := _means(more))[name] < mean_of_more[other]
                del mean[other if is_faster else name]
        chosen[shape_name(shape)] = next(name for name in mean if mean[name] <= TIE * min(mean.values()))
    return chosen


def mean_times(products: Mapping[str, PackedLinear], shape: Shape) -> dict[str, float]:
    """Mean over ROWS of each product's seconds relative to the fastest; without those that are hopeless."""
    return _means(_by_rows(products, shape))


def _means(seconds: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Of each product's seconds, relative to the fastest at each number of rows."""
    names = next(iter(seconds.values()))
    return {name: sum(of[name] / min(of.values()) for of in seconds.values()) / len(seconds) for name in names}


def _by_rows(products: Mapping[str, PackedLinear], shape: Shape) -> dict[int, dict[str, float]]:
    """The seconds of each product at ROWS; without those that are hopeless."""
    others, left = torch.ones(EVICTING), dict(products)
    rows = [n for n in ROWS if n == 1 or n * shape[0] * shape[1] <= MOST_PRODUCT]
    first = _timed(left, torch.randn(rows[0], shape[1]), others, repeats=1)
    left = {name: left[name] for name in left if first[name] <= HOPELESS * min(first.values())}
    return {n: _timed(left, torch.randn(n, shape[1]), others) for n in rows}


def _timed(products: Mapping[str, PackedLinear], x: Tensor, others: Tensor, repeats: int = REPEATS) -> dict[str, float]:
    """The least seconds of each product with x, by turns, each after `others` have been read."""
    best = dict.fromkeys(products, float("inf"))
    for repeat in range(1 + repeats):
        for name, product in products.items():
            others.sum()
            started = time.perf_counter()
            product(x, None)
            if repeat:  # the first makes what the others find
                best[name] = min(best[name], time.perf_counter() - started)
    return best
