"""Lay a batch out in rows (padded, concatenated, in slots), for models that run rows of equal length.

The layouts are those of TCB and of its baselines: one request per row, padded to the longest (TNB); the same for
batches of requests with similar lengths (TTB, TurboTransformers); several concatenated requests in each row of fixed
length (TCB); and concatenated requests in slots, which are separate parts of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.policies.request import Request
from xgpt.core.schema import Batching

LEAVING_SHARE = 0.25
"""Ended slots are removed once they make up this share of the slots, since each removal copies the K/V of the other
slots.
"""


class Place(NamedTuple):
    """The position of a request's prompt: tokens [start, start + length) of a slot; slots are counted over all rows."""

    id: int
    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class RowBatch:
    """A batch of `num_slots` slots of `slot_tokens` tokens each; `slots_per_row` slots make a row.

    A request's tokens attend only to its own tokens, but attention is computed over whole slots. Places are in the
    order of slots.
    """

    num_slots: int
    slot_tokens: int
    slots_per_row: int
    places: tuple[Place, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are computed, padding included."""
        return self.num_slots * self.slot_tokens

    @property
    def most_a_slot(self) -> int:
        """Number of requests in the fullest slot."""
        return int(np.bincount([place.slot for place in self.places]).max())


def lay_out(batching: Batching, requests: Sequence[Request], row_tokens: int) -> RowBatch:
    """Return the layout of a batch. Equal requests in the same order give equal layouts.

    A row holds `row_tokens` prompt tokens, or the longest prompt if that is longer. A slot holds the longest prompt, so
    every request fits in a slot.
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
    """Return rows of at most `row_tokens` prompt tokens: requests, the longest first, go to the first row in which they
    fit.
    """
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
    """Return one request per row, padded to the longest. Source: TCB's TNB, Figure 1(a)."""
    places = tuple(Place(one.id, row, 0, one.input_length) for row, one in enumerate(requests))
    return RowBatch(len(requests), max(one.input_length for one in requests), 1, places)


def concatenated_rows(rows: Sequence[Sequence[Request]]) -> RowBatch:
    """Return rows of concatenated requests, as long as the fullest row. Source: TCB sec. 4.1."""
    return RowBatch(len(rows), max(_tokens(row) for row in rows), 1, places_of(rows))


def even_rows(rows: Sequence[Sequence[Request]], row_tokens: int) -> list[list[Request]]:
    """Return rows with the same requests, distributed so that all rows have about the same number: the longest first,
    back and forth over the rows.

    A decode step attends in every row as if the row had as many requests as the fullest row, and DAS fills its first
    row with the shortest requests. If a row would then exceed `row_tokens`, the rows stay as they are.
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
