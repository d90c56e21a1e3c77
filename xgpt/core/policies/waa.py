"""Implement the two-lane scheduling rule of waa: one group of workers encodes, another one decodes.

The encode lane starts a batch of prompts once the whole batch fits within the limit on requests. If several groups
encode side by side, the first free one takes the batch. After that, a
"transfer" step moves the batch's K/V to the decode lane. One transfer step runs at a time, and it moves all batches
that were encoded since the previous one began. Then the requests join the decode micro-batch whose turn it is, but not
before the buffer time has passed since their encode step began. The buffer time is counted in decode iterations,
because a rule reads no clock. Source: ExeGPT sec. 4.1, 5.2, Figure 4 (b) and (c).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import takewhile

from xgpt.core.policies.blocks import NO_CHAINS, Blocks
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import MicroBatch, Request, Step
from xgpt.core.policies.rule import PromptBudget, rest_of_prompt
from xgpt.core.policies.schedule import Schedule
from xgpt.core.schema import LaneName, Stage
from xgpt.core.schema.step_log import Chain

FIXED = ("encode_stages", "encode_blocks", "decode_microbatches", "encoder_only")


@dataclass(frozen=True, slots=True)
class TwoLaneSettings:
    """The scheduling rule's settings for a waa plan.

    Attributes:
        encode_stages: number of encode micro-batches: one for each stage or, in a lane of groups, for each group.
        max_decode_batch: largest number of requests in encode, transfer and decode together.
        adjustment: if the number of decoding requests differs from `decode_batch` by more than this share, encode
            batches are made smaller or larger by this share. 0 means never.
        buffer_iterations: least number of decode iterations between the start of an encode batch and its first decode
            step.
        encoder_only: whether the encode lane runs only an encoder, so that the decode lane computes the first token.
    """

    encode_tokens: float
    encode_stages: int
    encode_blocks: int
    max_decode_batch: int
    decode_batch: float = 0.0
    adjustment: float = 0.0
    decode_microbatches: int = 1
    buffer_iterations: int = 0
    encoder_only: bool = False
    reuse_is_planned: bool = False

    def budget(self) -> PromptBudget:
        return PromptBudget(self.encode_tokens, self.decode_batch, self.adjustment)


class TwoLane(Schedule):
    """The schedule of waa. The pool's blocks are those of the decode lane, and a request gets them when it enters the
    encode lane.
    """

    lanes: tuple[LaneName, ...] = ("decode", "transfer", "encode")

    def __init__(self, settings: TwoLaneSettings, pool: Pool, stages: tuple[Stage, ...] = ()) -> None:
        super().__init__(pool, stages)
        pool.encode_emits = not settings.encoder_only
        pool.memory.prompts = Blocks(settings.encode_blocks)
        self.settings = settings
        self._encode = pool.add_batches(settings.encode_stages, decodes=False)
        (self._moving,) = pool.add_batches(1, decodes=False)
        (self._arrived,) = pool.add_batches(1, decodes=False)
        self._decode = pool.add_batches(settings.decode_microbatches)
        self._encode_turn = self._decode_turn = 0
        self._num_decode_steps = 0
        self._joins_at: dict[int, int] = {}
        self._budget = settings.budget()

    def apply(self, other: Schedule) -> bool:
        if not isinstance(other, TwoLane) or not self._is_placed_like(other):
            return False
        now, then = self.settings, other.settings
        if any(getattr(now, name) != getattr(then, name) for name in FIXED):
            return False
        self.settings = then
        self.pool.follow(other.pool)
        self._budget = then.budget()
        return True

    def fresh(self) -> TwoLane:
        return TwoLane(self.settings, self.pool.fresh(), self.stages)

    def next_step(self, lane: LaneName) -> Step | None:
        match lane:
            case "encode":
                return self._next_encode()
            case "transfer":
                return self._next_transfer()
        return self._next_decode()

    def settle(
        self,
        step: Step,
        finished: Collection[int],
        outputs: Mapping[int, Chain] = NO_CHAINS,
        failed: Collection[int] = (),
    ) -> list[int]:
        pool = self.pool
        batch = self.batch_of(step)
        pool.end(step, batch)
        freed = pool.settle(step, batch, finished, outputs, failed)
        if step.lane == "encode":
            for request in list(batch.decoding.values()):
                pool.move(request, self._moving)
        elif step.lane == "transfer":
            for id_ in step.transfer:
                if id_ in self._moving.decoding:
                    pool.memory.forget_prompt(self._moving.decoding[id_])
                    pool.move(self._moving.decoding[id_], self._arrived)
        return freed

    def batch_of(self, step: Step) -> MicroBatch:
        match step.lane:
            case "encode":
                return self._encode[step.microbatch]
            case "transfer":
                return self._moving
        return self._decode[step.microbatch]

    def _next_encode(self) -> Step | None:
        count = len(self._encode)
        turns = [(self._encode_turn + i) % count for i in range(count)]
        number = next((turn for turn in turns if not self._encode[turn].steps_under_way), None)
        if number is None or not self.pool.can_admit():
            return None
        batch = self._encode[number]
        due = self._due()
        settings = self.settings
        pool = self.pool
        # The whole batch must fit, since encoding few prompts at a time would waste the encode lane's capacity.
        if pool.running and pool.num_running + due > settings.max_decode_batch:
            return None
        if self._encode_blocks_with(due) > settings.encode_blocks:
            return None
        self._budget.open(self._excess())
        entered: list[Request] = []
        while len(entered) < due:
            request = pool.admit(batch)
            if request is None:
                break
            self._budget.spend(request.context - (request.cached if self.settings.reuse_is_planned else 0))
            entered.append(request)
        first = pool.waiting.head()
        if first is None or self._budget.covers(self._length(first)):
            self._budget.close()
        step = Step(
            tuple(rest_of_prompt(request) for request in entered),
            (),
            pool.take_preempted(),
            lane="encode",
            microbatch=number,
        )
        pool.begin(step, batch)
        if settings.buffer_iterations:
            joins_at = self._num_decode_steps + settings.buffer_iterations * len(self._decode)
            self._joins_at = {id_: at for id_, at in self._joins_at.items() if id_ in pool.running}
            self._joins_at |= dict.fromkeys((request.id for request in entered), joins_at)
        self._encode_turn = (number + 1) % count
        return step

    def _due(self) -> int:
        settings = self.settings
        budget = copy(self._budget)
        budget.open(self._excess())
        count = blocks = 0
        for request in self.pool.waiting.ahead(settings.max_decode_batch + 1):
            blocks += self.pool.memory.blocks_for(request.context)
            fits = count < settings.max_decode_batch and blocks <= settings.encode_blocks
            length = self._length(request)
            if count and not (fits and budget.covers(length)):
                break
            budget.spend(length)
            count += 1
        return count

    def _excess(self) -> float:
        return self._num_decoding() - self.settings.decode_batch if self.settings.adjustment else 0.0

    def _length(self, request: Request) -> int:
        return self.pool.memory.to_encode(request) if self.settings.reuse_is_planned else request.context

    def _encode_blocks_with(self, count: int) -> int:
        memory = self.pool.memory
        return memory.prompts.num_used + sum(map(memory.prompt_blocks_to_enter, self.pool.waiting.ahead(count)))

    def _next_transfer(self) -> Step | None:
        batch = self._moving
        if batch.steps_under_way or not batch.decoding:
            return None
        step = Step((), (), transfer=tuple(batch.decoding), lane="transfer")
        self.pool.begin(step, batch)
        return step

    def _next_decode(self) -> Step | None:
        count = len(self._decode)
        for number in [(self._decode_turn + i) % count for i in range(count)]:
            batch = self._decode[number]
            if batch.steps_under_way:
                return None
            if not (batch.decoding or self._arrived.decoding):
                continue
            self._join(batch)
            self.pool.make_room(batch)
            preempted = self.pool.take_preempted()
            decode = tuple(batch.decoding)
            if not decode and not preempted:
                continue
            grown = self.pool.take_grown()
            step = Step((), decode, preempted, lane="decode", microbatch=number, grown=grown)
            self.pool.begin(step, batch)
            self._num_decode_steps += bool(decode)
            self._decode_turn = (number + 1) % count
            return step
        return None

    def _join(self, batch: MicroBatch) -> None:
        share = -(-self._num_decoding() // len(self._decode))
        for request in self._ready()[: max(0, share - batch.num_running)]:
            self._joins_at.pop(request.id, None)
            self.pool.move(request, batch)

    def _ready(self) -> list[Request]:
        """Return the requests whose K/V has been moved and whose buffer time has passed. If no request decodes, ignore
        the buffer time, since without iterations it would never pass.
        """
        arrived = list(self._arrived.decoding.values())
        if not self._joins_at or not any(batch.num_running for batch in self._decode):
            return arrived
        return list(takewhile(lambda one: self._joins_at.get(one.id, 0) <= self._num_decode_steps, arrived))

    def _num_decoding(self) -> int:
        return len(self._arrived.decoding) + sum(batch.num_running for batch in self._decode)
