"""What fits: K/V blocks beside the weights, and the requests that those blocks carry."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.errors import InfeasibleError
from xgpt.schema import BYTES_PER_ELEMENT, ClusterSpec, DType, KvPromise, ModelSpec
from xsimulator.lengths import Lengths

WORKSPACE_BYTES = 256 * 2**20
"""Buffers of libraries and of the engine itself, beside activations."""


def activation_bytes_per_token(spec: ModelSpec, dtype: DType) -> int:
    """Peak of a step's intermediate tensors: the widest layer's inputs and outputs live together."""
    wide = 2 * spec.hidden_size + max((2 if spec.gated_ffn else 1) * spec.ffn_size, 3 * spec.num_heads * spec.head_dim)
    return wide * BYTES_PER_ELEMENT[dtype]


def kv_blocks(spec: ModelSpec, cluster: ClusterSpec, dtype: DType, block_size: int) -> int:
    """Blocks of K/V that fit on one device beside weights and workspace, before any step's activations.

    Raises:
        InfeasibleError: not even the weights fit.
    """
    usable = int(cluster.device.memory_bytes * cluster.device.usable_memory)
    fixed = spec.weight_bytes(dtype) + WORKSPACE_BYTES
    blocks = (usable - fixed) // (block_size * spec.kv_bytes_per_token(dtype))
    if blocks < 1:
        raise InfeasibleError(
            f"memory: {spec.name} needs {fixed / 2**30:.1f} GiB in {dtype} before any K/V, a device of "
            f"{cluster.name} offers {usable / 2**30:.1f} GiB; take a larger device or a smaller model",
            nearest_bound_s=None,
            binding="memory",
        )
    return blocks


def capacity(
    lengths: Lengths, blocks: npt.ArrayLike, block_size: int, kv: KvPromise = "reserve"
) -> npt.NDArray[np.float64]:
    """Requests that may be inside at once.

    The blocks set aside at a time are a compound Poisson sum of mean B E[r] and variance B E[r^2]; the largest B
    with B E[r] + z sqrt(B E[r^2]) <= blocks solves a quadratic in sqrt(B). Under "reserve" a request that does not
    fit just waits, so 99 of 100 moments will do; under "quantile" one is preempted, so it is 999 of 1000.
    """
    if kv == "reserve":
        z, (mean, mean_square) = 2.33, lengths.reserved_blocks(block_size)
    else:
        z, (mean, mean_square) = 3.09, lengths.occupied_blocks(block_size)
    available = np.maximum(np.asarray(blocks, float), 0.0)
    root = (np.sqrt(z * z * mean_square + 4 * mean * available) - z * np.sqrt(mean_square)) / (2 * mean)
    return root * root
