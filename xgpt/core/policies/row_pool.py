"""The requests of an engine that runs whole batches in rows (TCB), and the K/V memory that rows take.

A batch enters whole and is laid out at once (`tcb.lay_out`). Its memory is that of its slots: every slot has room for
the longest one's prompts and for as many answers, each as long as the longest, as the fullest slot has requests. A
slot's memory is one piece, so a request that ends frees none of it: padded and concatenated rows keep theirs until the
batch has ended. Slots that have ended leave before that (early memory cleaning, TCB sec. 4.2.2).
"""

from __future__ import annotations

from xgpt.core.policies.admission import Queue
from xgpt.core.policies.blocks import BlockTable
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import MicroBatch, Request
from xgpt.core.policies.tcb import LEAVING_SHARE, lay_out
from xgpt.core.schema import Batching


class RowPool(Pool):
    """A pool of whole batches in rows: the next one enters once the last has ended.

    Args:
        batching: how a batch is laid out; not "flat".
        row_tokens: prompt tokens of a row.
    """

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
        super().__init__(kv_blocks, block_size, max_running=max_running, hold_finished=True, waiting=waiting)
        self.batching = batching
        self.layout_tokens = row_tokens
        self._members: list[Request] = []
        """The batch that is inside, in the order in which its requests entered; some may have left."""
        self._slot: dict[int, int] = {}
        """Of each of them its slot, once the batch is complete."""
        self._slot_blocks = 0

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
        if request is None or self.num_running == self.max_running:
            return False
        return self._blocks([*self._members, request]) <= self.kv_blocks

    def admit(self, batch: MicroBatch) -> Request | None:
        if not self.can_admit():
            return None
        request = self.waiting.pop()
        self._enter(request, batch)
        self._members.append(request)
        request.table = BlockTable(())
        self.memory.num_promised = self._blocks(self._members)
        self._slot.clear()
        return request

    def make_room(self, batch: MicroBatch) -> None:
        """Stop requests that have all tokens that they may have; slots have room for every answer."""
        for request in batch.due():
            if request.id in batch.held and request.generated >= request.max_output:
                batch.stop(request)

    def _end_batch(self) -> list[int]:
        """Free held requests: under slots those whose slot has ended, else all once the batch has."""
        held = {request.id: request for batch in self.batches for request in batch.held.values()}
        if any(batch.decoding or batch.encoding for batch in self.batches):
            staying = {self._slot_of(id_) for id_ in self.running if id_ not in held}
            gone = {self._slot_of(id_) for id_ in held} - staying
            if self.batching != "slots" or len(gone) < LEAVING_SHARE * len(gone | staying):
                return []
            held = {id_: request for id_, request in held.items() if self._slot_of(id_) in gone}
        for request in held.values():
            self._let_go(request)
        return list(held)

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        if not self.running:
            self._members.clear()
            self._slot.clear()
            self.memory.num_promised = 0
        elif self.batching == "slots":
            left = {self._slot_of(id_) for id_ in self.running}
            self.memory.num_promised = self._slot_blocks * len(left)

    def _slot_of(self, id_: int) -> int:
        """Return the slot of a member of the batch, which is complete."""
        if not self._slot:
            layout = lay_out(self.batching, self._members, self.layout_tokens)
            self._slot = {place.id: place.slot for place in layout.places}
            self._slot_blocks = self._blocks(self._members) // layout.num_slots
        return self._slot[id_]

    def _blocks(self, requests: list[Request]) -> int:
        """Return the blocks of a batch."""
        layout = lay_out(self.batching, requests, self.layout_tokens)
        answers = layout.most_a_slot * max(request.max_output for request in requests)
        return layout.num_slots * self.memory.blocks_for(layout.slot_tokens + answers)
