"""Time one layer's attention on this machine's CPU with every backend and with torch's fused kernel, for several
shapes.

    python -m benchmarks.attention [--threads N] [--json results/attention.json]

Each variant uses several layers' K/V caches in turn, as a model does, so that a small K/V cache does not stay in the
processor's caches. The table shows the median in milliseconds, and for the fastest variant the GB/s of K/V (decode) or
the GFLOP/s (prompts).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.attention import Batch, Sequences, make_batch
from xrunner.attention.reference import ReferenceAttention, causal_mask, gather_kv
from xrunner.build import BACKENDS, usable_backends
from xrunner.kv_cache import write_kv

BLOCK_SIZE = 16
HEAD_DIM = 64
NUM_LAYERS = 4


class Shape(NamedTuple):
    """Decodes whose contexts vary about a mean, or prompts in chunks of `length` tokens after `start` tokens."""

    name: str
    num_heads: int
    num_kv_heads: int
    num_decodes: int = 0
    mean_context: int = 0
    num_chunks: int = 0
    start: int = 0
    length: int = 0

    def contexts(self, rng: np.random.Generator) -> np.ndarray:
        spread = rng.normal(self.mean_context, self.mean_context / 3, self.num_decodes)
        decodes = np.clip(spread, 1, 2 * self.mean_context)
        return np.array([*decodes, *[self.start + self.length] * self.num_chunks], dtype=np.int32)


SHAPES = [
    Shape("decode 1 x 300", 12, 12, num_decodes=1, mean_context=300),
    Shape("decode 32 x 300", 12, 12, num_decodes=32, mean_context=300),
    Shape("decode 32 x 300, 3 K/V heads", 12, 3, num_decodes=32, mean_context=300),
    Shape("decode 8 x 1500", 12, 12, num_decodes=8, mean_context=1500),
    Shape("prompts 8 x 32", 12, 12, num_chunks=8, length=32),
    Shape("prompts 4 x 256", 12, 12, num_chunks=4, length=256),
    Shape("prompts 1 x 1024", 12, 12, num_chunks=1, length=1024),
    Shape("prompts 4 x 256, 3 K/V heads", 12, 3, num_chunks=4, length=256),
    Shape("chunk of 128 after 512", 12, 12, num_chunks=1, start=512, length=128),
    Shape("chunk of 64 after 192", 12, 12, num_chunks=1, start=192, length=64),
    Shape("chunk of 16 after 192", 12, 12, num_chunks=1, start=192, length=16),
    Shape("16 x 300 and prompt 256", 12, 12, num_decodes=16, mean_context=300, num_chunks=1, length=256),
]


def fused(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the causal attention of a sequence's last tokens. # q [n, heads, dim], keys [context, kv_heads, dim] ->
    like q"""
    whole = q.shape[0] == keys.shape[0]
    mask = None if whole else ~causal_mask(q.shape[0], keys.shape[0], q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=whole,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


class FusedAttention(ReferenceAttention):
    """The variant for comparison: torch's fused kernel for every sequence, over keys and values gathered from
    blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, **_: object) -> Tensor:
        write_kv(k, v, cache, batch.cache_slots)
        out = torch.empty(q.shape)
        starts = batch.query_start.tolist()
        for i, context in enumerate(batch.context_len.tolist()):
            rows = slice(starts[i], starts[i + 1])
            out[rows] = fused(q[rows], *gather_kv(cache, batch.block_tables[i], context))
        return out.flatten(1)


HERE = usable_backends(torch.device("cpu"), torch.float32)
VARIANTS = {name: BACKENDS[name] for name in HERE} | {"fused": FusedAttention}


def inputs(shape: Shape) -> tuple[list[Tensor], list[Tensor], Batch]:
    """Return q, k and v of a step, the caches of the layers, and the batch."""
    rng = np.random.default_rng(0)
    context_len = shape.contexts(rng)
    query_len = np.array([1] * shape.num_decodes + [shape.length] * shape.num_chunks, dtype=np.int32)
    width = -(-int(context_len.max()) // BLOCK_SIZE)
    tables = rng.permutation(len(context_len) * width).reshape(-1, width).astype(np.int32)
    num_tokens = int(query_len.sum())
    batch = make_batch(
        np.zeros(num_tokens, dtype=np.int64),
        Sequences(query_len, context_len, tables),
        block_size=BLOCK_SIZE,
        num_decodes=shape.num_decodes,
    )
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    qkv = torch.randn(num_tokens, sum(heads), HEAD_DIM).split(heads, dim=1)
    cache_shape = (2, tables.size, shape.num_kv_heads, BLOCK_SIZE, HEAD_DIM)
    return list(qkv), [torch.randn(cache_shape) for _ in range(NUM_LAYERS)], batch


def median_s(run: Callable[[Tensor], Tensor], caches: list[Tensor], budget_s: float) -> float:
    """Return the median seconds of a layer, over as many rounds as the budget allows (at least three)."""
    for cache in caches:
        run(cache)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 * len(caches) or time.perf_counter() < end:
        for cache in caches:
            start = time.perf_counter()
            run(cache)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def work(shape: Shape) -> tuple[float, str]:
    """Return the amount of K/V that the shape reads, or of FLOPs that it computes, with the unit."""
    if not shape.num_chunks:
        contexts = shape.contexts(np.random.default_rng(0))
        return float(contexts.sum()) * 2 * shape.num_kv_heads * HEAD_DIM * 4 / 1e9, "GB/s"
    pairs = shape.num_chunks * shape.length * (shape.start + shape.length / 2)
    return 4 * pairs * shape.num_heads * HEAD_DIM / 1e9, "GFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each shape and variant")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    rows = []
    print(f"{'shape':30}" + "".join(f"{name:>12}" for name in VARIANTS) + "   ms a layer")
    for shape in SHAPES:
        (q, k, v), caches, batch = inputs(shape)
        times: dict[str, float] = {}
        with torch.inference_mode():
            for name, variant in VARIANTS.items():
                run = partial(variant().forward, q, k, v, batch=batch)
                times[name] = median_s(run, caches, options.budget)
        amount, unit = work(shape)
        best = min(times, key=times.__getitem__)
        print(
            f"{shape.name:30}"
            + "".join(f"{seconds * 1e3:12.3f}" for seconds in times.values())
            + f"   {best}: {amount / times[best]:.1f} {unit}"
        )
        rows.append({"shape": shape._asdict(), "seconds": times, "best": best})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"threads": options.threads, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
