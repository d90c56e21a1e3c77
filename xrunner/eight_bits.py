"""Round rows to eight bits with scales, and read weights that a checkpoint stores in eight bits."""

from __future__ import annotations

from collections.abc import Container
from math import ceil

import torch
from torch import Tensor

EIGHT_BITS = ("F8_E4M3", "I8")
SCALES = ("_scale", "_scale_inv")
OFFSETS = "_zero_point"
BLOCK = 128


LARGEST = 127.0
TINIEST = torch.finfo(torch.float32).tiny


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row symmetrically to eight bits. # float32 [..., n]

    Returns:
        int8 [..., n], and each row's scale, float32 [...]. If a row has a value that is not finite, its scale is NaN.
    """
    highest = x.abs().amax(dim=-1)
    is_finite = highest.isfinite()
    scale = (highest / LARGEST).clamp_(min=TINIEST).masked_fill_(~is_finite, float("nan"))
    factor = scale.reciprocal().masked_fill_(~is_finite, 0.0)
    rounded = (x * factor[..., None]).round_().nan_to_num_(0.0)
    return rounded.to(torch.int8), scale


def name_of_scales(names: Container[str], weight: str) -> str | None:
    """Return the checkpoint's name for a weight's scales, or None if there are none. Weights that also have zero points
    are not supported, and give None.
    """
    if weight + OFFSETS in names:
        return None
    return next((weight + ending for ending in SCALES if weight + ending in names), None)


def fits(scales: list[int], shape: list[int]) -> bool:
    """Return whether scales of this shape fit a matrix: one for the whole matrix, one for each row, or one for each
    block.
    """
    rows, columns = shape
    of_blocks = [ceil(rows / BLOCK), ceil(columns / BLOCK)]
    return scales in ([], [1], [1, 1], [rows], [rows, 1], of_blocks)


def scaled(numbers: Tensor, scales: Tensor, shape: list[int], place: tuple[slice, ...]) -> Tensor:
    """Return part of a matrix, multiplied by its scales. # numbers [rows, columns] -> float32 [rows, columns]

    Args:
        scales: scales of the whole matrix, in a shape that `fits`.
    """
    scales = scales.float()
    if scales.numel() > 1:
        rows, columns = (torch.arange(size)[part] for size, part in zip(shape, place, strict=True))
        if list(scales.shape) in ([shape[0]], [shape[0], 1]):
            scales = scales.reshape(-1, 1)[rows]
        else:
            scales = scales[rows[:, None] // BLOCK, columns // BLOCK]
    return numbers.float() * scales
