"""The single-lane rule: rra, orca, chunked and static are settings of it.

It answers one question: given the requests of a worker group, what does the next step encode, and what does it
decode? The rule reads no clock and draws no random number: the same submissions, steps and endings give the
same schedule on the simulated clock and on the real one.
"""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.errors import InputError
from xgpt.policies.pool import Pool
from xgpt.policies.request import Chunk, Request, Step
from xgpt.schema import (
    ChunkedSettings,
    OrcaSettings,
    Plan,
    RraSettings,
    SingleLaneSettings,
    StaticSettings,
    WaaSettings,
)

ADJUSTMENT = 0.1
"""Relative deviation of the decode batch beyond which the encode batch is adjusted, and by how much.

Source: ExeGPT sec. 5.2, which names the threshold but no figure.
"""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What distinguishes one single-lane policy from another.

    Attributes:
        mix: a step may both encode and decode.
        encode_every: decode iterations between two steps that encode (only without `mix`).
        encode_tokens: prompt tokens that a step which encodes takes on average; None: no such target.
        carried_batch: requests still in decode when a phase begins, on average; used with `encode_tokens`.
        decode_batch: requests in decode after that phase's encoding, on average; used with `encode_tokens`.
        token_budget: tokens in a step at most; prompts are cut to fit. None: whole prompts.
        max_batch: requests in the lane at most.
        refill_when_empty: nobody enters before the whole batch has finished.
    """

    mix: bool
    encode_every: int = 1
    encode_tokens: float | None = None
    carried_batch: float = 0.0
    decode_batch: float = 0.0
    token_budget: int | None = None
    max_batch: int | None = None
    refill_when_empty: bool = False


def lane_settings(settings: SingleLaneSettings, encode_tokens: float, decode_batch: float) -> LaneSettings:
    """A plan's settings as the rule takes them.

    Args:
        encode_tokens: the plan's mean prompt tokens a step that encodes (rra only).
        decode_batch: the plan's requests in decode at the start of a phase (rra only).
    """
    match settings:
        case RraSettings():
            return LaneSettings(
                mix=False,
                encode_every=settings.decode_iterations,
                encode_tokens=encode_tokens,
                carried_batch=decode_batch - settings.encode_batch,
                decode_batch=decode_batch,
            )
        case OrcaSettings():
            return LaneSettings(mix=True, max_batch=settings.max_batch)
        case ChunkedSettings():
            return LaneSettings(mix=True, token_budget=settings.token_budget, max_batch=settings.max_batch)
        case StaticSettings():
            return LaneSettings(mix=False, max_batch=settings.batch, refill_when_empty=True)


class OneLaneRule:
    """Decides each step of one worker group. Keeps two numbers between steps: the phase and the credit."""

    def __init__(self, settings: LaneSettings) -> None:
        self.settings = settings
        self._iterations = settings.encode_every
        """Decode iterations since the last step that encoded."""
        self._credit = 0.0
        """Prompt tokens that earlier phases encoded too few (or, below zero, too many) of their target."""

    def next_step(self, pool: Pool) -> Step | None:
        """The next step, or None where nothing can run. Admits the requests that the step begins to encode."""
        if pool.is_idle:
            return None  # asking an idle engine must not count as a phase: how often one asks depends on the clock
        settings = self.settings
        preempted = pool.make_room()
        encode: tuple[Chunk, ...] = ()
        if settings.mix:
            encode = self._fill(pool)
        elif settings.refill_when_empty:
            if not pool.decoding:
                encode = self._fill(pool)
        elif not pool.decoding or self._iterations >= settings.encode_every:
            encode = self._phase(pool)

        decode: tuple[int, ...] = ()
        if settings.mix or not encode:
            decode = tuple(pool.decoding)
            if pool.held:
                decode += tuple(r.id for r in pool.held.values() if r.generated < r.max_output)
        if not encode and not decode:
            return None
        self._iterations = 0 if encode else self._iterations + 1
        return Step(encode, decode, preempted)

    def _fill(self, pool: Pool) -> tuple[Chunk, ...]:
        """Prompts up to the token budget and the largest batch."""
        budget = self.settings.token_budget
        left = None if budget is None else budget - len(pool.decoding)
        chunks: list[Chunk] = []
        for request in pool.encoding.values():
            if left is not None and left <= 0:
                return tuple(chunks)
            chunks.append(_next_chunk(request, left))
            left = None if left is None else left - chunks[-1].length
        while (left is None or left > 0) and self._has_slot(pool):
            admitted = pool.admit()
            if admitted is None:
                break
            chunks.append(_next_chunk(admitted, left))
            left = None if left is None else left - chunks[-1].length
        return tuple(chunks)

    def _has_slot(self, pool: Pool) -> bool:
        return self.settings.max_batch is None or pool.num_running < self.settings.max_batch

    def _phase(self, pool: Pool) -> tuple[Chunk, ...]:
        """Whole prompts worth the phase's token target; what is left over or missing moves to the next phase.

        Taking a prompt only where at least half of it is covered keeps every phase within half a prompt of the
        target and the average on it, so that ragged inputs cost neither throughput nor a stalled decode batch.
        """
        settings = self.settings
        assert settings.encode_tokens is not None
        target = settings.encode_tokens
        deviation = len(pool.decoding) - settings.carried_batch
        if abs(deviation) > ADJUSTMENT * settings.decode_batch:
            target *= 1 - ADJUSTMENT if deviation > 0 else 1 + ADJUSTMENT
        self._credit += target
        chunks: list[Chunk] = []
        while pool.waiting:
            length = pool.waiting[0].context
            must_start = not chunks and not pool.decoding
            if self._credit < length / 2 and not must_start:
                self._iterations = 0
                return tuple(chunks)
            admitted = pool.admit()
            if admitted is None:
                break
            chunks.append(_next_chunk(admitted, None))
            self._credit -= length
        # Nobody left to encode (or no memory for them): tokens not spent now would be a burst later.
        self._credit = min(self._credit, 0.0)
        return tuple(chunks)


def _next_chunk(request: Request, limit: int | None) -> Chunk:
    missing = request.context - request.encoded
    return Chunk(request.id, request.encoded, missing if limit is None else min(missing, limit))


def build(plan: Plan) -> tuple[OneLaneRule, Pool]:
    """The rule and the empty pool of a plan: what both engines start from.

    Raises:
        InputError: the plan's policy needs more than one lane, or its K/V promise does not go with its model.
    """
    if isinstance(plan.policy, WaaSettings):
        raise InputError("plan.policy", plan.policy.kind, "this engine runs rra, orca, chunked and static")
    if plan.admission.kv != "reserve" and plan.model.is_encoder_decoder:
        # The step that ends a prompt also caches the token that the decoder starts with: one more than the prompt's
        # blocks hold, and what a preempted request had generated would be no prompt for its encoder.
        raise InputError("plan.admission.kv", plan.admission.kv, f"{plan.model.name} has an encoder: take 'reserve'")
    settings = lane_settings(plan.policy, plan.estimate.encode_tokens, plan.estimate.decode_batch)
    pool = Pool(
        plan.stages[0].kv_blocks,
        plan.block_size,
        kv=plan.admission.kv,
        max_running=plan.admission.max_running,
        hold_finished=settings.refill_when_empty,
    )
    return OneLaneRule(settings), pool
