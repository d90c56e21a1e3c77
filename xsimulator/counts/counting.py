"""Parts of the compiled runs: admission, memory, endings and a step's counts, for one lane and for two lanes, and
stretches of steps that only decode, for one lane.

Until a request joins or ends, every step of a stretch decodes the same requests.
"""

from __future__ import annotations

import numpy as np

from xsimulator.costs.step_tables import DECODE, HEAD, LAST, NUM_LINES, REST, line_at, stretch_of
from xsimulator.counts.arrivals import BOTH, NONE
from xsimulator.counts.chains import look_up, name, release, share
from xsimulator.counts.compiled import helper
from xsimulator.counts.in_time import enter_in_time, next_in_time
from xsimulator.counts.turns import FOREVER, arrive, evict, find, follow, grow, keep, next_arrival_ns


@helper
def blocks_of(lane, tokens):
    return -(-tokens // lane.block_size)


@helper
def next_waiting(lane):
    if lane.preempted != NONE:
        return lane.preempted
    return lane.head if lane.head < lane.tail else NONE


@helper
def prompt_of(request):
    """Return the number of tokens that an entering request must encode: prompt and, after a preemption, output."""
    return request.input + request.made


@helper
def blocks_to_enter(s, lane, id_):
    request = s.requests[id_]
    blocks = blocks_of(lane, prompt_of(request) if lane.by_use else request.input + request.most) - lane.shared
    if lane.has_chains:
        look_up(s, lane, id_)
        blocks -= lane.num_found_used
    return blocks


@helper
def fits(s, lane, id_):
    spare = lane.spare + lane.spare_each * lane.num_inside if lane.num_inside else 0
    return lane.reserved + blocks_to_enter(s, lane, id_) + spare <= lane.blocks


@helper
def next_to_enter(s, lane, it):
    if it is None:
        return next_waiting(lane)
    else:
        return next_in_time(s, lane, it) if it.at_once else next_waiting(lane)


@helper
def can_admit(s, lane, it=None):
    id_ = next_to_enter(s, lane, it)
    return id_ != NONE and fits(s, lane, id_)


@helper
def admit(s, lane, it=None):
    """Admit and return the next waiting request, or return NONE if it cannot enter."""
    id_ = next_to_enter(s, lane, it)
    if id_ == NONE or not fits(s, lane, id_):
        return NONE
    lane.reserved += blocks_to_enter(s, lane, id_)
    lane.num_inside += 1
    if lane.has_turns or lane.has_chains:
        request = s.requests[id_]
        if lane.has_turns:
            find(s, lane, id_, prompt_of(request))
        else:
            share(s, lane, id_)
        lane.num_used += blocks_of(lane, prompt_of(request) + (0 if lane.by_use else 1)) - lane.shared
        if lane.has_chains:
            lane.num_used -= request.cached // lane.block_size
        evict(s, lane)
    if lane.preempted != NONE:
        lane.preempted = s.requests[id_].after
    else:
        lane.head += 1
    if it is not None:  # noqa: SIM102 the compiler prunes it
        if it.at_once:
            enter_in_time(it, id_)
    return id_


@helper
def leave(s, lane, id_, more=0):
    """Free a request's blocks. If `by_use`, these contain all its tokens except the last, and `more` further tokens."""
    request = s.requests[id_]
    blocks = blocks_of(lane, request.input + (request.output - 1 + more if lane.by_use else request.most))
    has = blocks if lane.by_use else min(blocks, blocks_of(lane, request.input + request.output + more))
    lane.num_inside -= 1
    if lane.has_chains:
        name(s, lane, id_, (request.input + request.output - 1) // lane.block_size)
        lane.reserved -= blocks - has + release(s, lane, id_, has)
        return
    lane.reserved -= blocks - lane.shared
    if lane.has_turns:
        lane.num_used -= has - lane.shared
        whole = (request.input + request.output - 1) // lane.block_size
        keep(s, lane, s.turns[request.turn].session, whole - lane.shared)


@helper
def grows_in(s, batch, context):
    """Return the iteration, modulo a block's tokens, in which a request with `context` tokens takes its next block. If
    the block is reserved, it takes it an iteration earlier.
    """
    return (batch.iteration - context + s.lane[0].by_use) % s.grows.shape[1]


@helper
def preempt(s, lane, number):
    """Preempt the request that entered last, and put it at the head of the queue. Call this between steps."""
    batch, id_ = s.batches[number], lane.head - 1
    lane.num_inside -= 1
    if batch.num_encoding:
        id_, before = batch.first, NONE
        while s.requests[id_].after != NONE:
            id_, before = s.requests[id_].after, id_
        if before == NONE:
            batch.first = NONE
        else:
            s.requests[before].after, batch.last = NONE, before
        batch.num_encoding -= 1
        give_back(s, lane, id_, prompt_of(s.requests[id_]), s.requests[id_].encoded)
    else:
        while s.requests[id_].ends_at == NONE:
            id_ -= 1
        request = s.requests[id_]
        at = request.ends_at % s.ends.shape[1]
        if s.ends[number, at] == id_:
            s.ends[number, at] = request.ends_with
        else:
            before = s.ends[number, at]
            while s.requests[before].ends_with != id_:
                before = s.requests[before].ends_with
            s.requests[before].ends_with = request.ends_with
        request.made = request.output - (request.ends_at - batch.iteration)
        request.ends_at = NONE
        context = request.input + request.made
        batch.decoding -= 1
        batch.context -= context
        batch.inputs -= request.input
        s.grows[batch.number, grows_in(s, batch, context)] -= 1
        give_back(s, lane, id_, context - 1, context)
    s.requests[id_].after, lane.preempted = lane.preempted, id_


@helper
def give_back(s, lane, id_, tokens, computed):
    """Free the blocks of a preempted request. Those of the prompt that it has computed stay."""
    request, blocks = s.requests[id_], blocks_of(lane, tokens) - lane.shared
    if lane.has_chains:
        lane.reserved -= release(s, lane, id_, blocks)
        return
    lane.reserved -= blocks
    if lane.has_turns:
        lane.num_used -= blocks
        kept = min(request.input, computed) // lane.block_size - lane.shared
        keep(s, lane, s.turns[request.turn].session, kept)


@helper
def make_room(s, lane, number):
    """Give every request the block for its next token. While blocks are lacking, preempt the request that entered
    last. Reserved blocks are never lacking.
    """
    batch = s.batches[number]
    if lane.by_use:
        at = batch.iteration % s.grows.shape[1]
        while lane.reserved + s.grows[batch.number, at] > lane.blocks and lane.num_inside > 1:
            preempt(s, lane, number)
        lane.reserved += s.grows[batch.number, at]
    if lane.has_turns or lane.has_chains:
        grow(s, lane, batch, 1)


@helper
def take_in(s, lane):
    while next_arrival_ns(s, lane) <= lane.now_ns:
        if lane.has_turns:
            arrive(s, lane)
        lane.tail += 1


@helper
def end(s, lane, id_):
    request, now_ns = s.requests[id_], lane.now_ns
    request.ends_at = NONE
    request.end_ns, request.last_step = now_ns, lane.num_settled
    if lane.has_turns:
        follow(s, lane, id_)
    elif lane.num_sent < len(s.requests):
        s.requests[lane.num_sent].arrival_ns = now_ns + lane.path_ns
        lane.num_sent += 1
    if not lane.first_counted <= id_ < lane.last_counted:
        return
    lane.num_left -= 1
    whole_ns, waited_ns = now_ns - request.arrival_ns, request.first_ns - request.arrival_ns
    gaps_ns, gaps = now_ns - request.first_ns, request.tokens - 1
    for i in range(len(s.goals)):
        if whole_ns > s.goals[i, 0] or waited_ns > s.goals[i, 1] or gaps_ns > s.goals[i, 2] * gaps:
            s.broken[i] += 1
            if s.broken[i] > s.goals[i, 3]:
                lane.is_given_up = 1


@helper
def join(s, number, id_, generated):
    request, batch = s.requests[id_], s.batches[number]
    batch.decoding += 1
    batch.context += request.input + generated
    batch.inputs += request.input
    s.grows[batch.number, grows_in(s, batch, request.input + generated)] += 1
    request.ends_at = batch.iteration + request.output - generated
    iteration = request.ends_at % s.ends.shape[1]
    request.ends_with = s.ends[number, iteration]
    s.ends[number, iteration] = id_


@helper
def take_ends(s, number):
    """Return the first request in the list of those that end in this iteration, and clear the list. If blocks are kept,
    the first one is that which joined first, since blocks are evicted in the order of their release.
    """
    iteration = s.batches[number].iteration % s.ends.shape[1]
    first = s.ends[number, iteration]
    s.ends[number, iteration] = NONE
    if not (s.lane[0].has_turns or s.lane[0].has_chains):
        return first
    turned = NONE
    while first != NONE:
        following = s.requests[first].ends_with
        s.requests[first].ends_with = turned
        first, turned = following, first
    return turned


@helper
def drop(s, batch, id_):
    request = s.requests[id_]
    batch.decoding -= 1
    batch.context -= request.input + request.output
    batch.inputs -= request.input
    due = grows_in(s, batch, request.input + request.output)
    s.grows[batch.number, due] -= 1
    if batch.granted and due == batch.iteration % s.grows.shape[1]:
        batch.granted -= 1


@helper
def put_piece(s, lane, id_, start, length):
    piece = s.pieces[lane.num_pieces % len(s.pieces)]
    piece.request, piece.start, piece.length = id_, start, length
    lane.num_pieces += 1


@helper
def count(s, step, has_encoder):
    """Compute the counts on which a step's cost depends, from the step's pieces, lane and micro-batch."""
    batch = s.batches[step.batch]
    step.num_ended = inputs = prompt_tokens = 0
    for i in range(step.first_piece, step.last_piece):
        piece = s.pieces[i % len(s.pieces)]
        request = s.requests[piece.request]
        prompt_tokens += piece.length
        if piece.start + piece.length == prompt_of(request):
            step.num_ended += 1
            inputs += request.input
    step.decodes = step.context = 0
    if step.does_decode:
        step.decodes, step.context = batch.decoding + batch.held, batch.context
        if has_encoder:  # a decoder's self-attention reads only outputs
            step.context += step.decodes - batch.inputs
            inputs += batch.inputs
    step.mean_input = inputs / max(step.decodes + step.num_ended, 1)
    step.sampled = step.decodes + step.num_ended
    step.num_tokens = prompt_tokens + step.decodes


@helper
def log(s, lane, step):
    batch = s.batches[step.batch]
    if step.does_decode:
        batch.num_decode_steps += 1
    for i in range(step.first_piece, step.last_piece):
        piece = s.pieces[i % len(s.pieces)]
        request = s.requests[piece.request]
        if request.admitted_step < 0:
            request.admitted_step, request.admitted_ns = lane.num_settled, step.start_ns
        if piece.start + piece.length == request.input and not request.made:
            request.first_step = lane.num_settled
            if step.lane == BOTH:
                request.joined_batch, request.joined_step = step.batch, batch.num_decode_steps


@helper
def settled(s, lane, step):
    if lane.is_logged:
        logged = s.log[lane.num_settled]
        logged.start_ns, logged.end_ns, logged.lane = step.start_ns, step.end_ns, step.lane
        logged.batch, logged.decodes, logged.left = step.batch, step.decodes, s.batches[step.batch].decoding
    if step.last_piece > step.first_piece:
        lane.encode_steps += 1
        lane.num_pieces_run += step.last_piece - step.first_piece
    if step.decodes:
        lane.decode_steps += 1
        lane.num_decoded += step.decodes
    lane.num_settled += 1


@helper
def decode_on(s, lane, tables, free_ns):
    """Run steps that only decode, up to the next step that ends a request or that another request may join.

    All steps must be settled but one in schedules that run ahead. With several stages or micro-batches, or if steps are
    logged, this does nothing.
    """
    batch, running, is_ahead = s.batches[0], s.steps[lane.first_step % len(s.steps)], lane.ahead
    decodes, encodes = batch.decoding + batch.held, batch.num_encoding > 0
    alone = len(s.batches) == 1 and len(free_ns) == 1 and not (lane.is_logged or tables.has_encoder)
    if not alone or encodes or not batch.decoding or lane.end_step - lane.first_step != is_ahead:
        return
    if is_ahead and (
        running.last_piece > running.first_piece or batch.ending or lane.has_turns or lane.has_chains or not lane.mix
    ):
        return
    left, until_ns = len(s.ends[0]), FOREVER
    if lane.mix:
        if next_waiting(lane) != NONE:
            if batch.decoding < batch.max_batch and can_admit(s, lane):
                return
        else:
            until_ns = next_arrival_ns(s, lane)
    elif not lane.refills:
        left = min(left, batch.encode_every - batch.since_encode)
    width, iteration, context, now_ns, most = s.ends.shape[1], batch.iteration, batch.context, lane.now_ns, left
    settled_ns, reserved = now_ns, lane.reserved
    if is_ahead:  # the next step that is computed follows the running one
        context, now_ns = context + decodes, running.end_ns
    _, layers, _, embeds, heads, _ = tables.kinds[0]
    others = NUM_LINES * tables.num_groups
    overhead_s, rest_s = line_at(tables, others + 1, decodes), line_at(tables, REST, decodes)
    head_s = line_at(tables, LAST, decodes) - rest_s + line_at(tables, HEAD, decodes) if heads else 0.0
    embedding_s = line_at(tables, others, decodes) if embeds else 0.0
    # Row of the decode attention's grid at `decodes`, interpolated between the two nearest batch sizes.
    first_batch, first_length, first = tables.grid_at[DECODE]
    end_batch, end_length, _ = tables.grid_at[DECODE + 1]
    i = stretch_of(tables.batches, first_batch, end_batch, decodes)
    u = (decodes - tables.batches[i]) / (tables.batches[i + 1] - tables.batches[i])
    row, width_of_row = first + (i - first_batch) * (end_length - first_length), end_length - first_length
    shorter = longer = at_shorter = at_longer = 0.0
    while left > 0 and now_ns < until_ns and s.ends[0, (iteration + 1) % width] == NONE:
        length = context / decodes
        if not shorter <= length < longer:
            j = stretch_of(tables.lengths, first_length, end_length, length)
            at = row + j - first_length
            shorter, longer = tables.lengths[j], tables.lengths[j + 1]
            at_shorter = tables.seconds[at] + u * (tables.seconds[at + width_of_row] - tables.seconds[at])
            at += 1
            at_longer = tables.seconds[at] + u * (tables.seconds[at + width_of_row] - tables.seconds[at])
        if lane.by_use:
            blocks = s.grows[batch.number, (iteration + is_ahead) % s.grows.shape[1]]
            if reserved + blocks > lane.blocks:
                break
            reserved += blocks
        decode_s = max(at_shorter + (length - shorter) / (longer - shorter) * (at_longer - at_shorter), 0.0)
        seconds = overhead_s + layers * (rest_s + decode_s) + head_s + embedding_s
        settled_ns = now_ns
        now_ns += max(1, np.int64(np.rint(seconds * 1e9)))
        iteration += 1
        context += decodes
        left -= 1
    if (lane.has_turns or lane.has_chains) and left < most:
        grow(s, lane, batch, most - left)
        batch.granted = 0
    batch.iteration, batch.context, lane.reserved = iteration, context - is_ahead * decodes, reserved
    batch.since_encode += most - left
    batch.num_decode_steps += most - left
    lane.num_settled += most - left
    lane.decode_steps += most - left
    lane.num_skipped += most - left
    lane.num_decoded += (most - left) * decodes
    free_ns[0] = now_ns
    lane.now_ns = settled_ns if is_ahead else now_ns
    if is_ahead and left < most:
        lane.num_decoded += running.decodes - decodes  # requests ended while it ran
        running.end_ns, running.decodes = now_ns, decodes
