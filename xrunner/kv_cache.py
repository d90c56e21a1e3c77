"""Store keys and values in paged blocks, which the schedule (`xgpt.core.policies.Pool`) assigns to requests.

Source: vLLM (PagedAttention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xgpt.core.schema import SCALE_BYTES, ModelSpec
from xrunner import memory
from xrunner.eight_bits import quantise


class KvCache:
    """The blocks of all decoder layers.

    A request has the same block numbers in every layer. A block stores its tokens head by head, so that one head reads
    `block_size * head_dim` contiguous elements.

    Attributes:
        device: the device of the blocks, even if a stage has no decoder layer.
        layers: one tensor for each layer.
            # [2 (K, V), num_blocks, num_kv_heads, block_size, head_dim]
            Latent attention stores one vector for each token, as both key and value: [1, num_blocks, 1, block_size,
            kept]. In eight bits, head_dim is SCALE_BYTES larger, since each token's numbers are followed by their scale
            (`numbers_of`).
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        shape = (2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        if spec.latent is not None:
            shape = (1, num_blocks, 1, block_size, spec.latent.kept_per_token)
        if dtype == torch.int8:
            shape = (*shape[:-1], shape[-1] + SCALE_BYTES)
        if device.type == "cpu":
            self.layers = [memory.zeros(shape, dtype, huge=False) for _ in range(spec.num_layers)]
        else:
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


def write_kv(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write a step's keys and values into their slots in one layer's cache.

    Args:
        keys, values: keys and values of the step's tokens. # [tokens, num_kv_heads, head_dim]
        cache: the layer's cache. # [2 or 1, num_blocks, num_kv_heads, block_size, head_dim]
        slots: block * block_size + offset of each token. # int64 [tokens]
    """
    block_size = cache.shape[3]
    block, offset = slots // block_size, slots % block_size
    for kept, x in zip(cache, (keys, values), strict=False):
        if cache.dtype == torch.int8:
            numbers, scales = numbers_of(kept)
            rounded, scale = quantise(x.flatten(0, 1))
            numbers[block, :, offset], scales[block, :, offset] = rounded.view(x.shape), scale.view(x.shape[:2])
        else:
            kept[block, :, offset] = x.to(cache.dtype)


def read_kv(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return whole blocks of a layer. # int64 [blocks] -> [2 or 1, blocks, num_kv_heads, block_size, head_dim]"""
    kept = cache[:, blocks]
    if cache.dtype != torch.int8:
        return kept
    numbers, scales = numbers_of(kept)
    return numbers * scales[..., None]


def numbers_of(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the numbers in eight-bit blocks, and of the scale of each token.

    # int8 [.., block_size, head_dim + SCALE_BYTES] -> int8 [.., block_size, head_dim], float32 [.., block_size]
    """
    block_size, head_dim = kept.shape[-2], kept.shape[-1] - SCALE_BYTES
    flat = kept.flatten(-2)
    numbers = flat[..., : block_size * head_dim].unflatten(-1, (block_size, head_dim))
    return numbers, flat[..., block_size * head_dim :].view(torch.float32)
