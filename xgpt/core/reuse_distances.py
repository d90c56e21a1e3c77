"""Compute the share of a trace's prompt tokens that caches of any size would hold, from reuse distances of blocks.

In an LRU cache, a request finds a block of an earlier request unless the blocks used in between fill the cache. A
block's reuse distance is the number of distinct blocks used in between. It equals a number of inversions, so one pass
computes all distances. Source: Mattson et al., Evaluation techniques for storage hierarchies, 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xgpt.core.workload import TraceLengths

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class ReuseCurve:
    """The number of cached tokens of each prompt, as a function of the cache's size.

    A request finds only a prefix of its blocks.

    Args:
        inside: number of requests that run when a request enters. Their outputs are not cached yet.
    """

    def __init__(self, trace: TraceLengths, block_size: int, inside: float = 0.0) -> None:
        prefixes = trace.prefixes
        assert prefixes is not None
        self.inputs: Ints = trace.input
        self._block_size = block_size
        self._size = prefixes.block_size
        counts = _whole_outputs(trace, self._size, block_size)
        request, distance = _distances(
            [prompt[: length // self._size] for prompt, length in zip(prefixes.prompts, trace.input, strict=True)],
            [
                ids[:count] if ids else (None,) * count
                for ids, count in zip(prefixes.outputs, counts.tolist(), strict=True)
            ],
            inside,
        )
        self._request, self._needed = request, _worst_so_far(request, distance)

    def cached(self, tokens: float) -> Ints:
        """Return how many of its prompt tokens each request finds in a cache of `tokens` tokens. # [requests]"""
        found = np.bincount(self._request[self._needed * self._size < tokens], minlength=len(self.inputs))
        most = (self.inputs - 1) // self._block_size * self._block_size  # the last token is always computed
        return np.minimum(found * self._size // self._block_size * self._block_size, most)

    def share(self, tokens: float, begin: int = 0) -> float:
        """Return the share of prompt tokens found in a cache of `tokens` tokens, over requests from `begin` on."""
        return float(self.cached(tokens)[begin:].sum() / self.inputs[begin:].sum())

    @property
    def most(self) -> float:
        return self.share(np.inf)

    def distances(self, quantiles: Sequence[float]) -> list[tuple[float, float]]:
        needed = self._needed[np.isfinite(self._needed)]
        return [(q, float(np.quantile(needed, q) * self._size)) for q in quantiles if len(needed)]

    def sizes(self, count: int) -> Array:
        """Return at most `count` cache sizes, in tokens. From each to the next the share grows about equally, up to its
        largest value.
        """
        needed = np.sort(self._needed[np.isfinite(self._needed)])
        if not len(needed):
            return np.zeros(1)
        places = np.linspace(0, len(needed) - 1, count).astype(int)
        return np.unique((needed[places] + 1) * self._size)


def _whole_outputs(trace: TraceLengths, size: int, block_size: int) -> Ints:
    """Return for each request how many blocks of `size` tokens after its prompt's full blocks are cached when it ends.

    The cache has K/V blocks of `block_size` tokens. If these are smaller than `size`, the count is rounded.
    """
    kept = (trace.input + trace.output - 1) // block_size * block_size - trace.input // size * size
    return np.maximum(0, (kept + (size - 1) // 2) // size)


def _distances(
    prompts: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int | None, ...]], inside: float = 0.0
) -> tuple[Ints, Array]:
    """Return for each block of a prompt the number of its request, and its reuse distance: the number of other blocks
    used since its last use. The distance is infinite for the first use.

    A request uses all its blocks when it ends, from the last block of its sequence to the first. When a request begins,
    the outputs of the `inside` requests before it are not cached yet. Blocks without an id are used only once, and
    occupy memory until they are evicted.
    """
    used = [id_ for prompt, output in zip(prompts, outputs, strict=True) for id_ in (prompt + output)[::-1]]
    ids = np.fromiter((0 if id_ is None else id_ for id_ in used), dtype=np.int64, count=len(used))
    known = np.flatnonzero(np.fromiter((id_ is not None for id_ in used), dtype=bool, count=len(used)))
    of_prompt = np.asarray([len(prompt) for prompt in prompts])
    of_output = np.asarray([len(output) for output in outputs])
    counts = of_prompt + of_output
    request = np.repeat(np.arange(len(prompts)), counts)
    begin = np.repeat(np.cumsum(counts) - counts, counts)
    previous = np.full(len(ids), -1, dtype=np.int64)
    order = known[np.argsort(ids[known], kind="stable")]
    same = ids[order[1:]] == ids[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    distance = (begin - previous - 1 - _greater_before(previous)).astype(float)
    distance[previous < 0] = np.inf
    is_prompt = np.arange(len(ids)) - begin >= of_output[request]
    is_answer = (previous >= 0) & ~is_prompt[previous]
    distance[is_answer & (request - request[previous] <= inside)] = np.inf
    # Restore the order of blocks in their sequences.
    turned = np.lexsort((-np.flatnonzero(is_prompt), request[is_prompt]))
    return request[is_prompt][turned], distance[is_prompt][turned]


def _greater_before(values: Ints) -> Ints:
    """Return for each value how many earlier values are greater. # [n]"""
    count = 1 << max(1, (len(values) - 1).bit_length())
    padded = np.full(count, -1, dtype=np.int64)
    padded[: len(values)] = values
    greater = np.zeros(count, dtype=np.int64)
    width = 1
    while width < count:
        pairs = padded.reshape(-1, 2, width)
        offset = np.arange(len(pairs))[:, None] * (count + 2)
        left = (np.sort(pairs[:, 0], axis=1) + offset).ravel()
        right = pairs[:, 1] + offset
        below = np.searchsorted(left, right.ravel(), side="right").reshape(right.shape)
        greater.reshape(-1, 2, width)[:, 1] += (np.arange(len(pairs)) + 1)[:, None] * width - below
        width *= 2
    return greater[: len(values)]


def _worst_so_far(request: Ints, distance: Array) -> Array:
    """Return for each block the greatest distance among this block and its request's earlier blocks. A block is found
    only if all blocks before it are found.
    """
    if not len(distance):
        return distance
    # With an offset added for each request, one running maximum gives the result for all requests.
    ranks = np.unique(distance, return_inverse=True)
    span = len(ranks[0]) + 1
    highest = np.maximum.accumulate(ranks[1] + request * span)
    return np.asarray(ranks[0][highest - request * span], dtype=float)
