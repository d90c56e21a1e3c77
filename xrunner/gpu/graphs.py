"""Capture a CUDA graph of a step for each of several batch sizes. A replay is one launch instead of hundreds.

A captured step reads its batch at fixed addresses. So a batch is copied there and padded to the next captured size.
Padding in a decode batch is sequences of no request, whose K/V are in a separate block. In other batches it is tokens
of no sequence. Source: vLLM's and nano-vllm's decode graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from xgpt.core.schema import SLICE_TOKENS
from xrunner.attention import AttentionBackend, Batch
from xrunner.attention.base import MOST_PROMPTS
from xrunner.kv_cache import KvCache
from xrunner.models import DecoderModel

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), 320, 384, 448, 512)
"""Batch sizes at which decodes are captured. Up to 64 rows, padding adds at most seven rows. In larger batches, padding
takes little time compared with reading the weights.
"""
MIXED_SIZES = (*range(16, 257, 16), *range(320, SLICE_TOKENS + 1, 64))
"""Numbers of tokens for which steps with prompts are captured. Products process rows in tiles of 64 to 256, so padding
takes little time."""
MOST_SEQUENCES = 256
"""Largest number of sequences in a captured step with prompts. It is also the largest number of tokens whose logits the
step computes.
"""


class Capture(Protocol):
    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Run the step at least once. Return a function that runs it again with the current contents of its inputs."""


class GraphedModel:
    """A model whose steps are captured. It is called like the model. Batches that fit no captured step run without a
    graph.

    Args:
        cache: the K/V cache. Its last block is not in the pool: padding tokens use it.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        backend: AttentionBackend,
        *,
        most_tokens: int,
        capture: Capture | None = None,
        sizes: tuple[int, ...] = SIZES,
        mixed_sizes: tuple[int, ...] = MIXED_SIZES,
    ) -> None:
        self.model = model
        most, most_mixed = sizes[-1], min(mixed_sizes[-1], MOST_SEQUENCES)
        weight = model.token_embedding.weight
        self._logits = torch.empty(
            max(most, most_mixed), model.spec.vocab_size, dtype=weight.dtype, device=weight.device
        )
        width = -(-most_tokens // cache.block_size)
        self._decodes = _Captured(cache, sizes, most, width, is_mixed=False)
        self._mixed = _Captured(cache, mixed_sizes, most_mixed, width, is_mixed=True)
        capture = capture or CudaCapture()

        def run(batch: Batch) -> None:
            self._logits[: len(batch.logit_rows)] = model(batch, cache, backend)

        with torch.inference_mode():
            for steps in (self._mixed, self._decodes):
                steps.capture(capture, run)

    def __call__(self, batch: Batch, cache: KvCache, backend: AttentionBackend) -> Tensor:
        """Return the logits. The next replay overwrites them. # [sampled, vocab]"""
        steps = self._decodes if batch.num_decodes == len(batch.context_len) else self._mixed
        if not steps.has_room(batch):
            return self.model(batch, cache, backend)
        steps.replay(batch)
        logits = self._logits[: len(batch.logit_rows)]
        return logits if batch.added is None else logits + batch.added


def size_of(count: int, sizes: tuple[int, ...]) -> int:
    return sizes[bisect_left(sizes, count)]


class _Captured:
    """Steps captured in several sizes, either of decodes only, or of any sequences (`is_mixed`). All read their batch
    at the same addresses.

    K/V of padding tokens are written to the first slot of the last block.
    """

    def __init__(
        self, cache: KvCache, sizes: tuple[int, ...], sequences: int, num_blocks: int, *, is_mixed: bool
    ) -> None:
        device, tokens = cache.device, sizes[-1]
        block = cache.num_blocks - 1
        self._block, self._slot = block, block * cache.block_size
        self._sizes = sizes
        self._replays: dict[int, Callable[[], None]] = {}
        starts = torch.zeros if is_mixed else torch.arange
        counts = torch.zeros(2, dtype=torch.int32, device=device) if is_mixed else None
        self._batch = Batch(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            cache_slots=torch.full((tokens,), self._slot, dtype=torch.int64, device=device),
            query_start=starts(sequences + 1, dtype=torch.int32, device=device),
            context_len=torch.ones(sequences, dtype=torch.int32, device=device),
            block_tables=torch.full((sequences, num_blocks), block, dtype=torch.int32, device=device),
            logit_rows=starts(sequences, dtype=torch.int64, device=device),
            num_decodes=0 if is_mixed else sequences,
            max_query_len=tokens if is_mixed else 1,
            counts=counts,
        )

    def capture(self, capture: Capture, run: Callable[[Batch], None]) -> None:
        for size in reversed(self._sizes):  # the largest size is captured first, so that the others fit into its memory
            self._replays[size] = capture(partial(run, self._first(size)))

    def replay(self, batch: Batch) -> None:
        size = size_of(len(batch.token_ids), self._sizes)
        self._fill(batch, size)
        self._replays[size]()

    def has_room(self, batch: Batch) -> bool:
        whole = self._batch
        rows, blocks = whole.block_tables.shape
        return (
            len(batch.token_ids) <= len(whole.token_ids)
            and max(len(batch.context_len), len(batch.logit_rows)) <= rows
            and (whole.counts is None or len(batch.context_len) - batch.num_decodes <= MOST_PROMPTS)
            and batch.block_tables.shape[1] <= blocks
        )

    def _first(self, size: int) -> Batch:
        whole = self._batch
        count = min(size, len(whole.context_len))
        return Batch(
            token_ids=whole.token_ids[:size],
            positions=whole.positions[:size],
            cache_slots=whole.cache_slots[:size],
            query_start=whole.query_start[: count + 1],
            context_len=whole.context_len[:count],
            block_tables=whole.block_tables[:count],
            logit_rows=whole.logit_rows[:count],
            num_decodes=min(count, whole.num_decodes),
            max_query_len=min(size, whole.max_query_len),
            counts=whole.counts,
        )

    def _fill(self, batch: Batch, size: int) -> None:
        whole, num_tokens = self._batch, len(batch.token_ids)
        count, width = batch.block_tables.shape
        whole.token_ids[:num_tokens] = batch.token_ids
        whole.positions[:num_tokens] = batch.positions
        whole.cache_slots[:num_tokens] = batch.cache_slots
        whole.context_len[:count] = batch.context_len
        whole.block_tables[:count, :width] = batch.block_tables
        rest = slice(num_tokens, size)
        if num_tokens < size:
            whole.cache_slots[rest] = self._slot
        if whole.counts is not None:  # padding tokens may have any sequence
            whole.counts[0].fill_(batch.num_decodes)
            whole.counts[1].fill_(count)
            whole.query_start[: count + 1] = batch.query_start
            whole.query_start[count + 1 :] = num_tokens
            whole.logit_rows[: len(batch.logit_rows)] = batch.logit_rows
            whole.logit_rows[len(batch.logit_rows) :] = 0
        elif num_tokens < size:
            whole.token_ids[rest] = 0
            whole.positions[rest] = 0
            whole.context_len[rest] = 1
            whole.block_tables[rest, 0] = self._block


class CudaCapture:
    """Captures steps as CUDA graphs that share one memory pool. So only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        with _side_stream():
            run()  # compilation and allocation at the first call must not be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay


@contextmanager
def _side_stream() -> Iterator[None]:
    """Torch requires this before a capture."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
