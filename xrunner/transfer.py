"""Keys and values from the encode to the decode lane: out of one cache, through host memory, into another.

Each side works out alike which rank sends which layers and heads to whom, so that nothing but the contents travels.
Whole blocks are sent: they are laid out alike on both sides. Source: ExeGPT sec. 4.1 (WAA).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.kv_cache import KvCache
from xrunner.parallel import Part


class Piece(NamedTuple):
    """What one worker sends another: these layers of these heads, [first, last) both, as the model numbers them."""

    sender: int
    receiver: int
    layers: tuple[int, int]
    heads: tuple[int, int]


def pieces(senders: dict[int, Part], receivers: dict[int, Part]) -> list[Piece]:
    """All that must travel, once; where several have a head, receivers spread over them."""
    found = []
    for receiver, there in receivers.items():
        by_layers: dict[tuple[int, int], list[int]] = {}
        for sender, here in senders.items():
            layers = max(here.layers[0], there.layers[0]), min(here.layers[1], there.layers[1])
            if layers[0] < layers[1]:
                by_layers.setdefault(layers, []).append(sender)
        for layers, holders in by_layers.items():
            run: Piece | None = None
            for head in range(there.kv_heads.start, there.kv_heads.stop):
                having = [s for s in holders if senders[s].kv_heads.start <= head < senders[s].kv_heads.stop]
                sender = having[there.rank % len(having)]
                if run is not None and run.sender == sender:
                    run = run._replace(heads=(run.heads[0], head + 1))
                else:
                    found += [] if run is None else [run]
                    run = Piece(sender, receiver, layers, (head, head + 1))
            found += [] if run is None else [run]
    return found


class CachePart:
    """A worker's cache, addressed by the model's own numbers of layers and heads."""

    def __init__(self, cache: KvCache, part: Part) -> None:
        self._cache = cache
        self._part = part

    def read(self, piece: Piece, blocks: Sequence[int]) -> Tensor:
        """Copy blocks out, to host memory. # [layers, 2, blocks, heads, block_size, head_dim]"""
        heads = self._heads(piece)
        index = self._index(blocks)
        layers = [layer[:, index, heads] for layer in self._layers(piece)]
        return torch.stack(layers).cpu()

    def write(self, piece: Piece, blocks: Sequence[int], received: Tensor) -> None:
        """Copy blocks in, from host memory."""
        heads = self._heads(piece)
        index = self._index(blocks)
        for layer, contents in zip(self._layers(piece), received, strict=True):
            layer[:, index, heads] = contents.to(layer.device)

    def empty(self, piece: Piece, num_blocks: int) -> Tensor:
        """Host memory for what `write` takes."""
        _, _, _, block_size, head_dim = self._cache.layers[0].shape
        num_layers, num_heads = piece.layers[1] - piece.layers[0], piece.heads[1] - piece.heads[0]
        shape = (num_layers, 2, num_blocks, num_heads, block_size, head_dim)
        return torch.empty(shape, dtype=self._cache.layers[0].dtype)

    def _layers(self, piece: Piece) -> list[Tensor]:
        first = self._part.layers[0]
        return self._cache.layers[piece.layers[0] - first : piece.layers[1] - first]

    def _heads(self, piece: Piece) -> slice:
        first = self._part.kv_heads.start
        return slice(piece.heads[0] - first, piece.heads[1] - first)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._cache.layers[0].device)
