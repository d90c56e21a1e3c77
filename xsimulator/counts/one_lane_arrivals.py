"""Simulate arriving requests by counts under rra, orca, chunked and static."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.policies.rule import ADJUSTMENT
from xsimulator.costs.step_cost import LaneCost
from xsimulator.costs.step_tables import NUM_PARTS, pass_stages, step_ns, step_tables
from xsimulator.counts.arrivals import BOTH, NONE, Kv, Run, Stream
from xsimulator.counts.chains import name
from xsimulator.counts.compiled import borrowed, helper, kept
from xsimulator.counts.counting import (
    admit,
    can_admit,
    count,
    decode_on,
    drop,
    end,
    join,
    leave,
    log,
    make_room,
    next_to_enter,
    prompt_of,
    put_piece,
    settled,
    take_ends,
    take_in,
)
from xsimulator.counts.in_time import NOT_IN_TIME, ORDERED, PAUSED, STOPPED_AT, InTime, plan
from xsimulator.counts.turns import FOREVER, next_arrival_ns

MANY = np.iinfo(np.int64).max // 2


class OneLaneRun(Run):
    """A run of rra, orca, chunked or static, with the same rule as `xgpt.core.policies.OneLane`."""

    known: ClassVar = frozenset(
        {
            "mix",
            "encode_every",
            "encode_tokens",
            "carried_batch",
            "decode_batch",
            "token_budget",
            "max_batch",
            "refill_when_empty",
            "microbatches",
            "encode_parts",
            "reuse_is_planned",
            "ahead",
            "prompts_first",
            "whole_prompts",
            "batch_wait_steps",
            "batch_wait_tokens",
            "receive_steps",
            "first_tokens",
        }
    )
    """The settings of a lane that a run by counts implements (see `is_counted`)."""

    def __init__(
        self, settings: LaneSettings, cost: LaneCost, kv: Kv, stream: Stream, patience_ns: int | None = None, **how: Any
    ) -> None:
        num_batches = settings.microbatches
        super().__init__(stream, kv, num_batches, num_batches * (settings.encode_parts + 2) + 2, **how)
        lane = self.state.lane[0]
        lane["mix"], lane["refills"], lane["ahead"] = settings.mix, settings.refill_when_empty, settings.ahead
        lane["prompts_first"], lane["reuse_is_planned"] = settings.prompts_first, settings.reuse_is_planned
        lane["whole_prompts"] = settings.whole_prompts
        lane["receive_steps"] = settings.receive_steps
        lane["batch_wait_steps"], lane["batch_wait_tokens"] = settings.batch_wait_steps, settings.batch_wait_tokens
        lane["encode_parts"], lane["adjustment"] = settings.encode_parts, ADJUSTMENT
        lane["max_batch"] = MANY if settings.max_batch is None else settings.max_batch
        for i, batch in enumerate(self.state.batches):
            lane_settings = settings.of_microbatch(i)
            batch["encode_every"] = batch["since_encode"] = lane_settings.encode_every
            batch["encode_tokens"], batch["carried_batch"] = (
                lane_settings.encode_tokens or 0.0,
                lane_settings.carried_batch,
            )
            batch["decode_batch"] = lane_settings.decode_batch
            batch["token_budget"] = MANY if lane_settings.token_budget is None else lane_settings.token_budget
            batch["max_batch"] = MANY if lane_settings.max_batch is None else lane_settings.max_batch
        self.tables, self.free_ns = step_tables(cost), np.zeros(cost.num_stages, np.int64)
        first = settings.first_tokens
        self._in_time = NOT_IN_TIME if first is None else InTime.of(first, patience_ns, stream)

    def _go_on(self) -> bool:
        return run(self.state, self.tables, self.free_ns, self._in_time)


@kept
def run(s, tables, free_ns, it):
    return go_on(borrowed(s), borrowed(tables), free_ns, borrowed(it))


@helper
def go_on(s, tables, free_ns, it):
    lane, scratch, costs_ns = s.lane[0], np.zeros((tables.num_groups, NUM_PARTS)), np.zeros(len(tables.kinds), np.int64)
    while lane.num_left and not lane.is_given_up:
        if lane.is_logged and lane.num_settled == len(s.log):
            return False
        take_in(s, lane)
        while issue(s, lane, tables, free_ns, scratch, costs_ns, it):
            pass
        is_under_way, arrival_ns = lane.first_step < lane.end_step, next_arrival_ns(s, lane)
        next_ns = s.steps[lane.first_step % len(s.steps)].end_ns
        if is_under_way and next_ns <= arrival_ns:
            lane.now_ns = next_ns
            settle(s, lane)
            take_in(s, lane)
            # Which request enters in time depends on the time.
            if not it.at_once or lane.head == lane.tail:
                decode_on(s, lane, tables, free_ns)
        elif arrival_ns < FOREVER:
            lane.now_ns = arrival_ns
        else:
            break
    return True


@helper
def issue(s, lane, tables, free_ns, scratch, costs_ns, it):
    if lane.refills and not lane.num_inside:
        refill(s, lane)
    num_batches = len(s.batches)
    for i in range(num_batches):
        number = (lane.turn + i) % num_batches
        batch = s.batches[number]
        if batch.steps > lane.ahead and not (lane.refills and batch.num_encoding > batch.num_issued):
            return False
        if batch.steps and lane.ahead and not lane.has_assumed:
            assume(s, lane, s.steps[(lane.end_step - 1) % len(s.steps)])
        if batch.steps and lane.by_use and not has_room(s, lane, batch):
            return False
        step = s.steps[lane.end_step % len(s.steps)]
        if next_step(s, lane, number, step, it):
            stays = lane.refills and batch.num_encoding > batch.num_issued
            lane.turn = number if stays else (number + 1) % num_batches
            batch.steps += 1
            lane.end_step += 1
            count(s, step, tables.has_encoder)
            step_ns(tables, step, s.pieces, scratch, costs_ns)
            step.start_ns = lane.now_ns
            step.end_ns = pass_stages(tables, free_ns, lane.now_ns, costs_ns, step.num_tokens)
            return True
    return False


@helper
def next_step(s, lane, number, step, it):
    """Write a micro-batch's next step into `step`, or return False if it has no next step now."""
    batch = s.batches[number]
    if it is not None:  # noqa: SIM102 the compiler prunes it
        if it.at_once:
            plan(s, lane, batch, it)
    may = may_encode(s, lane, number)
    if not is_running(batch) and not (may and can_admit(s, lane, it)):
        return False
    if it is not None:
        it.counts[STOPPED_AT] = lane.end_step
    is_apart = lane.mix and lane.prompts_first
    if not is_apart:
        make_room(s, lane, number)
    step.lane, step.batch, step.first_piece = BOTH, number, lane.num_pieces
    if lane.mix:
        if not waits_for_others(s, lane, batch):
            fill(s, lane, batch, it)
    elif lane.refills:
        next_part(s, lane, batch)
    elif may and is_phase_over(batch):
        batch.phase += 1
        begin_phase(s, lane, batch)
    step.last_piece = lane.num_pieces
    encodes = step.last_piece > step.first_piece
    mixes = lane.mix and not (encodes and lane.prompts_first)
    step.does_decode = batch.decoding > 0 and (mixes or not (encodes or batch.num_encoding > 0))
    if is_apart and step.does_decode:
        make_room(s, lane, number)
        step.does_decode = batch.decoding > 0
    if not encodes and not step.does_decode:
        return False
    batch.since_encode = 0 if encodes else batch.since_encode + 1
    return True


@helper
def num_running(batch):
    return batch.num_encoding + batch.decoding + batch.held + batch.ending


@helper
def is_running(batch):
    return num_running(batch) > 0


@helper
def is_phase_over(batch):
    return not is_running(batch) or batch.since_encode >= batch.encode_every


@helper
def may_encode(s, lane, number):
    """Return whether a micro-batch may begin a phase. Under rra, all micro-batches begin their phases together."""
    if len(s.batches) == 1 or lane.mix or lane.refills:
        return True
    for i in range(len(s.batches)):
        if s.batches[i].phase <= s.batches[number].phase and not is_phase_over(s.batches[i]):
            return False
    return True


@helper
def waits_for_others(s, lane, batch):
    """Return whether waiting prompts stay out of this step: if the engine does not check for new requests now, or if
    more prompts should be encoded together. Count the consecutive steps in which prompts wait for more prompts.
    """
    if batch.since_encode % lane.receive_steps and batch.decoding > 0:
        return True
    most = batch.max_batch - num_running(batch)
    waits = batch.waited < lane.batch_wait_steps and batch.decoding > 0 and most > 0 and can_admit(s, lane)
    if waits:
        tokens = batch.decoding
        for id_ in range(lane.head, min(lane.tail, lane.head + most)):
            tokens += s.requests[id_].input
        waits = tokens < lane.batch_wait_tokens
    batch.waited = batch.waited + 1 if waits else 0
    return waits


@helper
def fill(s, lane, batch, it):
    left = batch.token_budget - (0 if lane.prompts_first else batch.decoding)
    pauses = False
    if it is not None:
        pauses = it.counts[PAUSED] > 0
    if not pauses:
        left = admit_to(s, lane, batch, continue_prompts(s, lane, batch, left, False, None), False, it)
    elif it is not None:
        last = batch.last  # requests that enter now are not continued
        left = admit_to(s, lane, batch, continue_prompts(s, lane, batch, left, False, it), True, it)
        left = continue_prompts(s, lane, batch, left, True, it, last)
        admit_to(s, lane, batch, left, False, it)


@helper
def continue_prompts(s, lane, batch, left, are_paused, it, last=NONE):
    id_ = batch.first
    while id_ != NONE and left > 0:
        request = s.requests[id_]
        chosen = True
        if it is not None:
            chosen = it.gives_way[id_] == are_paused
        if chosen:
            length = min(prompt_of(request) - request.encoded, left)
            put_piece(s, lane, id_, request.encoded, length)
            left -= length
        id_ = NONE if id_ == last else request.after
    return left


@helper
def admit_to(s, lane, batch, left, only_in_time, it):
    """Admit requests, encode as much of their prompts as the budget allows, and return the rest of the budget."""
    while left > 0 and num_running(batch) < batch.max_batch:
        id_ = next_to_enter(s, lane, it)
        if id_ == NONE:
            break
        if it is not None:  # noqa: SIM102 the compiler prunes it
            if only_in_time and it.counts[ORDERED] and it.gives_way[id_]:
                break
        if lane.whole_prompts and left < min(s.requests[id_].input, batch.token_budget):
            break
        id_ = admit(s, lane, it)
        if id_ == NONE:
            break
        line_up(s, batch, id_)
        request = s.requests[id_]
        length = min(prompt_of(request) - request.encoded, left)
        put_piece(s, lane, id_, request.encoded, length)
        left -= length
    return left


@helper
def begin_phase(s, lane, batch):
    target, excess = batch.encode_tokens, batch.decoding - batch.carried_batch
    if abs(excess) > lane.adjustment * batch.decode_batch:
        target *= 1 - lane.adjustment if excess > 0 else 1 + lane.adjustment
    batch.credit += target
    is_first = True
    while lane.head < lane.tail:
        request = s.requests[lane.head]
        length = request.input - (request.cached if lane.reuse_is_planned else 0)
        if batch.credit < length / 2 and not (is_first and not batch.decoding):
            batch.since_encode = 0
            return
        id_ = admit(s, lane)
        if id_ == NONE:
            break
        line_up(s, batch, id_)
        put_piece(s, lane, id_, request.cached, request.input - request.cached)
        batch.credit -= length
        is_first = False
    batch.credit = min(batch.credit, 0.0)


@helper
def refill(s, lane):
    """Admit a batch and divide it among the micro-batches (static)."""
    first, entered = lane.head, 0
    while entered < lane.max_batch and admit(s, lane) != NONE:
        entered += 1
    for i in range(entered):
        line_up(s, s.batches[i * len(s.batches) // entered], first + i)
    lane.turn = 0


@helper
def next_part(s, lane, batch):
    size = -(-num_running(batch) // lane.encode_parts)
    while size and batch.unissued != NONE:
        request = s.requests[batch.unissued]
        put_piece(s, lane, batch.unissued, request.cached, request.input - request.cached)
        batch.unissued = request.after
        batch.num_issued += 1
        size -= 1


@helper
def line_up(s, batch, id_):
    request = s.requests[id_]
    request.encoded, request.after = request.cached, NONE
    if batch.first == NONE:
        batch.first = id_
    else:
        s.requests[batch.last].after = id_
    if batch.unissued == NONE:
        batch.unissued = id_
    batch.last = id_
    batch.num_encoding += 1


@helper
def take_out(s, batch, id_):
    if batch.first == id_:
        batch.first = s.requests[id_].after
        return
    before = batch.first
    while s.requests[before].after != id_:
        before = s.requests[before].after
    s.requests[before].after = s.requests[id_].after
    if batch.last == id_:
        batch.last = before


@helper
def settle(s, lane):
    step = s.steps[lane.first_step % len(s.steps)]
    lane.first_step += 1
    batch = s.batches[step.batch]
    batch.steps -= 1
    log(s, lane, step)
    if lane.ahead:
        settle_ahead(s, lane, step)
    else:
        if step.does_decode:
            advance(batch)
            batch.context += batch.decoding + batch.held
        finish(s, lane, step.batch, join_encoded(s, lane, step, lane.now_ns))
        if lane.refills and not is_any_left(s):
            end_batch(s, lane)
    settled(s, lane, step)


@helper
def advance(batch):
    batch.iteration, batch.granted = batch.iteration + 1, 0


@helper
def join_encoded(s, lane, step, now_ns):
    """Record that a step has encoded its prompt chunks. Requests whose prompts end begin to decode. Return the requests
    that end with the step, first those whose only token it computes.
    """
    batch = s.batches[step.batch]
    if step.first_piece == step.last_piece:
        return take_ends(s, step.batch)
    others = take_ends(s, step.batch)
    for i in range(step.first_piece, step.last_piece):
        piece = s.pieces[i % len(s.pieces)]
        request = s.requests[piece.request]
        request.encoded = piece.start + piece.length
        if lane.has_chains:
            name(s, lane, piece.request, min(request.encoded, request.input) // lane.block_size)
        if request.encoded < prompt_of(request):
            continue
        take_out(s, batch, piece.request)
        if batch.unissued == piece.request:
            batch.unissued = request.after
        batch.num_encoding -= 1
        if lane.refills:
            batch.num_issued -= 1
        if not request.made:
            request.first_ns = now_ns
        join(s, step.batch, piece.request, request.made + 1)
    first = last = take_ends(s, step.batch)
    if first == NONE:
        return others
    while s.requests[last].ends_with != NONE:
        last = s.requests[last].ends_with
    s.requests[last].ends_with = others
    return first


@helper
def finish(s, lane, number, id_):
    """End the requests that have their last token now. Requests of a static batch keep their slots."""
    batch = s.batches[number]
    while id_ != NONE:
        drop(s, batch, id_)
        end(s, lane, id_)
        request = s.requests[id_]
        if lane.refills:
            batch.held += 1
            batch.context += request.input + request.output
            batch.inputs += request.input
        else:
            leave(s, lane, id_)
        id_ = request.ends_with


@helper
def is_any_left(s):
    left = 0
    for batch in s.batches:
        left += batch.decoding + batch.num_encoding
    return left > 0


@helper
def end_batch(s, lane):
    for i in range(len(s.batches)):
        batch = s.batches[i]
        batch.held = batch.context = batch.inputs = 0
    lane.reserved = lane.num_inside = 0


@helper
def assume(s, lane, step):
    """Count tokens of a running step before it ends, as if a request ended only when it reaches its longest output."""
    batch = s.batches[step.batch]
    if step.does_decode:
        advance(batch)
        batch.context += batch.decoding
    lane.has_assumed, lane.assumed_ends = 1, join_encoded(s, lane, step, NONE)
    id_ = lane.assumed_ends
    while id_ != NONE:
        request = s.requests[id_]
        if request.output == request.most:
            drop(s, batch, id_)
            batch.ending += 1
        id_ = request.ends_with


@helper
def has_room(s, lane, batch):
    """Return whether all decoding requests could get their next blocks, even those that end in the running step."""
    missing, id_ = s.grows[batch.number, batch.iteration % s.grows.shape[1]], lane.assumed_ends
    while id_ != NONE:
        request = s.requests[id_]
        if request.output == request.most and (request.input + request.output - 1) % s.grows.shape[1] == 0:
            missing += 1
        id_ = request.ends_with
    return lane.reserved + missing <= lane.blocks


@helper
def decodes_already(s, lane, number):
    for i in range(lane.first_step, lane.end_step):
        step = s.steps[i % len(s.steps)]
        if step.batch == number:
            return step.does_decode
    return False


@helper
def settle_ahead(s, lane, step):
    if not lane.has_assumed:
        assume(s, lane, step)
    lane.has_assumed, batch = 0, s.batches[step.batch]
    for i in range(step.first_piece, step.last_piece):
        piece = s.pieces[i % len(s.pieces)]
        request = s.requests[piece.request]
        if piece.start + piece.length == request.input and not request.made:
            request.first_ns = lane.now_ns
    id_ = lane.assumed_ends
    while id_ != NONE:
        request = s.requests[id_]
        if request.output == request.most:
            batch.ending -= 1
        else:
            drop(s, batch, id_)
        end(s, lane, id_)
        # The next step, which runs already, includes the request if it decodes.
        leave(s, lane, id_, 1 if request.output < request.most and decodes_already(s, lane, step.batch) else 0)
        id_ = request.ends_with
