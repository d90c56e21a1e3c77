"""Manage the requests of one engine. Each request waits, or runs in a micro-batch.

The simulated and the real engine change a `Pool` only through a schedule's methods. So the schedule depends only on the
order of submissions, steps, endings and cancellations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from xgpt.core.policies.admission import Queue, make_queue
from xgpt.core.policies.blocks import NO_CHAINS
from xgpt.core.policies.kv_memory import KvMemory
from xgpt.core.policies.request import MicroBatch, Request, Step
from xgpt.core.policies.running_requests import Running
from xgpt.core.policies.slack import LaneForecast
from xgpt.core.schema import KvPromise
from xgpt.core.schema.step_log import Chain

MOST_SCORED = 512
"""Largest number of prompt tokens for which a step computes log probabilities, since each such token takes a row of
logits. Further scored prompts wait for the next step. A scored prompt with more tokens is cut if steps mix prompts and
decodes. If they do not, it is the only scored prompt of its step.
"""


class Pool(Running):
    """The requests of an engine and the blocks of their K/V memory.

    Under "reserve", blocks for a request's prompt and promised output are reserved when the request enters (ORCA
    Algorithm 1). If its maximum output is promised, it never waits for memory again. A request that exceeds its promise
    takes more blocks as it grows. When memory runs out, such requests are preempted, the last to enter first. A
    preempted request loses its K/V and waits after all others of its account. When it enters again, its generated
    tokens are encoded with its prompt, and it is promised the same number of further tokens.

    Under "quantile", a request enters with the blocks of its prompt and takes more blocks as it grows. When no block is
    available, the request that entered last is preempted and waits before all others. A request in a running step is
    never preempted, since a stage may be reading its K/V.

    Args:
        max_running: largest number of running requests. Under "quantile", it is the number that fits in memory with the
            plan's probability.
        holds_finished: whether finished requests keep their slots until the whole batch has finished (static batching).
            Only for "reserve".
        encoder: whether an encoder reads the prompts. A preempted request then generates its output tokens again, since
            the encoder cannot read output tokens.
        spare: numbers of blocks that must stay free when a request enters beside others: in all, and for each of them.

    Attributes:
        forecast: predicts when running steps leave the first stage, and when tokens are due. Used only with slack.
    """

    def __init__(
        self,
        kv_blocks: int,
        block_size: int,
        *,
        kv: KvPromise = "reserve",
        max_running: int | None = None,
        holds_finished: bool = False,
        waiting: Queue | None = None,
        encoder: bool = False,
        spare: tuple[int, int] = (0, 0),
    ) -> None:
        assert kv == "reserve" or not holds_finished
        memory = KvMemory(kv_blocks, block_size, kv, encoder=encoder, is_whole=holds_finished)
        super().__init__(memory, make_queue() if waiting is None else waiting)
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.kv = kv
        self.max_running = max_running
        self.holds_finished = holds_finished
        self.encoder = encoder
        self.spare = spare
        self.forecast = LaneForecast()

    def fresh(self) -> Pool:
        return Pool(
            self.kv_blocks,
            self.block_size,
            kv=self.kv,
            max_running=self.max_running,
            holds_finished=self.holds_finished,
            waiting=self.waiting.fresh(),
            encoder=self.encoder,
            spare=self.spare,
        )

    def follow(self, other: Pool) -> None:
        self.max_running = other.max_running
        self.waiting.patience_ns = other.waiting.patience_ns

    def is_shaped_like(self, other: Pool) -> bool:
        names = ("kv_blocks", "block_size", "kv", "holds_finished", "encode_emits", "prompt_blocks")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def prompt_blocks(self) -> int:
        return self.memory.prompts.count

    @property
    def kept_blocks(self) -> int:
        return self.memory.prompts.num_kept

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    def is_silent(self, id_: int) -> bool:
        """Return whether a running request gets no further tokens, because it has finished or was cancelled."""
        return id_ in self.under_way.leaving or id_ in self._batch_of(id_).held

    @property
    def scored_room(self) -> int:
        return max(0, MOST_SCORED - self.num_scored)

    def can_ever_fit(self, request: Request) -> bool:
        return self.memory.can_ever_fit(request)

    def submit(self, request: Request) -> None:
        self.waiting.push(request)

    def expire(self, now_ns: int) -> list[int]:
        """Set the clock. Remove the waiting requests that have never run and whose deadline has passed. Return their
        ids.
        """
        return [request.id for request in self.waiting.expire(now_ns)]

    def cancel(self, id_: int) -> list[int]:
        """Remove a waiting or running request.

        A request in a running step stays until that step is settled.

        Returns:
            The ids of the requests that leave now: this request, and finished requests that kept their slots for it.
        """
        if id_ in self.running:
            if id_ in self._batch_of(id_).held:
                return []
            if self.under_way.touches(id_):
                self.under_way.leaving.add(id_)
                return []
            self._take_out(id_)
            return [id_, *self._end_batch()]
        return [id_] if self.waiting.remove(id_) else []

    @property
    def is_full(self) -> bool:
        """Whether as many requests run as may. After another plan's lower limit is adopted, more may run."""
        return self.max_running is not None and self.num_running >= self.max_running

    def can_admit(self) -> bool:
        request = self.waiting.head()
        if request is None or self.is_full:
            return False
        if self.num_scored and request.num_scored > self.scored_room:
            return False
        running, under_way = self.running, self.under_way
        overdrawn = (running[id_].table for id_ in self._overdrawn if not under_way.touches(id_))
        missing = self.memory.num_missing(request, (table for table in overdrawn if table is not None))
        spare, each = self.spare
        return missing + (spare + each * len(running) if running else 0) <= 0

    def admit(self, batch: MicroBatch) -> Request | None:
        if not self.can_admit():
            return None
        request = self.waiting.pop()
        self.num_scored += request.num_scored
        self._promises_whole &= request.promised == request.longest
        self.memory.open(request)
        while self.memory.lacks(request):
            self._preempt_last()
        self.memory.fill(request)
        self._enter(request, batch)
        return request

    def settle(
        self,
        step: Step,
        batch: MicroBatch,
        finished: Collection[int],
        outputs: Mapping[int, Chain] = NO_CHAINS,
        failed: Collection[int] = (),
    ) -> list[int]:
        """Record the tokens of an executed step. `finished` has the ids of the requests that ended in this step."""
        if batch.assumed is step:
            batch.assumed = None
        else:
            self._advance(step, batch)
        freed = []
        for id_ in finished:
            request = self.running[id_]
            if id_ in outputs:
                self.memory.name_output(request, outputs[id_])
            if id_ in failed:
                self.memory.forget_blocks(request)
            if self.holds_finished:
                batch.hold(request)
            else:
                batch.leave(request)
                self._leave(request)
                freed.append(id_)
        if self.under_way.leaving:
            freed += self._settle_leaving(step)
        if self.holds_finished:
            freed += self._end_batch()
        return freed

    def _settle_leaving(self, step: Step) -> list[int]:
        gone = self.under_way.take_leaving(step)
        left = [id_ for id_ in gone if id_ in self.running and id_ not in self._batch_of(id_).held]
        for id_ in left:
            self._take_out(id_)
        return left

    def _end_batch(self) -> list[int]:
        if not self.holds_finished or any(batch.decoding or batch.encoding for batch in self.batches):
            return []
        requests = [request for batch in self.batches for request in batch.held.values()]
        for request in requests:
            self._let_go(request)
        return [request.id for request in requests]

    def _let_go(self, request: Request) -> None:
        assert request.batch is not None
        request.batch.leave(request)
        self._leave(request)
