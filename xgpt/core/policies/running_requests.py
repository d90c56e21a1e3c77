"""Manage running requests, their micro-batches, their K/V blocks, and the running steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xgpt.core.policies.admission import Queue
from xgpt.core.policies.kv_memory import KvMemory
from xgpt.core.policies.request import MicroBatch, Request, Step


class StepsUnderWay:
    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.leaving: set[int] = set()
        """Ids of the requests that were cancelled while a step with them ran. They leave once no running step includes
        them.
        """

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> Step:
        return self._steps[-1]

    def begin(self, step: Step) -> None:
        self._steps.append(step)

    def end(self, step: Step) -> None:
        self._steps.remove(step)

    def touches(self, id_: int) -> bool:
        return any(id_ in step.ids for step in self._steps)

    def untouched(self, ids: Iterable[int]) -> list[int]:
        touched = {id_ for step in self._steps for id_ in step.ids}
        return [id_ for id_ in ids if id_ not in touched]

    def take_leaving(self, step: Step) -> list[int]:
        if not self.leaving:
            return []
        gone = [id_ for id_ in step.ids if id_ in self.leaving and not self.touches(id_)]
        self.leaving.difference_update(gone)
        return gone


class Running:
    """Running requests in their micro-batches.

    With each step, requests get more tokens and need more blocks. When no block is available, some requests are
    preempted and wait again.

    Attributes:
        runs_ahead: whether a step is scheduled while the previous one runs, so that requests are assumed to continue up
            to their maximum output.
    """

    def __init__(self, memory: KvMemory, waiting: Queue) -> None:
        self.memory = memory
        self.waiting = waiting
        self.encode_emits = True
        self.runs_ahead = False
        self.num_preemptions = self.num_scored = 0
        self.running: dict[int, Request] = {}
        self.batches: list[MicroBatch] = []
        self.under_way = StepsUnderWay()
        self._overdrawn: set[int] = set()
        self._promises_whole = memory.kv == "reserve"
        self._preempted: list[int] = []
        self._grown: dict[int, list[int]] = {}

    def add_batches(self, count: int, *, decodes: bool = True) -> tuple[MicroBatch, ...]:
        added = tuple(MicroBatch(decodes=decodes) for _ in range(count))
        self.batches.extend(added)
        return added

    def in_turn(self, first: MicroBatch) -> list[MicroBatch]:
        number = self.batches.index(first)
        return self.batches[number:] + self.batches[:number]

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def now_ns(self) -> int:
        return self.waiting.now_ns

    @property
    def encoding(self) -> Iterator[int]:
        return (id_ for batch in self.batches for id_ in batch.encoding)

    @property
    def reserved_blocks(self) -> int:
        return self.memory.num_reserved

    def _enter(self, request: Request, batch: MicroBatch) -> None:
        request.batch = batch
        batch.encoding[request.id] = request
        self.running[request.id] = request

    def move(self, request: Request, batch: MicroBatch) -> None:
        assert request.batch is not None
        if request.id in request.batch.encoding:
            batch.encoding[request.id] = request.batch.encoding.pop(request.id)
            request.batch = batch
        else:
            request.batch.leave(request)
            self._join(request, batch)

    def _join(self, request: Request, batch: MicroBatch) -> None:
        num_left = request.max_output - request.generated
        batch.join(request, num_left if request.table is None else min(self.memory.num_spare(request), num_left))

    def make_room(self, batch: MicroBatch) -> None:
        """Give decoding requests the blocks for their next tokens. Preempt requests when no block is available.

        A promised block is given one token early, so that a worker may run a step ahead.
        """
        for request in batch.due():
            if request.batch is not batch:
                continue  # preempted for an earlier request
            num_left = request.max_output - request.generated
            if num_left <= 0 and (self.runs_ahead or request.id in batch.held):
                batch.stop(request)
                continue
            num_spare = self.memory.num_spare(request)
            if num_spare <= 0:
                num_spare = self._grow(request, num_spare)
            if request.batch is batch:
                batch.recall(request, max(1, min(num_spare, num_left)))

    def _grow(self, request: Request, num_spare: int) -> int:
        """Give a request a promised block or, if its next token would not fit otherwise, a block beyond the promise.

        Return how many further tokens fit in its blocks after its next step, as `KvMemory.num_spare` does.
        """
        memory = self.memory
        if not memory.take_promised(request):
            if num_spare == 0:
                return 0  # the next token still fits
            if memory.kv == "reserve":
                self._overdrawn.add(request.id)
            while memory.is_full and request.batch is not None:
                self._preempt_last()
            if request.batch is None:
                return 0
            request.blocks += 1
        self._grown.setdefault(request.id, []).append(memory.grow(request))
        return num_spare + memory.block_size

    def has_room(self, batch: MicroBatch) -> bool:
        if self._promises_whole:
            return True
        size, num_cached = self.memory.block_size, self.memory.num_cached
        missing = sum([request.blocks * size < num_cached(request) for request in batch.decoding.values()])
        return self.reserved_blocks + missing <= self.memory.decodes.count

    def take_grown(self) -> tuple[tuple[int, int], ...]:
        if not self._grown:
            return ()
        grown = tuple((id_, block) for id_, blocks in self._grown.items() for block in blocks)
        self._grown.clear()
        return grown

    def take_preempted(self) -> tuple[int, ...]:
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def begin(self, step: Step, batch: MicroBatch) -> None:
        batch.steps_under_way += 1
        self.num_scored = 0
        self.under_way.begin(step)

    def end(self, step: Step, batch: MicroBatch) -> None:
        batch.steps_under_way -= 1
        self.under_way.end(step)

    def assume(self, batch: MicroBatch) -> None:
        if batch.assumed is None:
            batch.assumed = self.under_way.last
            self._advance(batch.assumed, batch)

    def _advance(self, step: Step, batch: MicroBatch) -> None:
        if step.decode:
            batch.advance()
        ended: list[Request] = []
        for chunk in step.encode:
            request = batch.encoding[chunk.id]
            request.encoded += chunk.length
            self.memory.name_prompt(request)
            if request.encoded == request.context:
                del batch.encoding[chunk.id]
                request.generated += self.encode_emits
                self._join(request, batch)
                ended.append(request)
        if self.waiting.has_accounts:
            decoding = (batch.decoding.get(id_) or batch.held.get(id_) for id_ in step.decode)
            emitted = ended if self.encode_emits else []
            self.waiting.charge([*emitted, *(request for request in decoding if request is not None)])

    def _preempt_last(self) -> None:
        is_shared = self.memory.kv == "quantile"
        id_ = next(
            id_
            for id_ in reversed(self.running)
            if (is_shared or id_ in self._overdrawn) and not self.under_way.touches(id_)
        )
        request = self._take_out(id_)
        request.encoded = 0
        if self.memory.encoder:
            request.generated = 0
        (self.waiting.push_front if is_shared else self.waiting.push_back)(request)
        self._preempted.append(id_)
        self.num_preemptions += 1

    def _batch_of(self, id_: int) -> MicroBatch:
        batch = self.running[id_].batch
        assert batch is not None
        return batch

    def _take_out(self, id_: int) -> Request:
        request, batch = self.running[id_], self._batch_of(id_)
        if id_ in batch.encoding:
            del batch.encoding[id_]
        else:
            batch.leave(request)
        self._leave(request)
        return request

    def _leave(self, request: Request) -> None:
        self.memory.leave(request)
        request.batch = None
        del self.running[request.id]
        self._overdrawn.discard(request.id)
        self._grown.pop(request.id, None)
