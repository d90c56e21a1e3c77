"""Weights that a checkpoint stores in eight bits, with the scales to multiply them by."""

from __future__ import annotations

from collections.abc import Container
from math import ceil

import torch
from torch import Tensor

EIGHT_BITS = ("F8_E4M3", "I8")
"""As safetensors names them."""
SCALES = ("_scale", "_scale_inv")
"""What a weight's name is followed by; numbers are multiplied by either."""
OFFSETS = "_zero_point"
"""What it is followed by where numbers do not count from zero."""
BLOCK = 128
"""Weights that share a scale in both directions, where scales are of blocks."""


def name_of_scales(names: Container[str], weight: str) -> str | None:
    """Return what a checkpoint calls a weight's scales; None: there are none, or more than scales is needed."""
    if weight + OFFSETS in names:
        return None
    return next((weight + ending for ending in SCALES if weight + ending in names), None)


def fits(scales: list[int], shape: list[int]) -> bool:
    """Whether scales of that shape are one of a matrix, one of each row, or one of each block."""
    rows, columns = shape
    of_blocks = [ceil(rows / BLOCK), ceil(columns / BLOCK)]
    return scales in ([], [1], [1, 1], [rows], [rows, 1], of_blocks)


def scaled(numbers: Tensor, scales: Tensor, shape: list[int], place: tuple[slice, ...]) -> Tensor:
    """Return a part of a matrix. # numbers [rows, columns] of that part -> float32, the same

    Args:
        scales: of the whole matrix; they fit it.
        shape: of the whole matrix.
        place: of the part in it.
    """
    scales = scales.float()
    if scales.numel() > 1:
        rows, columns = (torch.arange(size)[part] for size, part in zip(shape, place, strict=True))
        if scales.numel() == shape[0]:
            scales = scales.reshape(-1, 1)[rows]
        else:
            scales = scales[rows[:, None] // BLOCK, columns // BLOCK]
    return numbers.float() * scales
