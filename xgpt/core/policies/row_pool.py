"""Manage the requests and K/V memory of an engine that runs whole batches in rows (TCB).

A batch enters as a whole, and its layout does not change after that (`tcb.lay_out`). All slots have equal memory:
enough for the prompts of the longest slot, plus one output of the largest maximum for each request of the fullest slot.
A slot's memory is contiguous, so a request that ends frees no memory. Padded and concatenated rows keep their memory
until the batch has ended. Slots are freed earlier: once all requests of at least a quarter of the remaining slots have
ended (early memory cleaning, TCB sec. 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.core.policies.admission import Queue
from xgpt.core.policies.blocks import BlockTable
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import MicroBatch, Request, Step
from xgpt.core.policies.schedule import OneLane
from xgpt.core.policies.tcb import LEAVING_SHARE, lay_out
from xgpt.core.schema import Batching, LaneName


@dataclass(slots=True)
class _RowBatch:
    present: set[int]
    slot: dict[int, int]
    slot_blocks: int
    blocks: int

    @property
    def has_left_slots(self) -> bool:
        return len({self.slot[id_] for id_ in self.present}) < len(set(self.slot.values()))


class RowPool(Pool):
    def __init__(
        self,
        kv_blocks: int,
        block_size: int,
        *,
        batching: Batching,
        row_tokens: int,
        max_running: int | None = None,
        waiting: Queue | None = None,
    ) -> None:
        super().__init__(kv_blocks, block_size, max_running=max_running, holds_finished=True, waiting=waiting)
        self.batching = batching
        self.layout_tokens = row_tokens
        self._rows: dict[int, _RowBatch] = {}
        self._number: dict[int, int] = {}

    def fresh(self) -> RowPool:
        return RowPool(
            self.kv_blocks,
            self.block_size,
            batching=self.batching,
            row_tokens=self.layout_tokens,
            max_running=self.max_running,
            waiting=self.waiting.fresh(),
        )

    def is_shaped_like(self, other: Pool) -> bool:
        return isinstance(other, RowPool) and self.batching == other.batching and super().is_shaped_like(other)

    def can_admit(self) -> bool:
        request = self.waiting.head()
        if request is None or self.is_full:
            return False
        return self.takes_batch and self._blocks([request]) <= self._free_blocks

    @property
    def takes_batch(self) -> bool:
        return all(rows.has_left_slots for rows in self._rows.values())

    @property
    def _free_blocks(self) -> int:
        return self.kv_blocks - sum(rows.blocks for rows in self._rows.values())

    def enter(self, number: int, most: int | None) -> None:
        """Admit to the empty micro-batch `number` as many requests as fit in free memory, at most `most`."""
        if self.max_running is not None:
            room = self.max_running - self.num_running
            most = room if most is None else min(most, room)
        members = self._next_batch(most) if self.can_admit() and (most is None or most > 0) else []
        if not members:
            return
        layout, blocks = lay_out(self.batching, members, self.layout_tokens), self._blocks(members)
        slot = {place.id: place.slot for place in layout.places}
        self._rows[number] = _RowBatch(set(slot), slot, blocks // layout.num_slots, blocks)
        for request in members:
            self._enter(request, self.batches[number])
            self._number[request.id] = number
            request.table = BlockTable(())
        self._promise()

    def _next_batch(self, most: int | None) -> list[Request]:
        if self.batching == "slots" and (members := self._by_algorithm_2(most)):
            return members
        members = []
        while most is None or len(members) < most:
            request = self.waiting.head()
            if request is None or self._blocks([*members, request]) > self._free_blocks:
                break
            members.append(self.waiting.pop())
        return members

    def _by_algorithm_2(self, most: int | None) -> list[Request]:
        chosen: list[Request] = []
        longest = 0
        fitting: list[Request] = []
        while most is None or len(fitting) < most:
            row = self.waiting.fill_row(self.layout_tokens, goes_on=bool(chosen))
            if not row:
                break
            chosen += row
            longest = max(longest, self.waiting.longest_by_utility)
            fitting = [request for request in chosen if not longest or request.input_length <= longest]
        members: list[Request] = []
        for request in fitting[:most]:
            if self._blocks([*members, request]) > self._free_blocks:
                break
            members.append(request)
        ids = {request.id for request in members}
        self.waiting.put_back(request for request in chosen if request.id not in ids)
        return members

    def make_room(self, batch: MicroBatch) -> None:
        """No request needs blocks, since slots have memory for all outputs."""
        for request in batch.due():
            if request.id in batch.held and request.generated >= request.max_output:
                batch.stop(request)

    def _end_batch(self) -> list[int]:
        """Free the memory of finished requests and return their ids. Without slots, a batch is freed as a whole. With
        slots, finished slots are freed once they are at least a share `LEAVING_SHARE` of the batch's remaining slots.
        """
        freed: list[int] = []
        for number, rows in list(self._rows.items()):
            batch = self.batches[number]
            requests = dict(batch.held)
            if batch.decoding or batch.encoding:
                staying = {rows.slot[id_] for id_ in rows.present - requests.keys()}
                gone = {rows.slot[id_] for id_ in requests} - staying
                if self.batching != "slots" or len(gone) < LEAVING_SHARE * len(gone | staying):
                    continue
                requests = {id_: request for id_, request in requests.items() if rows.slot[id_] in gone}
            for request in requests.values():
                self._let_go(request)
            freed += requests
        return freed

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        number = self._number.pop(request.id)
        rows = self._rows[number]
        rows.present.discard(request.id)
        if not rows.present:
            del self._rows[number]
        elif self.batching == "slots":
            rows.blocks = rows.slot_blocks * len({rows.slot[id_] for id_ in rows.present})
        self._promise()

    def _promise(self) -> None:
        self.memory.num_promised = self.kv_blocks - self._free_blocks

    def _blocks(self, requests: list[Request]) -> int:
        layout = lay_out(self.batching, requests, self.layout_tokens)
        answers = layout.most_a_slot * max(request.max_output for request in requests)
        return layout.num_slots * self.memory.blocks_for(layout.slot_tokens + answers)


class RowSchedule(OneLane):
    """The schedule of static batches in rows on one device. A micro-batch is a whole batch. One step runs at a time."""

    def next_step(self, lane: LaneName = "both") -> Step | None:
        if any(batch.steps_under_way for batch in self._batches):
            return None
        return super().next_step(lane)

    def _refill(self) -> None:
        pool, most = self.pool, self.settings.max_batch
        assert isinstance(pool, RowPool)
        for number, batch in enumerate(self._batches):
            if not batch.num_running and pool.takes_batch:
                pool.enter(number, None if most is None else most - pool.num_running)
