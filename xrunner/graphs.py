"""Capture decode steps as CUDA graphs, one for each size of batch: a replay is one launch instead of hundreds.

A captured step reads its batch from memory that never moves. A batch is copied there and filled up to the next size
with rows that belong to no request, in a K/V block of their own. Source: vLLM's and nano-vllm's decode graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from xrunner.attention import AttentionBackend, Batch
from xrunner.kv_cache import KvCache
from xrunner.models import DecoderModel

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), 320, 384, 448, 512)
"""Batches that are captured: filling up costs at most seven rows to 64; beyond, little compared with the weights."""


class Capture(Protocol):
    """How a step is captured: on a GPU as a graph."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it for the first time; returns what runs it again on whatever lies in its inputs by then."""


class GraphedModel:
    """A model whose decode steps are captured, called like the model.

    Args:
        cache: its last block is for rows of no request, so it needs one more than the pool knows of.
        most_tokens: of a sequence: block tables are as wide as this needs.
        sizes: rising.
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
    ) -> None:
        self.model = model
        self.sizes = sizes
        self._inputs = _Inputs(cache, sizes[-1], -(-most_tokens // cache.block_size))
        self._replays: dict[int, Callable[[], None]] = {}
        weight = model.token_embedding.weight
        self._logits = torch.empty(sizes[-1], model.spec.vocab_size, dtype=weight.dtype, device=weight.device)
        """Of the last replay: shared by all sizes."""
        capture = capture or CudaCapture()
        with torch.inference_mode():
            for size in reversed(sizes):  # the largest first: the others find room in its memory
                batch = self._inputs.first(size)

                def run(batch: Batch = batch, size: int = size) -> None:
                    self._logits[:size] = model(batch, cache, backend)

                self._replays[size] = capture(run)

    def __call__(self, batch: Batch, cache: KvCache, backend: AttentionBackend) -> Tensor:
        """Logits; those of a replay are overwritten by the next. # [sampled, vocab]"""
        count = len(batch.context_len)
        if batch.num_decodes < count or not self._inputs.has_room(batch):
            return self.model(batch, cache, backend)
        size = size_of(count, self.sizes)
        self._inputs.fill(batch, size)
        self._replays[size]()
        logits = self._logits[:count]
        return logits if batch.added is None else logits + batch.added


def size_of(count: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest size that holds `count` rows; one must."""
    return sizes[bisect_left(sizes, count)]


class _Inputs:
    """A batch of decodes at fixed addresses; rows of no request decode a first token in the last block."""

    def __init__(self, cache: KvCache, most: int, num_blocks: int) -> None:
        device = cache.device
        block = cache.num_blocks - 1
        self._block, self._slot = block, block * cache.block_size
        self._batch = Batch(
            token_ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            cache_slots=torch.full((most,), self._slot, dtype=torch.int64, device=device),
            query_start=torch.arange(most + 1, dtype=torch.int32, device=device),
            context_len=torch.ones(most, dtype=torch.int32, device=device),
            block_tables=torch.full((most, num_blocks), block, dtype=torch.int32, device=device),
            logit_rows=torch.arange(most, dtype=torch.int64, device=device),
            num_decodes=most,
            max_query_len=1,
        )

    def has_room(self, batch: Batch) -> bool:
        """Whether a batch of decodes fits."""
        rows, blocks = self._batch.block_tables.shape
        return len(batch.context_len) <= rows and batch.block_tables.shape[1] <= blocks

    def first(self, size: int) -> Batch:
        """Return the first rows, as a batch."""
        whole = self._batch
        return Batch(
            token_ids=whole.token_ids[:size],
            positions=whole.positions[:size],
            cache_slots=whole.cache_slots[:size],
            query_start=whole.query_start[: size + 1],
            context_len=whole.context_len[:size],
            block_tables=whole.block_tables[:size],
            logit_rows=whole.logit_rows[:size],
            num_decodes=size,
            max_query_len=1,
        )

    def fill(self, batch: Batch, size: int) -> None:
        """Copy a batch to the first rows; the rest up to `size` belong to no request."""
        whole, count, width = self._batch, len(batch.context_len), batch.block_tables.shape[1]
        whole.token_ids[:count] = batch.token_ids
        whole.positions[:count] = batch.positions
        whole.cache_slots[:count] = batch.cache_slots
        whole.context_len[:count] = batch.context_len
        whole.block_tables[:count, :width] = batch.block_tables
        if count < size:
            rest = slice(count, size)
            whole.token_ids[rest] = 0
            whole.positions[rest] = 0
            whole.cache_slots[rest] = self._slot
            whole.context_len[rest] = 1
            whole.block_tables[rest, 0] = self._block


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with _side_stream():
            run()  # what is compiled or allocated at the first call must not be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay


@contextmanager
def _side_stream() -> Iterator[None]:
    """Enter a second stream, for which the current one waits at the end: torch requires it before a capture."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
