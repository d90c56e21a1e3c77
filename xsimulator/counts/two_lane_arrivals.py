"""Simulate arriving requests by counts under waa."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from xgpt.core.policies.waa import TwoLaneSettings
from xsimulator.costs.step_cost import LaneCost, TransferCost
from xsimulator.costs.step_tables import NUM_PARTS, line_value, pass_stages, step_ns, step_tables
from xsimulator.counts.arrivals import DECODE, ENCODE, NONE, TRANSFER, Kv, Run, Stream
from xsimulator.counts.compiled import borrowed, helper, kept
from xsimulator.counts.counting import (
    admit,
    blocks_of,
    can_admit,
    count,
    drop,
    end,
    join,
    leave,
    log,
    put_piece,
    settled,
    take_ends,
    take_in,
)


class TwoLaneRun(Run):
    """A run of waa, with the same rule as `xgpt.core.policies.waa.TwoLane`."""

    known: ClassVar = frozenset(
        {
            "encode_tokens",
            "encode_stages",
            "encode_blocks",
            "max_decode_batch",
            "decode_batch",
            "adjustment",
            "decode_microbatches",
            "buffer_iterations",
            "encoder_only",
            "reuse_is_planned",
        }
    )
    """The settings of the two lanes that a run by counts implements (see `is_counted`)."""

    def __init__(
        self, settings: TwoLaneSettings, encode: LaneCost, decode: LaneCost, kv: Kv, stream: Stream, **how: bool
    ) -> None:
        num_batches = settings.decode_microbatches + settings.encode_stages
        super().__init__(stream, kv, num_batches, num_batches + 2, **how)
        self.state.steps["end_ns"] = NONE
        lane = self.state.lane[0]
        transfer = TransferCost(encode, decode)
        lane["num_decode"], lane["max_batch"] = settings.decode_microbatches, settings.max_decode_batch
        lane["encode_tokens"], lane["most_encode_blocks"] = settings.encode_tokens, settings.encode_blocks
        lane["emits"], lane["reuse_is_planned"] = not settings.encoder_only, settings.reuse_is_planned
        lane["occupies"] = transfer.occupies
        lane["adjustment"], lane["decode_batch"] = settings.adjustment, settings.decode_batch
        lane["buffer_steps"] = settings.buffer_iterations * settings.decode_microbatches
        self._transfer = transfer.line.points, transfer.line.values
        self._encode, self._decode = step_tables(encode), step_tables(decode)
        self._encode_free_ns, self._decode_free_ns = (np.zeros(each.num_stages, np.int64) for each in (encode, decode))

    def _go_on(self) -> bool:
        lanes = self._encode, self._decode, self._encode_free_ns, self._decode_free_ns
        return run(self.state, *lanes, *self._transfer)


@kept
def run(s, encode, decode, encode_free_ns, decode_free_ns, tokens_moved, moved_s):
    lanes = borrowed(encode), borrowed(decode), encode_free_ns, decode_free_ns
    return go_on(borrowed(s), lanes[0], lanes[1], lanes[2], lanes[3], tokens_moved, moved_s)


@helper
def go_on(s, encode, decode, encode_free_ns, decode_free_ns, tokens_moved, moved_s):
    lane = s.lane[0]
    scratch = np.zeros((max(encode.num_groups, decode.num_groups), NUM_PARTS))
    costs_ns = np.zeros(max(len(encode.kinds), len(decode.kinds)), np.int64)
    while lane.num_left and not lane.is_given_up:
        if lane.is_logged and lane.num_settled == len(s.log):
            return False
        take_in(s, lane)
        while True:
            step = s.steps[free_slot(s)]
            if not next_decode(s, lane, step):
                break
            begin(s, lane, step, decode, decode_free_ns, scratch, costs_ns)
        if next_transfer(s, lane, step):
            seconds = line_value(tokens_moved, moved_s, 0, len(moved_s), step.num_tokens)
            if lane.occupies:
                occupy(encode_free_ns, lane.now_ns, seconds)
                occupy(decode_free_ns, lane.now_ns, seconds)
            step.start_ns, step.number = lane.now_ns, lane.num_begun
            step.end_ns = lane.now_ns + max(1, np.int64(np.rint(seconds * 1e9)))
            lane.num_begun += 1
        while True:
            step = s.steps[free_slot(s)]
            if not next_encode(s, lane, step):
                break
            begin(s, lane, step, encode, encode_free_ns, scratch, costs_ns)
        first = next_end(s)
        if first != NONE and (
            lane.tail == len(s.requests) or s.steps[first].end_ns <= s.requests[lane.tail].arrival_ns
        ):
            lane.now_ns = s.steps[first].end_ns
            settle(s, lane, s.steps[first])
        elif lane.tail < len(s.requests):
            lane.now_ns = s.requests[lane.tail].arrival_ns
        else:
            break
    return True


@helper
def free_slot(s):
    i = 0
    while s.steps[i].end_ns != NONE:
        i += 1
    return i


@helper
def next_end(s):
    """Return the step that ends first, or NONE if no step runs. If several end together, the one that began first."""
    found = NONE
    for i in range(len(s.steps)):
        step = s.steps[i]
        if step.end_ns == NONE:
            continue
        if (
            found == NONE
            or step.end_ns < s.steps[found].end_ns
            or (step.end_ns == s.steps[found].end_ns and step.number < s.steps[found].number)
        ):
            found = i
    return found


@helper
def occupy(free_ns, now_ns, seconds):
    for i in range(len(free_ns)):
        free_ns[i] = max(free_ns[i], now_ns) + np.int64(np.rint(seconds * 1e9))


@helper
def begin(s, lane, step, tables, free_ns, scratch, costs_ns):
    count(s, step, tables.has_encoder)
    if tables.has_encoder and step.lane == ENCODE:
        step.sampled = step.decodes
    step_ns(tables, step, s.pieces, scratch, costs_ns)
    step.start_ns, step.number = lane.now_ns, lane.num_begun
    if step.lane == ENCODE and tables.is_grouped:
        group = step.batch - lane.num_decode
        step.end_ns = free_ns[group] = max(lane.now_ns, free_ns[group]) + costs_ns[tables.kind_of[group]]
    else:
        step.end_ns = pass_stages(tables, free_ns, lane.now_ns, costs_ns, step.num_tokens)
    s.batches[step.batch].steps += 1
    lane.num_begun += 1


@helper
def next_decode(s, lane, step):
    """Write the decode lane's next step into `step`, or return False if no step can begin."""
    num_batches = lane.num_decode
    for i in range(num_batches):
        number = (lane.turn + i) % num_batches
        batch, num_arrived = s.batches[number], lane.num_arrived - lane.num_joined
        if batch.steps:
            return False
        if not batch.decoding and not num_arrived:
            continue
        num_decoding = num_arrived + in_decode(s, lane)
        all_join = num_decoding == num_arrived  # without decode steps, the buffer time would never pass
        share = -(-num_decoding // num_batches)
        step.first_moved, step.joining = lane.num_joined, 0
        while lane.num_joined < lane.num_arrived and batch.decoding < share:
            id_ = s.moved[lane.num_joined]
            if not all_join and s.requests[id_].joins_at > lane.num_decode_steps:
                break
            join(s, number, id_, lane.emits)
            request = s.requests[id_]
            request.joined_batch, request.joined_step = number, batch.num_decode_steps
            step.joining += 0 if lane.emits else request.input
            lane.num_joined += 1
        if not batch.decoding:
            continue
        lane.turn = (number + 1) % num_batches
        lane.num_decode_steps += 1
        step.lane, step.batch, step.does_decode, step.last_moved = DECODE, number, True, lane.num_joined
        step.first_piece = step.last_piece = lane.num_pieces
        return True
    return False


@helper
def next_transfer(s, lane, step):
    """Write the next transfer into `step`, for all requests encoded since the last transfer began. Return False if
    there are no such requests or a transfer is running.
    """
    if lane.num_moving > lane.num_arrived or lane.num_encoded == lane.num_moving:
        return False
    step.lane, step.batch, step.does_decode, step.decodes, step.num_tokens = TRANSFER, 0, False, 0, 0
    step.first_piece = step.last_piece = lane.num_pieces
    for i in range(lane.num_moving, lane.num_encoded):
        step.num_tokens += s.requests[s.moved[i]].input
    lane.num_moving = lane.num_encoded
    return True


@helper
def next_encode(s, lane, step):
    """Write the encode lane's next step into `step`, or return False if no step can begin."""
    num_batches, i = len(s.batches) - lane.num_decode, 0
    while i < num_batches and s.batches[lane.num_decode + (lane.encode_turn + i) % num_batches].steps:
        i += 1
    if i == num_batches or not can_admit(s, lane):
        return False
    turn = (lane.encode_turn + i) % num_batches
    number = lane.num_decode + turn
    due, blocks = num_due(s, lane), 0
    if lane.num_inside and lane.num_inside + due > lane.max_batch:
        return False
    for i in range(lane.head, lane.head + due):
        blocks += blocks_of(lane, s.requests[i].input)
    if lane.encode_blocks + blocks > lane.most_encode_blocks:
        return False
    lane.credit += encode_target(s, lane)
    step.first_piece = lane.num_pieces
    while lane.num_pieces < step.first_piece + due:
        id_ = admit(s, lane)
        if id_ == NONE:
            break
        request = s.requests[id_]
        request.joins_at = lane.num_decode_steps + lane.buffer_steps
        lane.credit -= planned_length(lane, request)
        lane.encode_blocks += blocks_of(lane, request.input)
        put_piece(s, lane, id_, request.cached, request.input - request.cached)
    if lane.head == lane.tail or lane.credit >= planned_length(lane, s.requests[lane.head]) / 2:
        lane.credit = min(lane.credit, 0.0)
    lane.encode_turn = (turn + 1) % num_batches
    step.lane, step.batch, step.does_decode, step.joining = ENCODE, number, False, 0
    step.last_piece = lane.num_pieces
    return True


@helper
def in_decode(s, lane):
    found = 0
    for i in range(lane.num_decode):
        found += s.batches[i].decoding
    return found


@helper
def encode_target(s, lane):
    """Return the token budget of the next encode batch. It is smaller if many requests decode, and larger if few do."""
    excess = lane.num_arrived - lane.num_joined + in_decode(s, lane) - lane.decode_batch
    if not lane.adjustment or abs(excess) <= lane.adjustment * lane.decode_batch:
        return lane.encode_tokens
    return lane.encode_tokens * (1 - lane.adjustment if excess > 0 else 1 + lane.adjustment)


@helper
def planned_length(lane, request):
    return request.input - (request.cached if lane.reuse_is_planned else 0)


@helper
def num_due(s, lane):
    """Return the number of requests that the next encode batch takes."""
    credit, found, blocks = lane.credit + encode_target(s, lane), 0, 0
    for id_ in range(lane.head, min(lane.tail, lane.head + lane.max_batch + 1)):
        request = s.requests[id_]
        blocks += blocks_of(lane, request.input)
        fits = found < lane.max_batch and blocks <= lane.most_encode_blocks
        if found and not (fits and credit >= planned_length(lane, request) / 2):
            break
        credit -= planned_length(lane, request)
        found += 1
    return found


@helper
def settle(s, lane, step):
    log(s, lane, step)
    batch = s.batches[step.batch]
    if step.lane == TRANSFER:
        for i in range(lane.num_arrived, lane.num_moving):
            lane.encode_blocks -= blocks_of(lane, s.requests[s.moved[i]].input)
        lane.num_arrived = lane.num_moving
    elif step.lane == ENCODE:
        batch.steps -= 1
        for i in range(step.first_piece, step.last_piece):
            end_prompt(s, lane, s.pieces[i % len(s.pieces)].request)
    else:
        batch.steps -= 1
        for i in range(step.first_moved, step.last_moved if not lane.emits else step.first_moved):
            s.requests[s.moved[i]].first_ns = lane.now_ns
        batch.iteration += 1
        batch.context += batch.decoding
        id_ = take_ends(s, step.batch)
        while id_ != NONE:
            drop(s, batch, id_)
            end(s, lane, id_)
            leave(s, lane, id_)
            id_ = s.requests[id_].ends_with
    settled(s, lane, step)
    step.end_ns = NONE


@helper
def end_prompt(s, lane, id_):
    """Record that a prompt is encoded. If the encode step also computes the request's only token, end the request."""
    request = s.requests[id_]
    if lane.emits:
        request.first_ns = lane.now_ns
        if request.output == 1:
            lane.encode_blocks -= blocks_of(lane, request.input)
            end(s, lane, id_)
            leave(s, lane, id_)
            return
    s.moved[lane.num_encoded] = id_
    lane.num_encoded += 1
