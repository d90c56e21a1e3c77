"""Simulate consecutive steps that only decode, in the compiled run of one lane.

Until a request joins or ends, every step decodes the same requests. Only the part of a step's cost that depends on the
context changes, so the other parts are looked up once.
"""

from __future__ import annotations

import numpy as np

from xsimulator.costs.step_tables import DECODE, HEAD, LAST, NUM_LINES, REST, line_at, stretch_of
from xsimulator.counts.arrivals import NONE
from xsimulator.counts.compiled import helper
from xsimulator.counts.counting import can_admit


@helper
def decode_on(s, lane, tables, free_ns):
    """Run steps that only decode, up to the next step that ends a request or that another request may join.

    All earlier steps must be settled. With several stages or micro-batches, or if steps are logged, this does nothing.
    """
    batch = s.batches[0]
    decodes, encodes = batch.decoding + batch.held, batch.num_encoding > 0
    alone = (
        len(s.batches) == 1
        and len(free_ns) == 1
        and not (lane.ahead or lane.is_logged or lane.by_use or tables.has_encoder)
    )
    if not alone or encodes or not batch.decoding:
        return
    left, until_ns = len(s.ends[0]), np.iinfo(np.int64).max
    if lane.mix:
        if lane.head < lane.tail:
            if batch.decoding < batch.max_batch and can_admit(s, lane):
                return
        elif lane.tail < len(s.requests):
            until_ns = s.requests[lane.tail].arrival_ns
    elif not lane.refills:
        left = min(left, batch.encode_every - batch.since_encode)
    width, iteration, context, now_ns, most = s.ends.shape[1], batch.iteration, batch.context, lane.now_ns, left
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
        decode_s = max(at_shorter + (length - shorter) / (longer - shorter) * (at_longer - at_shorter), 0.0)
        seconds = overhead_s + layers * (rest_s + decode_s) + head_s + embedding_s
        now_ns += max(1, np.int64(np.rint(seconds * 1e9)))
        iteration += 1
        context += decodes
        left -= 1
    batch.iteration, batch.context = iteration, context
    batch.since_encode += most - left
    batch.num_decode_steps += most - left
    lane.num_settled += most - left
    lane.now_ns = free_ns[0] = now_ns
