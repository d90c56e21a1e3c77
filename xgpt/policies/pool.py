"""The requests of one engine: who waits, who runs, and how much K/V memory is promised.

Both engines, simulated and real, keep their requests in a `Pool` and change it only through the methods here,
so that a schedule depends on nothing but the order of submissions, steps and endings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from xgpt.policies.request import Request, Step
from xgpt.schema import KvPromise


class Pool:
    """Requests with their state, and K/V memory in blocks.

    Under "reserve" a request enters with the blocks of its prompt and its maximum output set aside (ORCA Algorithm
    1), so an admitted request never waits for memory again. Under "quantile" it enters with the blocks of its prompt
    and takes more as it grows; where they run out, the request that entered last is preempted: it loses its K/V,
    waits in front of all others, and is encoded again with what it had generated.

    Args:
        kv_blocks: blocks that requests share.
        block_size: tokens a block.
        kv: how memory is promised.
        max_running: requests inside at most, under "quantile": as many as fit with the plan's probability.
        hold_finished: finished requests keep their slot until the whole batch has finished (static batching). Such a
            batch is set aside whole, so this goes with "reserve" alone.
    """

    def __init__(
        self,
        kv_blocks: int,
        block_size: int,
        *,
        kv: KvPromise = "reserve",
        max_running: int | None = None,
        hold_finished: bool = False,
    ) -> None:
        assert kv == "reserve" or not hold_finished
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.kv = kv
        self.max_running = max_running
        self.hold_finished = hold_finished
        self.reserved_blocks = 0
        self.num_preemptions = 0
        self.waiting: deque[Request] = deque()
        self.encoding: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self._entered: dict[int, None] = {}
        """Requests inside, in the order in which they entered."""

    @property
    def num_running(self) -> int:
        return len(self._entered)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.encoding or self.decoding)

    def can_ever_fit(self, request: Request) -> bool:
        return self._blocks_for(request.input_length + request.max_output) <= self.kv_blocks

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Move the first waiting request in, or return None where there is none or its K/V does not fit."""
        if not self.waiting or self.num_running == self.max_running:
            return None
        request = self.waiting[0]
        tokens = request.context if self.kv == "quantile" else request.input_length + request.max_output
        blocks = self._blocks_for(tokens)
        if self.reserved_blocks + blocks > self.kv_blocks:
            return None
        self.waiting.popleft()
        request.blocks = blocks
        self.reserved_blocks += blocks
        self.encoding[request.id] = request
        self._entered[request.id] = None
        return request

    def make_room(self) -> tuple[int, ...]:
        """Set aside the block of each decoding request's next token, preempting where blocks run out.

        Returns:
            The requests that lost their K/V; they wait again.
        """
        if self.kv == "reserve":
            return ()
        preempted = []
        for request in [r for r in self.decoding.values() if r.blocks * self.block_size < r.context]:
            while self.reserved_blocks == self.kv_blocks and request.id in self._entered:
                preempted.append(self._preempt_last())
            if request.id in self._entered:
                request.blocks += 1
                self.reserved_blocks += 1
        return tuple(preempted)

    def settle(self, step: Step, finished: Collection[int]) -> list[int]:
        """Account for an executed step; `finished` names the requests that ended in it.

        Returns:
            The requests whose slot and K/V are free again.
        """
        for chunk in step.encode:
            request = self.encoding[chunk.id]
            request.encoded += chunk.length
            if request.encoded == request.context:
                request.generated += 1
                self.decoding[chunk.id] = self.encoding.pop(chunk.id)
        for id_ in step.decode:
            (self.decoding.get(id_) or self.held[id_]).generated += 1
        if not self.hold_finished:
            for id_ in finished:
                self._leave(self.decoding.pop(id_))
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
                self._leave(place.pop(id_))
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
            self._leave(request)
        self.held.clear()
        return freed

    def _preempt_last(self) -> int:
        """The request that entered last loses its K/V and waits in front."""
        id_ = next(reversed(self._entered))
        request = self.encoding.pop(id_) if id_ in self.encoding else self.decoding.pop(id_)
        self._leave(request)
        request.encoded = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        return id_

    def _leave(self, request: Request) -> None:
        self.reserved_blocks -= request.blocks
        request.blocks = 0
        del self._entered[request.id]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
