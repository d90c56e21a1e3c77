"""Parts of the compiled runs of sessions: turns that arrive after others have ended, and K/V kept between them.

Turns of one session are never served at the same time, and the blocks of a session are released together, the last
block first. So the queue of least recently used blocks is a queue of sessions, each with its first `kept` blocks. The
prefix that all sessions share is never evicted.
"""

from __future__ import annotations

import numpy as np

from xsimulator.counts.arrivals import NONE
from xsimulator.counts.chains import evict_blocks, join_queue, leave_queue
from xsimulator.counts.compiled import helper

FOREVER = np.iinfo(np.int64).max


@helper
def is_before(s, a, b):
    first, other = s.turns[a].arrival_ns, s.turns[b].arrival_ns
    return first < other or (first == other and a < b)


@helper
def expect(s, lane, turn):
    place = lane.num_due
    lane.num_due += 1
    while place and is_before(s, turn, s.due[(place - 1) // 2]):
        s.due[place] = s.due[(place - 1) // 2]
        place = (place - 1) // 2
    s.due[place] = turn


@helper
def take_due(s, lane):
    found = s.due[0]
    lane.num_due -= 1
    turn, place = s.due[lane.num_due], 0
    while 2 * place + 1 < lane.num_due:
        child = 2 * place + 1
        if child + 1 < lane.num_due and is_before(s, s.due[child + 1], s.due[child]):
            child += 1
        if not is_before(s, s.due[child], turn):
            break
        s.due[place] = s.due[child]
        place = child
    s.due[place] = turn
    return found


@helper
def next_arrival_ns(s, lane):
    if lane.has_turns:
        return s.turns[s.due[0]].arrival_ns if lane.num_due else FOREVER
    return s.requests[lane.tail].arrival_ns if lane.tail < len(s.requests) else FOREVER


@helper
def arrive(s, lane):
    number = take_due(s, lane)
    turn, request = s.turns[number], s.requests[lane.tail]
    request.turn, request.arrival_ns = number, turn.arrival_ns
    request.input, request.output, request.tokens, request.most = turn.input, turn.output, turn.tokens, turn.most
    request.cached = NONE


@helper
def follow(s, lane, id_):
    child = s.turns[s.requests[id_].turn].child
    if child != NONE:
        s.turns[child].arrival_ns = lane.now_ns + s.turns[child].pause_ns
        expect(s, lane, child)


@helper
def unlink(s, lane, number):
    leave_queue(lane, s.sessions, number)
    kept = s.sessions[number].kept
    lane.num_kept -= kept
    s.sessions[number].kept = 0
    return kept


@helper
def keep(s, lane, number, blocks):
    """Keep a session's first blocks as those that were used last."""
    if blocks <= 0:
        return
    join_queue(lane, s.sessions, number)
    s.sessions[number].kept = blocks
    lane.num_kept += blocks


@helper
def evict(s, lane):
    """Evict the blocks that were used least recently, in sessions those of one session together, until the others
    fit.
    """
    if lane.has_chains:
        evict_blocks(s, lane)
        return
    while lane.num_used + lane.num_kept > lane.blocks and lane.first_kept != NONE:
        session, excess = s.sessions[lane.first_kept], lane.num_used + lane.num_kept - lane.blocks
        if excess < session.kept:
            session.kept -= excess
            lane.num_kept -= excess
        else:
            unlink(s, lane, lane.first_kept)


@helper
def find(s, lane, id_, context):
    """Give an entering turn the blocks that are kept of its prompt. Blocks that it does not continue are forgotten."""
    request = s.requests[id_]
    turn = s.turns[request.turn]
    kept = unlink(s, lane, turn.session) if s.sessions[turn.session].kept else 0
    if lane.from_host:
        kept = max(turn.common // lane.block_size - lane.shared, 0)
    found = min(lane.shared + kept, (context - 1) // lane.block_size)
    if request.cached == NONE:  # otherwise it was preempted, and continues its own blocks
        found = min(found, turn.common // lane.block_size)
        request.found = found * lane.block_size
    request.cached = found * lane.block_size


@helper
def grow(s, lane, batch, steps):
    """Give the decoding requests the blocks that they take within this number of steps."""
    size = s.grows.shape[1]
    lane.num_used -= batch.granted
    if steps >= size:
        for i in range(size):
            lane.num_used += steps // size * s.grows[batch.number, i]
    for i in range(batch.iteration, batch.iteration + steps % size):
        lane.num_used += s.grows[batch.number, i % size]
    batch.granted = s.grows[batch.number, batch.iteration % size]
    evict(s, lane)
