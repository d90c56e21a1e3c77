"""The requests of one engine: who waits, who runs, and how much K/V memory is promised.

Both engines, simulated and real, keep their requests in a `Pool` and change it only through the methods here,
so that a schedule depends on nothing but the order of submissions, steps and endings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Request:
    """What the rule may see of a request: its maximum, never its true output length."""

    id: int
    input_length: int
    max_output: int
    arrival_ns: int = 0
    encoded: int = 0
    """Prompt tokens whose K/V exists."""
    generated: int = 0
    """Output tokens computed; the step that ends the prompt computes the first."""

    @property
    def context(self) -> int:
        """Tokens that the next decode step attends to, its own included."""
        return self.input_length + self.generated


class Chunk(NamedTuple):
    """Prompt tokens [start, start + length) of a request."""

    id: int
    start: int
    length: int


class Step(NamedTuple):
    """One iteration: the prompt pieces to encode and the requests to decode by one token."""

    encode: tuple[Chunk, ...]
    decode: tuple[int, ...]


class Pool:
    """Requests with their state, and K/V memory in blocks under the "reserve" rule.

    A request enters with the blocks of its prompt and its maximum output reserved (ORCA Algorithm 1), so an
    admitted request never waits for memory again.

    Args:
        kv_blocks: blocks that requests share.
        block_size: tokens a block.
        hold_finished: finished requests keep their slot until the whole batch has finished (static batching).
    """

    def __init__(self, kv_blocks: int, block_size: int, *, hold_finished: bool = False) -> None:
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.hold_finished = hold_finished
        self.reserved_blocks = 0
        self.waiting: deque[Request] = deque()
        self.encoding: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.held: dict[int, Request] = {}

    @property
    def num_running(self) -> int:
        return len(self.encoding) + len(self.decoding) + len(self.held)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.encoding or self.decoding)

    def blocks_of(self, request: Request) -> int:
        """Blocks that the request may come to need."""
        return -(-(request.input_length + request.max_output) // self.block_size)

    def can_ever_fit(self, request: Request) -> bool:
        return self.blocks_of(request) <= self.kv_blocks

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Move the first waiting request in, or return None where there is none or its K/V does not fit."""
        if not self.waiting:
            return None
        blocks = self.blocks_of(self.waiting[0])
        if self.reserved_blocks + blocks > self.kv_blocks:
            return None
        request = self.waiting.popleft()
        self.reserved_blocks += blocks
        self.encoding[request.id] = request
        return request

    def settle(self, step: Step, finished: Collection[int]) -> list[int]:
        """Account for an executed step; `finished` names the requests that ended in it.

        Returns:
            The requests whose slot and K/V are free again.
        """
        for chunk in step.encode:
            request = self.encoding[chunk.id]
            request.encoded += chunk.length
            if request.encoded == request.input_length:
                request.generated = 1
                self.decoding[chunk.id] = self.encoding.pop(chunk.id)
        for id_ in step.decode:
            (self.decoding.get(id_) or self.held[id_]).generated += 1
        if not self.hold_finished:
            for id_ in finished:
                self._release(self.decoding.pop(id_))
            return list(finished)
        for id_ in finished:
            self.held[id_] = self.decoding.pop(id_)
        return self._end_batch()

    def cancel(self, id_: int) -> list[int]:
        """Take a request out that waits or runs; one that has finished, or is not known, is ignored.

        Must not be called while a step that holds the request is being executed.

        Returns:
            The requests whose slot and K/V are free again: its own, and those that it held back.
        """
        for place in (self.encoding, self.decoding):
            if id_ in place:
                self._release(place.pop(id_))
                return [id_, *self._end_batch()]
        for request in self.waiting:
            if request.id == id_:
                self.waiting.remove(request)
                return [id_]
        return []

    def _end_batch(self) -> list[int]:
        """Free held requests once nobody of their batch runs any more."""
        if self.decoding or self.encoding:
            return []
        freed = list(self.held)
        for request in self.held.values():
            self._release(request)
        self.held.clear()
        return freed

    def _release(self, request: Request) -> None:
        self.reserved_blocks -= self.blocks_of(request)
