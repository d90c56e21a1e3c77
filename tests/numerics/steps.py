"""Random batches over a random cache, for attention alone."""

import numpy as np
import torch

from xgpt.core.policies import Blocks, BlockTable
from xgpt.core.schema import SCALE_BYTES
from xrunner.attention import PositionBias, Sequences, make_batch
from xrunner.eight_bits import quantise
from xrunner.kv_cache import numbers_of


def random_batch(contexts, chunks, heads, block_size, rng):
    """Decodes of these contexts, then chunks (start, length), over blocks in random order.

    Returns q, k and v as slices of one fused projection, the cache of one layer, and the batch.
    """
    num_heads, num_kv_heads, head_dim = heads
    lengths = np.array([1] * len(contexts) + [n for _, n in chunks], dtype=np.int32)
    context_len = np.array([*contexts, *(start + n for start, n in chunks)], dtype=np.int32)
    num_blocks = -(-context_len // block_size)
    order = rng.permutation(num_blocks.sum() + 3).astype(np.int32)
    tables = np.zeros((len(lengths), num_blocks.max()), dtype=np.int32)
    for i, end in enumerate(np.cumsum(num_blocks)):
        tables[i, : num_blocks[i]] = order[end - num_blocks[i] : end]
    num_tokens = int(lengths.sum())
    batch = make_batch(
        np.zeros(num_tokens, dtype=np.int64),
        Sequences(lengths, context_len, tables),
        block_size=block_size,
        num_decodes=len(contexts),
    )
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    cache = torch.randn(2, len(order), num_kv_heads, block_size, head_dim, generator=generator)
    return fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1), cache, batch


def kept_in(cache, dtype):
    """A layer's keys and values in fewer bits; those without a scale yet get one that is none."""
    if dtype != torch.int8:
        return cache.to(dtype)
    numbers, scales = quantise(cache.flatten(0, 3))
    kept = torch.empty(*cache.shape[:-1], cache.shape[-1] + SCALE_BYTES, dtype=torch.int8)
    for place, values in zip(numbers_of(kept), (numbers, scales), strict=True):
        place.copy_(values.view(place.shape))
    return kept


def random_bias(batch, num_heads, rng):
    """A random bias for every distance within a batch."""
    longest = int(batch.context_len.max())
    values = torch.from_numpy(rng.normal(size=(num_heads, 2 * longest - 1)).astype(np.float32))
    return PositionBias(values, longest - 1)


def start(worker, generations):
    """Start requests on workers with all the blocks that they may come to need."""
    cache = worker.cache
    blocks = Blocks(cache.num_blocks)
    for generation in generations:
        table = BlockTable(())
        for _ in range(-(-(len(generation.prompt) + generation.max_output) // cache.block_size)):
            blocks.grow(table)
        worker.start(generation, table)


def run_again(run):
    """In place of a CUDA graph: a replay runs the step again, on whatever lies in its inputs by then."""
    run()
    return run
