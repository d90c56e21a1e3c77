"""K/V blocks that requests share, in compiled runs: the decisions of `xgpt.core.policies.blocks.Blocks`.

Every block that has a key has a number, and the blocks within one block of the trace have adjacent numbers. So a chain
is stored as one number for each of the trace's blocks.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from xgpt.core.trace_blocks import TracePrefixes
from xsimulator.counts.arrivals import ABSENT, CHAIN, NONE, ChainStream
from xsimulator.counts.compiled import helper


def chains_of(
    prefixes: TracePrefixes, inputs: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], block_size: int
) -> ChainStream:
    """Return the chains of a trace.

    Args:
        inputs, outputs: numbers of tokens. # [requests] each
    """
    size = prefixes.block_size
    begin, end = inputs // block_size, (inputs + outputs - 1) // block_size
    num_said = np.array([len(ids) for ids in prefixes.outputs])
    counts = np.concatenate([[len(ids) for ids in prefixes.prompts], num_said])
    starts = np.cumsum(counts) - counts
    ids = np.fromiter(chain.from_iterable((*prefixes.prompts, *prefixes.outputs)), np.int64, counts.sum())
    first = np.concatenate([np.zeros_like(inputs), inputs // size])
    place = np.arange(len(ids)) + np.repeat(first - starts, counts)
    _, ids = np.unique(ids, return_inverse=True)
    pairs = ids * (place.max(initial=0) + 1) + place
    _, seen, unit = np.unique(pairs, return_index=True, return_inverse=True)
    widths = (place[seen] + 1) * size // block_size - place[seen] * size // block_size
    order, base = np.argsort(seen), np.empty_like(widths)  # requests that follow each other have adjacent numbers
    base[order] = np.cumsum(widths[order]) - widths[order]
    own = np.where(num_said > 0, 0, end - begin)
    num_keys = int(widths.sum() + own.sum())
    firsts = np.concatenate([base[unit] - place * size // block_size, num_keys - np.cumsum(own[::-1])[::-1] - begin])
    chains = np.zeros(len(inputs), CHAIN)
    chains["prompt"], chains["is_own"] = starts[: len(inputs)], num_said == 0
    chains["said"] = np.where(num_said > 0, starts[len(inputs) :] - inputs // size, len(ids) + np.arange(len(inputs)))
    chains["place"] = np.cumsum(end) - end
    return ChainStream(chains, firsts, size, num_keys, int(end.sum()))


@helper
def key_of(s, lane, request, own, block):
    if block < request.input // lane.block_size:
        return number_of(s.firsts, own.prompt, block, lane.block_size, lane.trace_block)
    if own.is_own:
        return s.firsts[own.said] + block
    return number_of(s.firsts, own.said, block, lane.block_size, lane.trace_block)


@helper
def number_of(firsts, begin, block, size, trace_block):
    return firsts[begin + ((block + 1) * size - 1) // trace_block] + block


@helper
def look_up(s, lane, id_):
    """Find the cached blocks with which a waiting request begins, and how many of them are in use. The last token must
    always be computed.
    """
    request, own = s.requests[id_], s.chains[id_]
    if lane.looked_up == id_:
        return
    most = min(request.input // lane.block_size, (request.input + request.made - 1) // lane.block_size)
    found = used = 0
    while found < most:
        uses = s.keys[key_of(s, lane, request, own, found)].uses
        if uses == ABSENT:
            break
        used += uses > 0
        found += 1
    lane.looked_up, lane.num_found, lane.num_found_used = id_, found, used


@helper
def share(s, lane, id_):
    """Give an entering request the blocks that are cached of its prompt, and return how many others begin to use."""
    look_up(s, lane, id_)
    request, own = s.requests[id_], s.chains[id_]
    for block in range(lane.num_found):
        number = key_of(s, lane, request, own, block)
        key = s.keys[number]
        if not key.uses:
            leave_queue(lane, s.keys, number)
            lane.num_kept -= 1
            lane.num_used += 1
        key.uses += 1
        s.keyed[own.place + block] = True
    own.named = lane.num_found
    if request.cached == NONE:
        request.found = lane.num_found * lane.block_size
    request.cached = lane.num_found * lane.block_size
    lane.looked_up = NONE


@helper
def leave_queue(lane, entries, number):
    """Take an entry out of the queue of least recently used ones: keys or sessions."""
    entry = entries[number]
    if entry.before == NONE:
        lane.first_kept = entry.after
    else:
        entries[entry.before].after = entry.after
    if entry.after == NONE:
        lane.last_kept = entry.before
    else:
        entries[entry.after].before = entry.before
    entry.before = entry.after = NONE


@helper
def join_queue(lane, entries, number):
    entries[number].before, entries[number].after = lane.last_kept, NONE
    if lane.last_kept == NONE:
        lane.first_kept = number
    else:
        entries[lane.last_kept].after = number
    lane.last_kept = number


@helper
def evict_blocks(s, lane):
    while lane.num_used + lane.num_kept > lane.blocks and lane.first_kept != NONE:
        number = lane.first_kept
        leave_queue(lane, s.keys, number)
        lane.num_kept -= 1
        s.keys[number].uses = ABSENT
        lane.looked_up = NONE


@helper
def name(s, lane, id_, count):
    """Give a request's blocks below `count` their keys. A block whose key exists remains the request's own."""
    request, own = s.requests[id_], s.chains[id_]
    for block in range(own.named, count):
        key = s.keys[key_of(s, lane, request, own, block)]
        is_new = key.uses == ABSENT
        s.keyed[own.place + block] = is_new
        if is_new:
            key.uses = 1
            lane.looked_up = NONE
    own.named = max(own.named, count)


@helper
def release(s, lane, id_, blocks):
    """Release a request's blocks, the last one first, and return how many are in use no longer. Those that have a key
    are kept.
    """
    request, own = s.requests[id_], s.chains[id_]
    gone = blocks - own.named
    for block in range(own.named - 1, -1, -1):
        if not s.keyed[own.place + block]:
            gone += 1
            continue
        number = key_of(s, lane, request, own, block)
        key = s.keys[number]
        key.uses -= 1
        if key.uses:
            continue
        gone += 1
        join_queue(lane, s.keys, number)
        lane.num_kept += 1
    own.named = 0
    lane.num_used -= gone
    lane.looked_up = NONE
    return gone
