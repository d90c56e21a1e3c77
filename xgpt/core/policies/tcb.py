"""Arrange a batch in rows of equal length, by padding, by concatenation, or in slots.

TNB pads each request to the longest one. TTB (TurboTransformers) does so within batches of similar lengths. TCB
concatenates several requests in each row of fixed length, or in each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.policies.request import Request
from xgpt.core.schema import Batching

LEAVING_SHARE = 0.25
"""Ended slots are removed once they are this share of a batch's remaining slots, since a removal copies the other
slots' K/V.
"""


class Place(NamedTuple):
    """The position of a prompt: tokens [start, start + length) of a slot. Slots are numbered over all rows."""

    id: int
    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The layout of a batch: `num_slots` slots of `slot_tokens` tokens each, and `slots_per_row` slots in a row.

    A request's tokens attend only to the request's own tokens, but attention is computed over whole slots. `places` is
    sorted by slot.
    """

    num_slots: int
    slot_tokens: int
    slots_per_row: int
    places: tuple[Place, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_slots * self.slot_tokens

    @property
    def most_a_slot(self) -> int:
        return int(np.bincount([place.slot for place in self.places]).max())


def lay_out(batching: Batching, requests: Sequence[Request], row_tokens: int) -> RowBatch:
    """Return the layout of a batch. It depends only on the requests, their order, and the other arguments.

    A padded row or a slot is as long as the longest prompt. Other rows are at most as long as the larger of
    `row_tokens` and the longest prompt.
    """
    if batching == "padded":
        return padded_rows(requests)
    longest = max(one.input_length for one in requests)
    row_tokens = max(row_tokens, longest)
    if batching == "rows":
        return concatenated_rows(even_rows(filled_rows(requests, row_tokens), row_tokens))
    assert batching == "slots", "a flat batch has no layout"
    slots = even_rows(filled_rows(requests, longest), longest)
    return RowBatch(len(slots), longest, row_tokens // longest, places_of(slots))


def filled_rows(requests: Sequence[Request], row_tokens: int) -> list[list[Request]]:
    rows: list[list[Request]] = []
    room: list[int] = []
    for one in sorted(requests, key=lambda one: -one.input_length):
        row = next((row for row, left in enumerate(room) if left >= one.input_length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(one)
        room[row] -= one.input_length
    return rows


def padded_rows(requests: Sequence[Request]) -> RowBatch:
    """Return a layout with one request in each row, padded to the longest. Source: TNB in TCB, Figure 1(a)."""
    places = tuple(Place(one.id, row, 0, one.input_length) for row, one in enumerate(requests))
    return RowBatch(len(requests), max(one.input_length for one in requests), 1, places)


def concatenated_rows(rows: Sequence[Sequence[Request]]) -> RowBatch:
    """Return a layout with concatenated requests, in rows as long as the fullest one. Source: TCB sec. 4.1."""
    return RowBatch(len(rows), max(_tokens(row) for row in rows), 1, places_of(rows))


def even_rows(rows: Sequence[Sequence[Request]], row_tokens: int) -> list[list[Request]]:
    """Return rows with the same requests, spread so that all rows have about equally many.

    A decode step takes as long as if every row had as many requests as the fullest one. Without spreading, the row with
    the shortest requests would have the most. Requests are dealt back and forth over the rows, the longest first. If a
    row would then exceed `row_tokens`, the rows stay as they are.
    """
    ordered = sorted((one for row in rows for one in row), key=lambda one: -one.input_length)
    dealt: list[list[Request]] = [[] for _ in rows]
    for index, one in enumerate(ordered):
        turn, place = divmod(index, len(rows))
        dealt[len(rows) - 1 - place if turn % 2 else place].append(one)
    return dealt if all(_tokens(row) <= row_tokens for row in dealt) else [list(row) for row in rows]


def _tokens(row: Sequence[Request]) -> int:
    return sum(one.input_length for one in row)


def places_of(slots: Sequence[Sequence[Request]]) -> tuple[Place, ...]:
    places = []
    for index, slot in enumerate(slots):
        start = 0
        for one in slot:
            places.append(Place(one.id, index, start, one.input_length))
            start += one.input_length
    return tuple(places)
