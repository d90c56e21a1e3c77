"""How many keys attention on this CPU passes at a time, chosen by measuring.

More of them are begun less often, fewer leave room in the caches for what is asked for ahead: with 4 decodes of 1,024
tokens, 14 heads over 2, pieces of 32 take 0.9 of the time of 64 on one processor, and of 16 as long as of 64.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from xgpt.core.schema import DECODES, PROMPTS, ModelSpec
from xrunner.attention.base import Batch, Sequences, make_batch
from xrunner.cpu.attention import PIECE_NAMES, PIECES, NumbaAttention, Vectors, suits_matrices
from xrunner.cpu.packed import TIE
from xrunner.cpu.prompts import Matrices
from xrunner.kv_cache import KvCache

NUM_LAYERS = 4
"""Whose caches are read by turns, as in a model: what one call has read is not in a cache for the next."""
BLOCK_SIZE = 16
SEQUENCES = {PROMPTS: (1, 256, 512), DECODES: (8, 1, 512)}
"""Of each batch that is timed: sequences, tokens of each, and how many of each are in the cache then."""
REPEATS = 8


def fastest_pieces(spec: ModelSpec, kept: torch.dtype) -> dict[str, str]:
    """Return the fastest number of keys, for prompts and for decodes, where another than the usual one is faster.

    Args:
        kept: type of keys and values.
    """
    if spec.latent is not None:
        return {}
    spec = spec.model_copy(update={"num_layers": NUM_LAYERS})
    num_blocks = max(count * -(-held // BLOCK_SIZE) for count, _, held in SEQUENCES.values())
    cache = KvCache(spec, num_blocks, BLOCK_SIZE, kept, torch.device("cpu"))
    for layer in cache.layers:
        layer.fill_(1)
    candidates = PIECES[Matrices if suits_matrices(cache.layers[0]) else Vectors]
    names = {piece: name for name, piece in PIECE_NAMES.items()}
    found = {}
    for name, pieces in candidates.items():
        seconds = _timed(spec, cache, _batch(*SEQUENCES[name], is_decode=name == DECODES), name, pieces)
        best = min(seconds, key=seconds.__getitem__)
        if TIE * seconds[best] < seconds[pieces[0]]:
            found[name] = names[best]
    return found


def _batch(count: int, length: int, held: int, *, is_decode: bool) -> Batch:
    tables = np.arange(count * -(-held // BLOCK_SIZE), dtype=np.int32).reshape(count, -1)
    lengths = np.full(count, length, dtype=np.int32), np.full(count, held, dtype=np.int32)
    return make_batch(
        np.zeros(count * length, dtype=np.int64),
        Sequences(*lengths, tables),
        block_size=BLOCK_SIZE,
        num_decodes=count if is_decode else 0,
    )


def _timed(spec: ModelSpec, cache: KvCache, batch: Batch, name: str, pieces: tuple[int, ...]) -> dict[int, float]:
    """Return the median seconds of a call with each number of keys, by turns."""
    backends = {piece: NumbaAttention({name: piece}) for piece in pieces}
    num_tokens, heads = len(batch.cache_slots), (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = torch.randn(num_tokens, sum(heads), spec.head_dim).split(heads, dim=1)
    seconds: dict[int, list[float]] = {piece: [] for piece in pieces}
    for repeat in range(1 + REPEATS):
        for piece, backend in backends.items():
            for layer in cache.layers:
                started = time.perf_counter()
                backend.forward(q, k, v, layer, batch)
                if repeat:
                    seconds[piece].append(time.perf_counter() - started)
    return {piece: float(np.median(each)) for piece, each in seconds.items()}
