"""Compute what requests keep in an engine's K/V memory, on one device.

An engine divides this memory into pages. A page has the K/V of some tokens in a group of layers, or their states. By
default, layers that keep the same tokens are one group. In vLLM, all groups take pages of one size from one pool
(`EngineSpec.shares_pages`), so models with several kinds of layers keep some padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from math import ceil, floor, log2
from typing import NamedTuple

from xgpt.core.schema import Cache, DType, EngineSpec, ModelSpec, caches_of
from xsimulator.stages import StageShape

COMPRESSED_BLOCK, COMPRESSED_ALIGNMENT = 256, 576
"""Tokens in a page of compressed entries, and the bytes to whose multiples kernels pad such a page (vLLM's
models/deepseek_v4 and kernels of FlashMLA).
"""
MOST_TOKENS = 2**40
LATENT_BLOCK = 64
"""Tokens to whose multiples pages of latent attention are rounded beside states (FlashMLA)."""


class LayerGroup(NamedTuple):
    """Layers that take pages together.

    Attributes:
        window: number of latest tokens that are kept. None means all.
        is_state: whether a request has `copies` pages, whatever its length.
        filled: share of a page that is not padding.
    """

    page_bytes: float
    tokens: int = 1
    window: int | None = None
    is_state: bool = False
    filled: float = 1.0
    copies: int = 1

    @property
    def rate(self) -> float:
        return self.page_bytes / self.tokens

    def pages(self, tokens: float, in_flight: float) -> int:
        """Return the number of pages for which a request needs room.

        Args:
            in_flight: number of tokens in running steps, which are kept beyond the window. The window may begin inside
                a page.
        """
        if self.is_state:
            return self.copies
        if self.window is None:
            return ceil(tokens / self.tokens)
        return ceil(min(self.window - 1 + in_flight, tokens) / self.tokens) + 1


class Kept(NamedTuple):
    groups: tuple[LayerGroup, ...]
    block_size: int

    @classmethod
    def of(
        cls, spec: ModelSpec, dtype: DType, stage: StageShape, end: int, engine: EngineSpec | None, block_size: int
    ) -> Kept:
        """Return what is kept in the layers of a stage."""
        caches = Counter[Cache]()
        is_latent = is_compressed = False
        for kind in spec.kinds:
            if number := kind.count(end - stage.decoder_layers, end):
                compresses = kind.attention is not None and kind.attention.compression > 1
                is_compressed |= compresses
                is_latent |= kind.attention is not None and kind.attention.latent is not None
                found = caches_of(kind, dtype, stage.tp)
                for cache in found if compresses else _merged(found):
                    caches[cache] += number
        if engine is None or not (engine.drops_windows or is_compressed):
            windowless = Counter[Cache]()
            for cache, number in caches.items():
                windowless[cache._replace(window=None)] += number
            caches = windowless
        types = {(cache.window, cache.is_state) for cache in caches}
        if len(types) < 2 or engine is None or not engine.shares_pages:
            groups = _by_type(caches, block_size)
        elif is_compressed:
            groups = _packed(caches)
        else:
            groups = _unified(caches, block_size, LATENT_BLOCK if is_latent else block_size)
        copies = 1 if engine is None else engine.state_copies
        groups = [group._replace(copies=copies) if group.is_state else group for group in groups]
        ordered = sorted(groups, key=lambda group: (group.is_state, group.window or 0))
        return cls(tuple(ordered), block_size)

    def with_draft(self, token_bytes: float, ahead: int) -> Kept:
        """Add a draft's K/V. Where states share pages with attention, its layer joins the group of attention, and the
        groups of states are padded to as many layers. A request keeps one more state for each token drafted `ahead`.
        """
        groups = [each._replace(copies=each.copies + ahead) for each in self.groups]
        first, last = groups[0], groups[-1]
        if not last.is_state or last.page_bytes != first.page_bytes:
            return self._replace(groups=(*groups, LayerGroup(token_bytes * self.block_size, self.block_size)))
        more = 1 + token_bytes / first.rate
        return self._replace(groups=tuple(each._replace(page_bytes=more * each.page_bytes) for each in groups))

    def grows(self, context: float | None) -> float:
        """Return the bytes of each further token of requests with this context. A layer whose window is shorter than
        the context does not count. None means that every layer keeps every token.
        """
        return sum(group.rate for group in self.groups if not group.is_state and not _is_full(group, context))

    def constant(self, context: float | None) -> float:
        """Return the bytes of a request with this context, whatever its length: states, full windows, and half of the
        last page where pages are larger than blocks.
        """
        total = 0.0
        for group in self.groups:
            if group.is_state:
                total += group.copies * group.page_bytes
            elif _is_full(group, context):
                total += (group.window or 0) * group.rate + (group.tokens - 1) * group.rate
            else:
                total += max(group.tokens - self.block_size, 0) / 2 * group.rate
        return total

    def in_flight(self, context: float | None) -> float:
        """Return the bytes of each token of a running step in layers whose window is shorter than the context."""
        return sum(group.rate for group in self.groups if _is_full(group, context))

    def needed(self, tokens: float, in_flight: float) -> float:
        return sum(group.pages(tokens, in_flight) * group.page_bytes for group in self.groups)

    def longest(self, free: float, in_flight: float) -> float:
        most = bisect_right(range(MOST_TOKENS), free, key=lambda tokens: self.needed(tokens, in_flight)) - 1
        return float("inf") if most == MOST_TOKENS - 1 else float(max(most, 0))

    def logged(self, free: float, context: int, in_flight: float, *, by_requests: bool) -> int:
        """Return the K/V tokens that the engine logs for `free` bytes (`EngineSpec.logs_requests`)."""
        page = max(group.page_bytes for group in self.groups)
        blocks = int(free // page)
        if by_requests:
            sizes = (group.filled * group.page_bytes / page for group in self.groups)
            pages = sum(group.pages(context, in_flight) * size for group, size in zip(self.groups, sizes, strict=True))
            return int(blocks * self.groups[0].filled / pages * context)
        return blocks // len(self.groups) * min(group.tokens for group in self.groups if not group.is_state)


def _is_full(group: LayerGroup, context: float | None) -> bool:
    return group.window is not None and context is not None and group.window < context


def _merged(caches: Iterable[Cache]) -> list[Cache]:
    merged: dict[tuple[int | None, bool], float] = {}
    for cache in caches:
        key = cache.window, cache.is_state
        merged[key] = merged.get(key, 0.0) + cache.entry_bytes / cache.tokens
    return [Cache(size, 1, *key) for key, size in merged.items()]


def _by_type(caches: Counter[Cache], block_size: int) -> list[LayerGroup]:
    sizes: dict[tuple[int | None, bool], float] = {}
    for cache, number in caches.items():
        key = cache.window, cache.is_state
        sizes[key] = sizes.get(key, 0.0) + number * cache.entry_bytes / cache.tokens
    tokens = {key: 1 if key[1] else block_size for key in sizes}
    return [LayerGroup(size * tokens[key], tokens[key], *key) for key, size in sizes.items()]


def _unified(caches: Counter[Cache], block_size: int, alignment: int) -> list[LayerGroup]:
    """Return groups with equal numbers of layers and pages of equal size, as vLLM makes them.

    Pages have more tokens in layers with less K/V for each token. Beside states, they have as many as a state needs.
    The number of layers in a group is the smallest number of layers of one kind or, if others have less than half as
    many more, the largest. Source: vLLM's v1/core/kv_cache_utils.py.
    """
    state = max((cache.entry_bytes for cache in caches if cache.is_state), default=0.0)
    widest = max(cache.entry_bytes for cache in caches if not cache.is_state)
    tokens = alignment * ceil(state / (alignment * widest)) if state else block_size
    page = max(state, tokens * widest)
    size, most = min(caches.values()), max(caches.values())
    size = most if most < 1.5 * size else size
    groups = []
    for cache, number in caches.items():
        own = tokens * (int(page // (tokens * cache.entry_bytes)) if not cache.is_state else 1)
        group = LayerGroup(size * page, 1 if cache.is_state else own, cache.window, cache.is_state)
        groups += [group] * ceil(number / size)
    return groups


def _packed(caches: Counter[Cache]) -> list[LayerGroup]:
    """Return the groups of a model with compressed attention, as vLLM makes them. A block has a page for each size of
    compressed entries, for a number of layers. Windows and sums take such blocks, too, whatever they fill.
    """

    def page_of(cache: Cache) -> int:
        entries = COMPRESSED_BLOCK / cache.tokens
        return ceil(entries * cache.entry_bytes / COMPRESSED_ALIGNMENT) * COMPRESSED_ALIGNMENT

    whole = {cache: number for cache, number in caches.items() if cache.window is None}
    pages = [page_of(cache) for cache in whole]
    layers = max(whole.values())
    windows = dict[tuple[int, int], list[float]]()
    for cache, number in caches.items():
        if cache.window is not None:  # the sums of an index are beside those of its attention
            windows.setdefault((cache.window, number), []).append(cache.entry_bytes)
    numbers = [layers, *(number for _, number in windows)]
    size = min(range(layers, max(numbers) + 1), key=lambda each: (sum(-number % each for number in numbers), -each))
    block, largest = float(size * sum(pages)), sorted(pages, reverse=True)
    filled = sum(number * page for number, page in zip(whole.values(), pages, strict=True))
    groups = [LayerGroup(block, COMPRESSED_BLOCK, filled=filled / block)]
    for (window, number), entries in windows.items():
        share = number * sum(largest[: len(entries)]) / block  # an engine logs whole buckets
        tokens = 2 ** floor(log2(largest[0] / max(entries)))
        groups += [LayerGroup(block, tokens, window, filled=share / ceil(number / size))] * ceil(number / size)
    return groups
