"""Hold keys and values in paged blocks; the schedule (`xgpt.policies.Pool`) assigns blocks to requests.

Source: vLLM (PagedAttention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xgpt.schema import ModelSpec
from xrunner.kernels import huge_pages


class KvCache:
    """The blocks of all decoder layers.

    A request has the same block numbers in every layer. Within a layer a block holds, for each head, its
    tokens side by side, so that one head reads `block_size * head_dim` contiguous elements.

    Attributes:
        device: where they are; known, too, where a stage has no decoder layer.
        layers: one tensor a layer. # [2 (K, V), num_blocks, num_kv_heads, block_size, head_dim]
            Of latent attention one vector a token, which is key and value in one: [1, num_blocks, 1, block_size, kept].
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
        if device.type == "cpu":
            self.layers = [huge_pages.zeros(shape, dtype, huge=False) for _ in range(spec.num_layers)]
        else:
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


def write_kv(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Put a step's keys and values where they belong in one layer's cache.

    Args:
        keys, values: of the step's tokens. # [tokens, num_kv_heads, head_dim]
        cache: the layer's. # [2 or 1, num_blocks, num_kv_heads, block_size, head_dim]
        slots: block * block_size + offset of each token. # int64 [tokens]
    """
    block_size = cache.shape[3]
    block, offset = slots // block_size, slots % block_size
    cache[0][block, :, offset] = keys.to(cache.dtype)
    if len(cache) == 2:
        cache[1][block, :, offset] = values.to(cache.dtype)
