"""What fits: K/V blocks beside the weights, and the requests that those blocks carry."""

from __future__ import annotations

import math

from xgpt.errors import InfeasibleError
from xgpt.schema import BYTES_PER_ELEMENT, ClusterSpec, DType, ModelSpec
from xsimulator.lengths import Lengths

WORKSPACE_BYTES = 256 * 2**20
"""Buffers of libraries and of the engine itself, beside activations."""


def activation_bytes(spec: ModelSpec, dtype: DType, tokens: float) -> int:
    """Peak of a step's intermediate tensors: the widest layer's inputs and outputs live together."""
    wide = 2 * spec.hidden_size + max((2 if spec.gated_ffn else 1) * spec.ffn_size, 3 * spec.num_heads * spec.head_dim)
    return int(tokens * wide * BYTES_PER_ELEMENT[dtype])


def kv_blocks(spec: ModelSpec, cluster: ClusterSpec, dtype: DType, block_size: int, step_tokens: float) -> int:
    """Blocks of K/V that fit on one device beside weights, activations and workspace.

    Raises:
        InfeasibleError: not even the weights and one request of the largest context fit.
    """
    usable = int(cluster.device.memory_bytes * cluster.device.usable_memory)
    fixed = spec.weight_bytes(dtype) + activation_bytes(spec, dtype, step_tokens) + WORKSPACE_BYTES
    blocks = (usable - fixed) // (block_size * spec.kv_bytes_per_token(dtype))
    if blocks < 1:
        raise InfeasibleError(
            f"memory: {spec.name} needs {fixed / 2**30:.1f} GiB in {dtype} before any K/V, a device of "
            f"{cluster.name} offers {usable / 2**30:.1f} GiB; take more devices or a smaller model",
            nearest_bound_s=None,
            binding="memory",
        )
    return blocks


def capacity(lengths: Lengths, blocks: int, block_size: int) -> float:
    """Requests whose reserved K/V fits in 99 of 100 moments.

    The blocks reserved at a time are a compound Poisson sum of mean B E[r] and variance B E[r^2]; the largest B
    with B E[r] + z sqrt(B E[r^2]) <= blocks solves a quadratic in sqrt(B).
    """
    z = 2.33
    mean, mean_square = lengths.reserved_blocks(block_size)
    root_mean_square = math.sqrt(mean_square)
    root = (math.sqrt(z * z * mean_square + 4 * mean * blocks) - z * root_mean_square) / (2 * mean)
    return root * root
