"""Implement the scheduling rule of the policies with one lane: what the next step of a micro-batch computes.

    policy    prompts in a step                                                decodes in a step
    orca      the rest of begun prompts, then of all that get a slot and K/V   all
    chunked   the same, until prompts and decodes are `token_budget` tokens    all
    slack     the same, until a running request's next token would be late     all
    rra       in the first step of a phase, prompts of `encode_tokens` tokens  all, except in that step
    static    once nobody runs, those of a whole batch (`OneLane`)             all, after these steps
    waa       on a lane of its own, a batch once all of it fits (`waa`)        all, on the other lane
    in rows   as static, in rows and slots once these are free (`row_pool`)    all, after these steps

Who enters next is the first in the plan's order (`Pool.waiting`). If its K/V does not fit, nobody enters
(`Pool.can_admit`). If a decoding request needs a block and none is left, the request that entered last is preempted or,
under `reserve`, the last one that has more than its promise (`Pool.make_room`). The policies' values are in
`lane_settings`.

A phase is a step that encodes, with the decode steps after it. The rule draws no random numbers, and knows only the
time that the engine has told its schedule (`Schedule.expire`). So the same submissions, steps, endings and times give
the same schedule on a simulated and on a real clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from itertools import chain
from typing import Self

from xgpt.core.policies.in_time import FirstTokens
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import Chunk, MicroBatch, Request, Step
from xgpt.core.policies.slack import PromptRoom, Slack, TimeRoom, TokenRoom
from xgpt.core.schema.policy import SingleLane

ADJUSTMENT = 0.1
"""If the decode batch deviates from its mean by more than this share, the encode batch is changed by this share.

Source: ExeGPT sec. 5.2, which names the threshold but no figure.
"""


class PromptBudget:
    """The number of prompt tokens that a phase may encode: a target, corrected by the excess or deficit of earlier
    phases.

    A prompt is encoded only if the budget's remaining tokens are at least half of the prompt's tokens. So every phase
    is within half a prompt of the target, and the mean is the target.

    Source: ExeGPT sec. 5.2.
    """

    def __init__(self, target: float, decode_batch: float = 0.0, adjustment: float = ADJUSTMENT) -> None:
        self._target = target
        self._adjustment = adjustment
        self._most_excess = adjustment * decode_batch
        self._credit = 0.0
        """Number of tokens by which earlier phases fell short of the target. The number is negative if they exceeded
        the target."""

    def open(self, excess: float = 0.0) -> None:
        """Begin the next phase. `excess` is the number of decoding requests minus its planned mean."""
        target = self._target
        if abs(excess) > self._most_excess:
            target *= 1 - self._adjustment if excess > 0 else 1 + self._adjustment
        self._credit += target

    def covers(self, length: int) -> bool:
        return self._credit >= length / 2

    def spend(self, length: int) -> None:
        self._credit -= length

    def close(self) -> None:
        """End a phase's encoding early, because no request waits or memory is full. Unused tokens are not carried over,
        since the next phase would then encode a burst.
        """
        self._credit = min(self._credit, 0.0)


class OneLaneRule:
    def __init__(self, settings: LaneSettings, number: int = 0) -> None:
        self.settings = settings
        self._number = number
        self._iterations = settings.encode_every
        self._budget = PromptBudget(settings.encode_tokens or 0.0, settings.decode_batch)
        self.phase = 0
        self._waited = 0

    def apply(self, settings: LaneSettings) -> None:
        self.settings = settings
        self._budget = PromptBudget(settings.encode_tokens or 0.0, settings.decode_batch)

    def is_phase_over(self, batch: MicroBatch) -> bool:
        return not batch.num_running or self._iterations >= self.settings.encode_every

    def next_step(self, pool: Pool, batch: MicroBatch, *, may_encode: bool = True) -> Step | None:
        """Admit waiting requests and return the next step. Return None if nothing can run.

        A call that returns None changes nothing, since the number of such calls depends on an engine's clock.

        Args:
            may_encode: whether a phase may begin now. If not, an empty micro-batch gets no step.
        """
        settings = self.settings
        giving_way = (
            frozenset() if settings.first_tokens is None else self._give_way(settings.first_tokens, pool, batch)
        )
        if not batch.num_running and not (may_encode and pool.can_admit()):
            return None
        may_decode_alone = settings.mix and settings.prompts_first
        # no request of a static batch decodes before all are encoded
        if not may_decode_alone and not (settings.refill_when_empty and batch.encoding):
            pool.make_room(batch)
        encode: tuple[Chunk, ...] = ()
        if settings.mix:
            encode = () if self._waits_for_others(pool, batch) else self._fill(pool, batch, giving_way)
        elif settings.refill_when_empty:
            encode = self._part(pool, batch)
        elif batch.encoding or (may_encode and self.is_phase_over(batch)):
            self.phase += 1
            encode = self.prompts_of_phase(pool, batch)

        decode: tuple[int, ...] = ()
        mixes = settings.mix and not (encode and settings.prompts_first)
        if mixes or not (encode or batch.encoding):
            if may_decode_alone:
                pool.make_room(batch)
            decode = self._decodable(pool, batch)
        preempted = pool.take_preempted()
        if not encode and not decode and not preempted:
            return None
        self._iterations = 0 if encode else self._iterations + 1
        if settings.slack is not None and decode:
            pool.forecast.begin_decode(batch, pool.now_ns, settings.slack)
        return Step(encode, decode, preempted, microbatch=self._number, grown=pool.take_grown())

    def _decodable(self, pool: Pool, batch: MicroBatch) -> tuple[int, ...]:
        if self.settings.ahead and pool.under_way.leaving:
            for id_ in pool.under_way.leaving.intersection(batch.decoding) - batch.stopped:
                batch.stop(batch.decoding[id_])
        return batch.next_to_decode

    def _waits_for_others(self, pool: Pool, batch: MicroBatch) -> bool:
        settings = self.settings
        if self._iterations % settings.receive_steps and self._decodable(pool, batch):
            return True
        if not settings.batch_wait_steps:
            return False
        decodes = len(self._decodable(pool, batch))
        waits = self._waited < settings.batch_wait_steps and decodes > 0 and self.has_slot(batch) and pool.can_admit()
        if waits:
            room = pool.num_waiting if settings.max_batch is None else settings.max_batch - batch.num_running
            waits = decodes + sum(r.input_length for r in pool.waiting.ahead(room)) < settings.batch_wait_tokens
        self._waited = self._waited + 1 if waits else 0
        return waits

    def _give_way(self, first_tokens: FirstTokens, pool: Pool, batch: MicroBatch) -> Collection[int]:
        settings = self.settings
        # Preempted requests already have their first token.
        begun = [first_tokens.job(r) for each in pool.batches for r in each.encoding.values() if not r.generated]
        pace = first_tokens.pace(batch.num_decoding, batch.context, settings.token_budget, settings.slack)
        return pool.waiting.plan(begun, pace)

    def _fill(self, pool: Pool, batch: MicroBatch, giving_way: Collection[int]) -> tuple[Chunk, ...]:
        if self.settings.slack is not None:
            return self._fill_in_time(self.settings.slack, pool, batch, giving_way)
        return self._fill_room(self.room(pool, batch), pool, batch, giving_way)

    def room(self, pool: Pool, batch: MicroBatch) -> PromptRoom:
        """Return the room for prompt tokens in the next step (only with `mix`, without `slack`)."""
        budget = self.settings.token_budget
        decodes = 0 if self.settings.prompts_first else len(self._decodable(pool, batch))
        return TokenRoom(None if budget is None else budget - decodes)

    def _fill_in_time(
        self, slack: Slack, pool: Pool, batch: MicroBatch, giving_way: Collection[int]
    ) -> tuple[Chunk, ...]:
        forecast, now_ns = pool.forecast, pool.now_ns
        num_decodes = len(self._decodable(pool, batch))
        free_ns = forecast.free_ns(now_ns, len(pool.under_way))
        first_due_ns, *others = (forecast.first_due_ns(each, now_ns, slack) - free_ns for each in pool.in_turn(batch))
        begun = (r for each in pool.batches for r in each.encoding.values())
        even = slack.even_tokens(r.context - r.encoded for r in chain(begun, pool.waiting))
        room = TimeRoom(slack, slack.step_s(first_due_ns, others), num_decodes, batch.context, even)
        chunks = self._fill_room(room, pool, batch, giving_way)
        if chunks or num_decodes:
            forecast.begin(now_ns, room.seconds, slack.num_stages)
        return chunks

    def _fill_room(
        self, room: PromptRoom, pool: Pool, batch: MicroBatch, giving_way: Collection[int]
    ) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        begun = list(batch.encoding.values())
        self._go_on(room, pool, [request for request in begun if request.id not in giving_way], chunks)
        late = [request for request in begun if request.id in giving_way]
        self._admit(room, pool, batch, chunks, in_time=bool(late))
        if late:
            self._go_on(room, pool, late, chunks)
            self._admit(room, pool, batch, chunks)
        return tuple(chunks)

    def _go_on(self, room: PromptRoom, pool: Pool, begun: Iterable[Request], chunks: list[Chunk]) -> None:
        for request in begun:
            if not room.is_open:
                return
            if not (self.settings.ahead and request.id in pool.under_way.leaving):
                end = request.context
                if request.num_scored:
                    end = min(end, request.encoded + pool.scored_room)
                    if end <= request.encoded:
                        continue
                chunks.append(Chunk(request.id, request.encoded, room.take(request.encoded, end)))
                pool.num_scored += chunks[-1].length if request.num_scored else 0

    def _admit(
        self, room: PromptRoom, pool: Pool, batch: MicroBatch, chunks: list[Chunk], *, in_time: bool = False
    ) -> None:
        while room.is_open and self.has_slot(batch):
            if in_time and pool.num_waiting and pool.waiting.head_gives_way():
                return
            if self.settings.whole_prompts and not self._holds_next(room, pool):
                return
            scored_room = pool.scored_room
            admitted = pool.admit(batch)
            if admitted is None:
                return
            end = admitted.context
            if admitted.num_scored:
                end = min(end, admitted.encoded + scored_room)
            chunks.append(Chunk(admitted.id, admitted.encoded, room.take(admitted.encoded, end)))

    def _holds_next(self, room: PromptRoom, pool: Pool) -> bool:
        budget = self.settings.token_budget
        return all(
            room.holds(request.input_length if budget is None else min(request.input_length, budget))
            for request in pool.waiting.ahead(1)
        )

    def has_slot(self, batch: MicroBatch) -> bool:
        return self.settings.max_batch is None or batch.num_running < self.settings.max_batch

    def _part(self, pool: Pool, batch: MicroBatch) -> tuple[Chunk, ...]:
        missing = [batch.encoding[id_] for id_ in pool.under_way.untouched(batch.encoding)]
        size = -(-batch.num_running // self.settings.encode_parts)
        return tuple(rest_of_prompt(request) for request in missing[:size])

    def prompts_of_phase(self, pool: Pool, batch: MicroBatch) -> tuple[Chunk, ...]:
        """Admit requests up to the phase's token budget, and return their whole prompts. The difference from the budget
        is carried over to the next phase, except as `PromptBudget.close` states.
        """
        settings = self.settings
        self._budget.open(len(batch.decoding) - settings.carried_batch)
        # Partly encoded prompts were begun under other settings, which cut prompts (see `apply`).
        chunks = [rest_of_prompt(request) for request in batch.encoding.values()]
        while (first := pool.waiting.head()) is not None:
            length = pool.memory.to_encode(first) if settings.reuse_is_planned else first.context
            must_start = not chunks and not batch.decoding
            if not (self._budget.covers(length) or must_start):
                self._iterations = 0
                return tuple(chunks)
            admitted = pool.admit(batch)
            if admitted is None:
                break
            chunks.append(rest_of_prompt(admitted))
            self._budget.spend(length)
        self._budget.close()
        return tuple(chunks)


class Rule(OneLaneRule):
    """A scheduling rule of one's own, as one object for the simulated and the real engine.

    Override `key` to decide which waiting request enters next, `room` to decide how many prompt tokens a mixed step
    takes, and `next_step` to decide what a step computes; the inherited `next_step` follows the plan's settings.
    Parameters belong into attributes. Like every rule, it may read only the pool and the micro-batch: no clock and no
    random numbers, so that a log replays exactly, and a call of `next_step` that returns None changes nothing.
    `xgpt.testing.check_rule` tests this.

        class ShortestFirst(xgpt.Rule):
            def key(self, request):
                return request.input_length

        xgpt.simulate("plan.json", rule=ShortestFirst())
    """

    def __init__(self) -> None:
        """Take no settings: each micro-batch gets a copy with the plan's (`of`)."""

    def key(self, request: Request) -> float:
        """Return what waiting requests are sorted by, the smallest first. It must not change while a request waits."""
        return 0.0

    def of(self, settings: LaneSettings, number: int) -> Self:
        rule = deepcopy(self)
        OneLaneRule.__init__(rule, settings, number)
        return rule


RULES: dict[type[SingleLane], type[OneLaneRule]] = {}
"""By settings: the rule of a policy whose steps no `LaneSettings` describe. It reads `LaneSettings.policy`."""


def rule_of(settings: LaneSettings, number: int = 0, own: Rule | None = None) -> OneLaneRule:
    if own is not None:
        return own.of(settings, number)
    return (OneLaneRule if settings.policy is None else RULES[type(settings.policy)])(settings, number)


def rest_of_prompt(request: Request) -> Chunk:
    return Chunk(request.id, request.encoded, request.context - request.encoded)
