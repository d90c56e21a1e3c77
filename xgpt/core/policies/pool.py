"""The requests of one engine: which are waiting, which run in which micro-batch, and how much K/V memory is promised.

Both engines, simulated and real, keep their requests in a `Pool` and change it only through a schedule's methods, so
that the schedule depends on nothing but the order of submissions, steps, endings and cancellations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from xgpt.core.policies.admission import Queue, make_queue
from xgpt.core.policies.blocks import NO_CHAINS, NOTHING, Blocks, BlockTable, Found
from xgpt.core.policies.request import MicroBatch, Request, Step
from xgpt.core.policies.slack import LaneForecast
from xgpt.core.schema import KvPromise
from xgpt.core.schema.step_log import Chain


class Pool:
    """Requests with their state, and K/V memory in blocks.

    Under "reserve", the blocks of a request's prompt and promised output are set aside when it enters (ORCA Algorithm
    1); if the promise is its maximum, it never waits for memory again. A request beyond its promise takes more blocks
    as it grows, until a request within its promise needs them: then requests beyond theirs are preempted, the last to
    enter first. A preempted request loses its K/V, waits behind the others of its account, and is encoded again with
    its generated tokens and a promise for as many again. Under "quantile", a request enters with the blocks of its
    prompt and takes more as it grows; when blocks run out, the request that entered last is preempted, and waits in
    front. A request with a step under way is never preempted: some stage may be reading its K/V.

    Args:
        kv_blocks: blocks that requests share.
        block_size: tokens a block.
        kv: how memory is promised.
        max_running: largest number of running requests; under "quantile", as many as fit with the plan's probability.
        hold_finished: finished requests keep their slot until the whole batch has finished (static batching). Memory
            for such a batch is set aside whole, so this needs "reserve".
        waiting: the empty queue of waiting requests; None: the earliest arrival enters next.
        encoder: whether an encoder reads prompts. K/V memory then also holds the token with which the decoder starts,
            and a preempted request generates its tokens anew, since no encoder reads them.
    """

    def __init__(
        self,
        kv_blocks: int,
        block_size: int,
        *,
        kv: KvPromise = "reserve",
        max_running: int | None = None,
        hold_finished: bool = False,
        waiting: Queue | None = None,
        encoder: bool = False,
    ) -> None:
        assert kv == "reserve" or not hold_finished
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.kv = kv
        self.max_running = max_running
        self.hold_finished = hold_finished
        self.encoder = encoder
        self.encode_emits = True
        """Whether the step that ends a prompt also computes its first output token."""
        self.blocks = self.prompts = Blocks(kv_blocks)
        """K/V memory of the lane that decodes, and of the lane that encodes."""
        self._promised = 0
        """Number of blocks that requests have been promised and do not have yet."""
        self.num_preemptions = 0
        self.forecast = LaneForecast()
        """Forecast of the steps under way, if the rule decides by times."""
        self.waiting = make_queue() if waiting is None else waiting
        self.running: dict[int, Request] = {}
        """Running requests, in the order in which they entered."""
        self.batches: list[MicroBatch] = []
        self._under_way: list[Step] = []
        self._leaving: set[int] = set()
        """Requests cancelled while their step was under way: they leave when it is settled."""
        self._overdrawn: set[int] = set()
        """Requests that have taken more blocks than they were promised, under "reserve"."""
        self._preempted: list[int] = []
        """Requests preempted for the next step."""
        self._grown: dict[int, list[int]] = {}
        """(request, block) pairs given since the last step, in order."""

    def fresh(self) -> Pool:
        """Return another pool with the same arguments, without requests."""
        return Pool(
            self.kv_blocks,
            self.block_size,
            kv=self.kv,
            max_running=self.max_running,
            hold_finished=self.hold_finished,
            waiting=self.waiting.fresh(),
            encoder=self.encoder,
        )

    def follow(self, other: Pool) -> None:
        """Adopt another plan's rules of admission, from a pool of the same shape."""
        self.max_running = other.max_running
        self.waiting.patience_ns = other.waiting.patience_ns

    def add_batches(self, count: int) -> tuple[MicroBatch, ...]:
        """Return new micro-batches over this pool's waiting queue and memory."""
        added = tuple(MicroBatch() for _ in range(count))
        self.batches.extend(added)
        return added

    def in_turn(self, first: MicroBatch) -> list[MicroBatch]:
        """Return all micro-batches in the order of their turns, from one on."""
        number = self.batches.index(first)
        return self.batches[number:] + self.batches[:number]

    @property
    def prompt_blocks(self) -> int:
        """Number of blocks of the lane that encodes."""
        return self.prompts.count

    @property
    def reserved_blocks(self) -> int:
        """Number of blocks in use or promised; shared blocks count once."""
        return self.blocks.num_used + self._promised

    @property
    def kept_blocks(self) -> int:
        """Number of blocks kept for later requests in the lane that encodes."""
        return self.prompts.num_kept

    @property
    def now_ns(self) -> int:
        """The engine's clock at the last `expire`."""
        return self.waiting.now_ns

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    def is_shaped_like(self, other: Pool) -> bool:
        """Return whether requests could move to another pool as they are: same memory, promised in the same way."""
        names = ("kv_blocks", "block_size", "kv", "hold_finished", "encode_emits", "prompt_blocks")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def can_ever_fit(self, request: Request) -> bool:
        whole = self.blocks_for(request.longest)
        may_return = not self.encoder and (self.kv == "quantile" or request.promised < request.longest)
        prompt = whole if may_return else self.blocks_for(request.input_length)
        return whole <= self.kv_blocks and prompt <= self.prompt_blocks

    def submit(self, request: Request) -> None:
        self.waiting.push(request)

    def expire(self, now_ns: int) -> list[int]:
        """Remove and return the waiting requests that have never run and whose deadline has passed."""
        return [request.id for request in self.waiting.expire(now_ns)]

    def to_encode(self, request: Request) -> int:
        """Return the number of tokens that a waiting request would encode if it entered now: at least its last one."""
        return request.context - len(self._find(self.prompts, request).blocks) * self.block_size

    def prompt_blocks_to_enter(self, request: Request) -> int:
        """Return the number of blocks that a waiting request would take in the lane that encodes."""
        return self.blocks_for(request.context) - self._find(self.prompts, request).num_used

    def can_admit(self) -> bool:
        """Return whether the first waiting request can enter now."""
        request = self.waiting.head()
        if request is None or self.num_running == self.max_running:
            return False
        found = self._find(self.blocks, request)
        needed = self._blocks_to_enter(request) - found.num_used
        missing = self.reserved_blocks + needed - self.kv_blocks
        if missing > 0 and not request.generated:
            # Requests beyond their promise have what others leave.
            missing -= sum(
                self.blocks.count_own(self._table_of(id_), found.blocks)
                for id_ in self._overdrawn
                if not self.is_under_way(id_)
            )
        return missing <= 0

    def admit(self, batch: MicroBatch) -> Request | None:
        """Let the first waiting request enter, and return it; None: there is none, or its K/V does not fit."""
        if not self.can_admit():
            return None
        request = self.waiting.pop()
        request.blocks = self._blocks_to_enter(request)
        table = request.table = self.blocks.share(self._find(self.blocks, request).blocks)
        while self.reserved_blocks + request.blocks - table.found > self.kv_blocks:
            self._preempt_last()
        # One block early, where it is promised: a worker may then run a step ahead.
        for _ in range(min(request.blocks, self.blocks_for(self._cached(request) + 1)) - table.found):
            self.blocks.grow(table)
        self._promised += request.blocks - len(table.blocks)
        encoded_in = table
        if self.prompts is not self.blocks:
            encoded_in = request.prompt_table = self.prompts.share(self._find(self.prompts, request).blocks)
            for _ in range(self.blocks_for(request.context) - encoded_in.found):
                self.prompts.grow(encoded_in)
        request.encoded = request.cached = encoded_in.found * self.block_size
        request.batch = batch
        batch.encoding[request.id] = request
        self.running[request.id] = request
        return request

    def _cached(self, request: Request) -> int:
        """Return the number of tokens with K/V after the next decode step, or after the first step behind a prompt."""
        return request.context + self.encoder

    def _find(self, blocks: Blocks, request: Request) -> Found:
        """Return the cached blocks of a waiting request's beginning; its last token is always computed."""
        if not request.chain:
            return NOTHING
        return blocks.find(request.chain, (request.context - 1) // self.block_size)

    def _table_of(self, id_: int) -> BlockTable:
        table = self.running[id_].table
        assert table is not None
        return table

    def move(self, request: Request, batch: MicroBatch) -> None:
        """Move a running request, with its K/V, to another micro-batch."""
        assert request.batch is not None
        now, then = (request.batch.encoding, batch.encoding)
        if request.id not in now:
            now, then = (request.batch.decoding, batch.decoding)
        then[request.id] = now.pop(request.id)
        request.batch = batch

    def make_room(self, batch: MicroBatch) -> None:
        """Give each decoding request the block of its next token, preempting requests when blocks run out.

        A promised block is given a token early, so that a worker may run a step ahead.
        """
        decoding = chain(batch.decoding.values(), batch.held.values())
        for request in [r for r in decoding if self._is_full(r, self._cached(r) + 1)]:
            table = request.table
            if table is None:
                continue  # preempted for an earlier request
            if len(table.blocks) < request.blocks:
                self._promised -= 1
            elif self._is_full(request, self._cached(request)):
                if self.kv == "reserve":
                    self._overdrawn.add(request.id)
                while self.reserved_blocks == self.kv_blocks and request.batch is not None:
                    self._preempt_last()
                if request.batch is None:
                    continue
                request.blocks += 1
            else:
                continue
            self._grown.setdefault(request.id, []).append(self.blocks.grow(table))

    def _is_full(self, request: Request, num_tokens: int) -> bool:
        """Return whether a request that has entered has too few blocks for `num_tokens`."""
        return request.table is not None and len(request.table.blocks) * self.block_size < num_tokens

    def take_grown(self) -> tuple[tuple[int, int], ...]:
        """Return the (request, block) pairs that `make_room` has given since the last call, in order."""
        grown = tuple((id_, block) for id_, blocks in self._grown.items() for block in blocks)
        self._grown.clear()
        return grown

    def take_preempted(self) -> tuple[int, ...]:
        """Return the requests preempted since the last call; they wait again."""
        preempted = tuple(self._preempted)
        self._preempted.clear()
        return preempted

    def begin(self, step: Step, batch: MicroBatch) -> None:
        """Note that the step is under way, until it is settled."""
        batch.steps_under_way += 1
        self._under_way.append(step)

    def end(self, step: Step, batch: MicroBatch) -> None:
        """Note that the step has been executed."""
        batch.steps_under_way -= 1
        self._under_way.remove(step)

    def is_under_way(self, id_: int) -> bool:
        """Whether a step that has begun touches this request."""
        return any(id_ in step.ids for step in self._under_way)

    def idle(self, ids: Iterable[int]) -> list[int]:
        """Return those of these requests that no step touches that has begun."""
        touched = {id_ for step in self._under_way for id_ in step.ids}
        return [id_ for id_ in ids if id_ not in touched]

    @property
    def num_under_way(self) -> int:
        """Number of steps that have begun and have not been settled."""
        return len(self._under_way)

    def is_leaving(self, id_: int) -> bool:
        """Whether a request was cancelled while a step of it was under way."""
        return id_ in self._leaving

    def has_room(self, batch: MicroBatch) -> bool:
        """Return whether every decoding request has a block for its next token, or a free one, without preemption."""
        missing = sum(r.blocks * self.block_size < self._cached(r) for r in batch.decoding.values())
        return self.reserved_blocks + missing <= self.kv_blocks

    def is_silent(self, id_: int) -> bool:
        """Whether a running request's tokens are no longer wanted: it has finished, or was cancelled."""
        return id_ in self._leaving or id_ in self._batch_of(id_).held

    @property
    def encoding(self) -> Iterator[int]:
        """Yield the requests whose prompt is not encoded yet, or only in part."""
        return (id_ for batch in self.batches for id_ in batch.encoding)

    def settle(
        self,
        step: Step,
        batch: MicroBatch,
        finished: Collection[int],
        outputs: Mapping[int, Chain] = NO_CHAINS,
        failed: Collection[int] = (),
    ) -> list[int]:
        """Account for an executed step's tokens; `finished` names the requests that ended in it.

        Args:
            outputs: for requests that ended, the keys of the blocks behind those of the prompt.
            failed: requests among them that ended in an error: their blocks are not shared any more.

        Returns:
            The requests whose slot and K/V are free again.
        """
        if batch.assumed is step:
            batch.assumed = None
        else:
            self._advance(step, batch)
        freed = []
        for id_ in finished:
            if id_ in outputs:
                self._name_output(self.running[id_], outputs[id_])
            if id_ in failed:
                self._forget_blocks(self.running[id_])
            if self.hold_finished:
                batch.held[id_] = batch.decoding.pop(id_)
            else:
                self._leave(batch.decoding.pop(id_))
                freed.append(id_)
        return freed + self.settle_leaving(step) + self._end_batch()

    def assume(self, batch: MicroBatch) -> None:
        """Assume that the micro-batch's step under way has its tokens, so that the next step can be decided."""
        if batch.assumed is None:
            batch.assumed = self._under_way[-1]
            self._advance(batch.assumed, batch)

    def _advance(self, step: Step, batch: MicroBatch) -> None:
        """Account for a step's tokens; requests that have ended since it was decided get none."""
        made: list[Request] = []
        for chunk in step.encode:
            request = batch.encoding[chunk.id]
            request.encoded += chunk.length
            self._name_prompt(request)
            if request.encoded == request.context:
                request.generated += self.encode_emits
                if self.encode_emits:
                    made.append(request)
                batch.decoding[chunk.id] = batch.encoding.pop(chunk.id)
        for id_ in step.decode:
            decoding = batch.decoding.get(id_) or batch.held.get(id_)
            if decoding is not None:
                decoding.generated += 1
                made.append(decoding)
        self.waiting.charge(made)

    def settle_leaving(self, step: Step) -> list[int]:
        """Remove the requests that were cancelled while this step was under way."""
        if not self._leaving:
            return []
        gone = [id_ for id_ in step.ids if id_ in self._leaving and not self.is_under_way(id_)]
        self._leaving.difference_update(gone)
        left = [id_ for id_ in gone if id_ in self.running and id_ not in self._batch_of(id_).held]
        for id_ in left:
            self._take_out(id_)
        return left

    def cancel(self, id_: int) -> list[int]:
        """Remove a waiting or running request; one that has finished, or is not known, is ignored.

        A request with a step under way stays until that step is settled.

        Returns:
            The requests whose slot and K/V are free again: this one, and those that it held back.
        """
        if id_ in self.running:
            if id_ in self._batch_of(id_).held:
                return []
            if self.is_under_way(id_):
                self._leaving.add(id_)
                return []
            self._take_out(id_)
            return [id_, *self._end_batch()]
        return [id_] if self.waiting.remove(id_) else []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _blocks_to_enter(self, request: Request) -> int:
        if self.kv == "quantile":
            return self.blocks_for(self._cached(request))
        # Another plan's promise to a request does not count here: a batch that holds requests is never preempted.
        return self.blocks_for(request.longest if self.hold_finished else request.promised)

    def _end_batch(self) -> list[int]:
        """Free held requests once their whole batch has finished, in all micro-batches."""
        if not self.hold_finished or any(batch.decoding or batch.encoding for batch in self.batches):
            return []
        freed = [id_ for batch in self.batches for id_ in batch.held]
        for batch in self.batches:
            for request in batch.held.values():
                self._leave(request)
            batch.held.clear()
        return freed

    def _preempt_last(self) -> None:
        """Preempt the request that entered last, of those that may be preempted and have no step under way."""
        is_shared = self.kv == "quantile"
        id_ = next(
            id_
            for id_ in reversed(self.running)
            if (is_shared or id_ in self._overdrawn) and not self.is_under_way(id_)
        )
        request = self._take_out(id_)
        request.encoded = 0
        if self.encoder:
            request.generated = 0
        if is_shared:
            self.waiting.push_front(request)
        else:
            self.waiting.push_back(request)
        self._preempted.append(id_)
        self.num_preemptions += 1

    def _batch_of(self, id_: int) -> MicroBatch:
        batch = self.running[id_].batch
        assert batch is not None
        return batch

    def _take_out(self, id_: int) -> Request:
        batch = self._batch_of(id_)
        request = batch.encoding.pop(id_) if id_ in batch.encoding else batch.decoding.pop(id_)
        self._leave(request)
        return request

    def tokens_to_move(self, id_: int) -> int:
        """Return the number of prompt tokens of a running request that the decode lane lacked when it entered."""
        return self.running[id_].input_length - self._table_of(id_).found * self.block_size

    def forget_prompt(self, request: Request) -> None:
        """Release a request's prompt in the lane that has encoded it: the decode lane now has all of it."""
        if request.table is not None:
            self.blocks.name(request.table, request.chain, request.encoded // self.block_size)
        if request.prompt_table is not None:
            self.prompts.release(request.prompt_table)
            request.prompt_table = None

    def _name_prompt(self, request: Request) -> None:
        """Let later requests find the computed blocks of a prompt."""
        count = request.encoded // self.block_size
        if request.prompt_table is not None:
            self.prompts.name(request.prompt_table, request.chain, count)
        elif request.table is not None:
            self.blocks.name(request.table, request.chain, count)

    def _name_output(self, request: Request, output: Chain) -> None:
        """Let later requests find the blocks of a request that has ended, as far as their K/V has been computed."""
        if request.prompt_table is None and request.table is not None:  # else its prompt is not decoded yet
            count = (request.context - 1) // self.block_size  # the last token's K/V has not been computed
            self.blocks.name(request.table, request.chain + output, count)

    def _forget_blocks(self, request: Request) -> None:
        """Let no request find a block of this prompt, in either lane, including blocks that it found itself."""
        self.blocks.forget(request.chain)
        if self.prompts is not self.blocks:
            self.prompts.forget(request.chain)

    def _leave(self, request: Request) -> None:
        assert request.table is not None
        self._promised -= request.blocks - len(request.table.blocks)
        self.blocks.release(request.table)
        if request.prompt_table is not None:
            self.prompts.release(request.prompt_table)
        request.table = request.prompt_table = None
        request.blocks = 0
        request.batch = None
        del self.running[request.id]
        self._overdrawn.discard(request.id)
        self._grown.pop(request.id, None)
