"""Compute in compiled code the times of a lane's steps, as `LaneCost.step_ns` does in Python."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xsimulator.costs.curves import Array, Grid, Line
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.compiled import helper

Ints = npt.NDArray[np.int64]

REST, LAST, HEAD, CROSS_KV, ENCODER_REST = range(5)
NUM_LINES = 5
"""Number of lines of a group. The lines of all groups come first, then embedding, overhead and the two hops."""
ENCODE, DECODE, CROSS, ENCODER = range(4)
NUM_GRIDS = 4

NUM_PARTS = 7
"""Number of parts into which `layer_of` divides a layer's seconds, including the head."""
NUM_FIELDS = 6
"""Number of fields of a kind of stage: group, decoder layers, encoder layers, whether it has the embedding, whether it
has the head, and whether its input comes from another node.
"""


class StepTables(NamedTuple):
    """A lane's tables in flat arrays.

    Attributes:
        line_at: index at which each line begins. # [lines + 1]
        grid_at: indices at which each grid begins in these three arrays. # [grids + 1, 3]
        kinds: the kinds of stages. # [kinds, NUM_FIELDS]
    """

    points: Array
    values: Array
    line_at: Ints
    batches: Array
    lengths: Array
    seconds: Array
    grid_at: Ints
    kinds: Ints
    kind_of: Ints
    num_groups: int
    mixing: float
    has_encoder: bool
    is_grouped: bool


def step_tables(cost: LaneCost) -> StepTables:
    groups = list(cost._degrees)
    none, nothing = Line([1.0, 2.0], [0.0, 0.0]), None
    lines: list[Line] = []
    grids: list[Grid | None] = []
    for group in groups:
        tables = cost._degrees[group]
        lines += [
            tables.rest,
            tables.last,
            tables.head,
            tables.cross_kv or none,
            tables.encoder_rest if cost.has_encoder else none,
        ]
        grids += [tables.encode, tables.decode, tables.cross, tables.encoder if cost.has_encoder else nothing]
    lines += [cost._embedding, cost._overhead, cost._near or none, cost._far or none]
    empty = np.zeros(0)
    parts = [(empty, empty, empty) if g is None else (g.batches, g.lengths, g.seconds.ravel()) for g in grids]
    batches, lengths, seconds = (np.concatenate([grid[i] for grid in parts]) for i in range(3))
    kinds = [
        (groups.index(s.group), s.decoder_layers, s.encoder_layers, s.embeds, s.heads, s.far) for s, _ in cost.kinds
    ]
    return StepTables(
        np.concatenate([line.points for line in lines]),
        np.concatenate([line.values for line in lines]),
        np.cumsum([0, *(len(line.points) for line in lines)]),
        batches,
        lengths,
        seconds,
        np.cumsum([(0, 0, 0), *(tuple(map(len, grid)) for grid in parts)], axis=0),
        np.asarray(kinds, np.int64),
        cost.kind_of.astype(np.int64),
        len(groups),
        float(cost.mixing),
        bool(cost.has_encoder),
        cost.is_grouped,
    )


@helper
def stretch_of(points, first, end, x):
    """Return the index, from `first` to `end`, of the point before x."""
    last = end - 1
    while last - first > 1:
        middle = (first + last) // 2
        if points[middle] <= x:
            first = middle
        else:
            last = middle
    return first


@helper
def line_value(points, values, first, end, x):
    i = stretch_of(points, first, end, x)
    return values[i] + (x - points[i]) * (values[i + 1] - values[i]) / (points[i + 1] - points[i])


@helper
def line_at(t, line, x):
    return line_value(t.points, t.values, t.line_at[line], t.line_at[line + 1], x)


@helper
def grid_at(t, grid, batch, length):
    first_batch, first_length, first = t.grid_at[grid]
    end_batch, end_length, _ = t.grid_at[grid + 1]
    i = stretch_of(t.batches, first_batch, end_batch, batch)
    j = stretch_of(t.lengths, first_length, end_length, length)
    low, high = t.batches[i], t.batches[i + 1]
    u = (batch - low) / (high - low)
    low, high = t.lengths[j], t.lengths[j + 1]
    v = (length - low) / (high - low)
    width = end_length - first_length
    at = first + (i - first_batch) * width + j - first_length
    low = t.seconds[at] + u * (t.seconds[at + width] - t.seconds[at])
    high = t.seconds[at + 1] + u * (t.seconds[at + width + 1] - t.seconds[at + 1])
    return max(low + v * (high - low), 0.0)


@helper
def step_ns(t, step, pieces, scratch, found):
    """Write the rounded nanoseconds of a step on each kind of stage into `found`.

    Args:
        scratch: # [groups, NUM_PARTS]
        found: # [kinds]
    """
    count, decodes, others = step.last_piece - step.first_piece, step.decodes, NUM_LINES * t.num_groups
    prompt_tokens = step.num_tokens - decodes
    for group in range(t.num_groups):
        layer_of(t, group, step, pieces, scratch[group])
    overhead_s, alone_s = line_at(t, others + 1, decodes + count), 0.0
    has_decoder_tokens = t.has_encoder and decodes + step.num_ended > 0
    mixes = t.mixing > 0 and count > 0 and decodes > 0 and not t.has_encoder
    if mixes:
        alone_s = line_at(t, others + 1, decodes)
    for kind in range(len(t.kinds)):
        group, layers, encoder_layers, embeds, heads, _ = t.kinds[kind]
        rest_s, decode_s, encode_s, head_s, cross_s, joining_s, last_s = scratch[group]
        seconds = overhead_s + layers * (rest_s + decode_s)
        if heads:
            seconds += last_s - rest_s + head_s
        if t.has_encoder:
            passing = decodes + (step.num_ended if layers else 0)
            seconds += layers * joining_s + encoder_layers * encode_s
            if has_decoder_tokens:
                seconds += layers * cross_s
            if embeds:
                seconds += line_at(t, others, passing + prompt_tokens)
        else:
            seconds += layers * encode_s
            if embeds:
                seconds += line_at(t, others, step.num_tokens)
        if mixes:
            of_rest_s = line_at(t, NUM_LINES * group + REST, decodes)
            alone = alone_s + layers * (of_rest_s + decode_s)
            if embeds:
                alone += line_at(t, others, decodes)
            if heads:
                alone += line_at(t, NUM_LINES * group + LAST, decodes) - of_rest_s
                alone += line_at(t, NUM_LINES * group + HEAD, decodes)
            seconds += t.mixing * alone
        found[kind] = max(1, np.int64(np.rint(seconds * 1e9)))


@helper
def layer_of(t, group, step, pieces, found):
    """Write the seconds of a layer's parts into `found`."""
    lines, grids = NUM_LINES * group, NUM_GRIDS * group
    count, decodes = step.last_piece - step.first_piece, step.decodes
    prompt_tokens, passing = step.num_tokens - decodes, decodes + step.num_ended
    found[:] = 0.0
    decoder_tokens = passing if t.has_encoder else step.num_tokens
    found[0], found[6] = line_at(t, lines + REST, decoder_tokens), line_at(t, lines + LAST, decoder_tokens)
    found[1] = grid_at(t, grids + DECODE, decodes, step.context / decodes) if decodes else 0.0
    found[3] = line_at(t, lines + HEAD, step.sampled)
    if not t.has_encoder:
        found[2] = prompts_s(t, grids + ENCODE, pieces, step) if count else 0.0
        return
    if count:
        found[2] = line_at(t, lines + ENCODER_REST, prompt_tokens) + prompts_s(t, grids + ENCODER, pieces, step)
    found[4] = grid_at(t, grids + CROSS, passing, step.mean_input) if passing else 0.0
    found[5] = line_at(t, lines + CROSS_KV, prompt_tokens + step.joining)


@helper
def prompts_s(t, grid, pieces, step):
    """Return the seconds of attention for prompt pieces. Each of n counts as 1 / n of the time of n equal pieces."""
    count, seconds = step.last_piece - step.first_piece, 0.0
    for i in range(step.first_piece, step.last_piece):
        piece = pieces[i % len(pieces)]
        seconds += grid_at(t, grid, count, piece.start + piece.length)
        if piece.start:
            seconds -= grid_at(t, grid, count, piece.start)
    return seconds / count


@helper
def pass_stages(t, free_ns, issue_ns, costs_ns, num_tokens):
    """Return the time a step leaves the last stage. Set each entry of `free_ns` to the time its stage has finished."""
    now_ns = free_ns[0] = max(issue_ns, free_ns[0]) + costs_ns[t.kind_of[0]]
    if len(free_ns) == 1:
        return now_ns
    hops = NUM_LINES * t.num_groups + 2
    near_ns = np.int64(np.rint(line_at(t, hops, num_tokens) * 1e9))
    far_ns = np.int64(np.rint(line_at(t, hops + 1, num_tokens) * 1e9))
    for stage in range(1, len(free_ns)):
        kind = t.kind_of[stage]
        now_ns += far_ns if t.kinds[kind, NUM_FIELDS - 1] else near_ns
        now_ns = free_ns[stage] = max(now_ns, free_ns[stage]) + costs_ns[kind]
    return now_ns
