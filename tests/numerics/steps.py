"""Random batches over a random cache, for attention alone."""

import numpy as np
import torch

from xrunner.attention import Batch


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
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(context_len, lengths, strict=True)])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    fused = torch.randn(len(positions), num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    cache = torch.randn(2, len(order), num_kv_heads, block_size, head_dim, generator=generator)
    batch = Batch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        cache_slots=torch.from_numpy(slots),
        query_start=torch.from_numpy(query_start),
        context_len=torch.from_numpy(context_len),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.from_numpy(query_start[1:].astype(np.int64) - 1),
        num_decodes=len(contexts),
        max_query_len=int(lengths.max()),
    )
    return fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1), cache, batch
