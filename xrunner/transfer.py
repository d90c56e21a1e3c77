"""Transfer the result of encoding from the workers of the encode lane to those of the decode lane, through host memory.

The result is K/V in whole blocks, which both lanes store in the same form. For an encoder-decoder, it is the encoder's
output, from which each decode worker computes the keys and values of its layers. Both lanes compute which rank sends
which layers and heads to which rank, so only the contents are sent. Source: ExeGPT sec. 4.1 (WAA).
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xrunner.kv_cache import KvCache
from xrunner.parallel import Part


class Piece(NamedTuple):
    """K/V that one worker sends to another: some heads of some layers, as [first, end) in the model's numbering.

    An encoder's output is sent as a whole.
    """

    sender: int
    receiver: int
    layers: tuple[int, int] = (0, 0)
    heads: tuple[int, int] = (0, 0)


class Moving(NamedTuple):
    id: int
    blocks: list[int]
    num_tokens: int


class Cargo(Protocol):
    def read(self, piece: Piece, requests: Sequence[Moving]) -> Tensor:
        """Return a copy of a piece in host memory, to be sent."""

    def write(self, piece: Piece, requests: Sequence[Moving], received: Tensor) -> None:
        """Store a received piece. The worker may execute steps meanwhile."""

    def take_in(self, count: int) -> None:
        """Between two steps, give the worker the contents of the first `count` transfers."""

    def empty(self, piece: Piece, requests: Sequence[Moving]) -> Tensor:
        """Return host memory in which to receive a piece for `write`."""


def pieces(senders: dict[int, Part], receivers: dict[int, Part]) -> list[Piece]:
    """Return the pieces of K/V to send. Each receiver gets each K/V head of its layers only once. If several ranks have
    the same head, the receivers are divided among these ranks.
    """
    found = []
    for receiver, there in receivers.items():
        by_layers: dict[tuple[int, int], list[int]] = {}
        for sender, here in senders.items():
            layers = max(here.layers[0], there.layers[0]), min(here.layers[1], there.layers[1])
            if layers[0] < layers[1]:
                by_layers.setdefault(layers, []).append(sender)
        for layers, holders in by_layers.items():
            run: Piece | None = None
            for head in range(there.cached_heads.start, there.cached_heads.stop):
                having = [s for s in holders if senders[s].cached_heads.start <= head < senders[s].cached_heads.stop]
                sender = having[there.rank % len(having)]
                if run is not None and run.sender == sender:
                    run = run._replace(heads=(run.heads[0], head + 1))
                else:
                    found += [] if run is None else [run]
                    run = Piece(sender, receiver, layers, (head, head + 1))
            found += [] if run is None else [run]
    return found


def encoder_output_pieces(senders: dict[int, Part], receivers: dict[int, Part]) -> list[Piece]:
    """Return one piece for each decode worker: the whole encoder output, sent by one of the last encode stage's ranks.
    All these ranks have the output, so the decode workers are divided among them.
    """
    having = [sender for sender, part in senders.items() if part.is_last]
    return [Piece(having[part.rank % len(having)], receiver) for receiver, part in receivers.items()]


class EncoderOutputs:
    """The encoder outputs that a worker sends or receives, by request. # each [prompt tokens, hidden]

    Received outputs are stored only when the worker executes the transfer's command, after all earlier steps in the
    queue. If a request was preempted, the worker then first releases it and adopts it again.
    """

    def __init__(self, encoder_outputs: dict[int, Tensor], hidden_size: int, dtype: torch.dtype) -> None:
        self._encoder_outputs = encoder_outputs
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._received: SimpleQueue[dict[int, Tensor]] = SimpleQueue()
        self._num_taken_in = 0

    def read(self, piece: Piece, requests: Sequence[Moving]) -> Tensor:
        return torch.cat([self._encoder_outputs[request.id] for request in requests]).cpu()

    def write(self, piece: Piece, requests: Sequence[Moving], received: Tensor) -> None:
        of_each = received.split([request.num_tokens for request in requests])
        self._received.put({request.id: outputs for request, outputs in zip(requests, of_each, strict=True)})

    def take_in(self, count: int) -> None:
        while self._num_taken_in < count and not self._received.empty():  # each transfer has one piece
            self._encoder_outputs |= self._received.get()
            self._num_taken_in += 1

    def empty(self, piece: Piece, requests: Sequence[Moving]) -> Tensor:
        return torch.empty(sum(request.num_tokens for request in requests), self._hidden_size, dtype=self._dtype)


class CachePart:
    """A worker's K/V cache, addressed by the model's numbering of layers and heads."""

    def __init__(self, cache: KvCache, part: Part) -> None:
        self._cache = cache
        self._part = part

    def read(self, piece: Piece, requests: Sequence[Moving]) -> Tensor:
        heads = self._heads(piece)
        index = self._index(requests)
        layers = [layer[:, index, heads] for layer in self._layers(piece)]
        return torch.stack(layers).cpu()

    def write(self, piece: Piece, requests: Sequence[Moving], received: Tensor) -> None:
        heads = self._heads(piece)
        index = self._index(requests)
        for layer, contents in zip(self._layers(piece), received, strict=True):
            layer[:, index, heads] = contents.to(layer.device)

    def take_in(self, count: int) -> None:
        """Do nothing: `write` has filled the blocks, and no step reads them before the transfer has ended."""

    def empty(self, piece: Piece, requests: Sequence[Moving]) -> Tensor:
        num_blocks = sum(len(request.blocks) for request in requests)
        halves, _, _, block_size, head_dim = self._cache.layers[0].shape
        num_layers, num_heads = piece.layers[1] - piece.layers[0], piece.heads[1] - piece.heads[0]
        shape = (num_layers, halves, num_blocks, num_heads, block_size, head_dim)
        return torch.empty(shape, dtype=self._cache.layers[0].dtype)

    def _layers(self, piece: Piece) -> list[Tensor]:
        first = self._part.layers[0]
        return self._cache.layers[piece.layers[0] - first : piece.layers[1] - first]

    def _heads(self, piece: Piece) -> slice:
        first = self._part.cached_heads.start
        return slice(piece.heads[0] - first, piece.heads[1] - first)

    def _index(self, requests: Sequence[Moving]) -> Tensor:
        blocks = [block for request in requests for block in request.blocks]
        return torch.tensor(blocks, dtype=torch.int64, device=self._cache.layers[0].device)
