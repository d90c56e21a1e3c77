"""Rows: no request is lost, none overlap, and length-sorted batches cost the least there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tcb.layouts import length_sorted_batches, slotted_rows
from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import RowBatch, concatenated_rows, even_rows, padded_rows

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def requests_of(lengths: list[int]) -> list[Request]:
    return [Request(i, n, 5) for i, n in enumerate(lengths)]


def rows_of(requests: list[Request], row_tokens: int) -> list[list[Request]]:
    rows: list[list[Request]] = [[]]
    for one in requests:
        if sum(r.input_length for r in rows[-1]) + one.input_length > row_tokens:
            rows.append([])
        rows[-1].append(one)
    return rows


def check(batch: RowBatch, requests: list[Request]) -> None:
    """Each request lies once in a slot of the batch, and shares no token."""
    taken = np.zeros((batch.num_slots, batch.slot_tokens), dtype=int)
    for place in batch.places:
        assert place.start + place.length <= batch.slot_tokens
        taken[place.slot, place.start : place.start + place.length] += 1
    assert taken.max() == 1
    assert sorted((p.id, p.length) for p in batch.places) == [(r.id, r.input_length) for r in requests]
    assert [p.slot for p in batch.places] == sorted(p.slot for p in batch.places)
    assert batch.num_slots % batch.slots_per_row == 0


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(lengths=LENGTHS, slot_tokens=st.integers(1, 40))
def test_every_layout_holds_every_request_once(lengths, slot_tokens):
    requests = requests_of(lengths)
    check(padded_rows(requests), requests)
    rows = rows_of(requests, 40)
    batch = concatenated_rows(rows)
    check(batch, requests)
    assert (batch.num_slots, batch.slots_per_row) == (len(rows), 1)
    slotted, left_over = slotted_rows(rows, 40, slot_tokens)
    if slotted.places:
        check(slotted, [one for one in requests if one not in left_over])
    assert slotted.num_slots == len(rows) * slotted.slots_per_row
    assert all(one in left_over for one in requests if one.input_length > slot_tokens)


def test_one_slot_a_row_is_concatenation():
    rows = rows_of(requests_of([10, 10, 20, 7, 9, 3]), 40)
    slotted, left_over = slotted_rows(rows, 40, 40)
    assert slotted == concatenated_rows(rows)
    assert not left_over


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(lengths=LENGTHS)
def test_even_rows_hold_the_same_requests(lengths):
    requests = requests_of(lengths)
    rows = rows_of(requests, 40)
    even = even_rows(rows, 40)
    check(concatenated_rows(even), requests)
    assert even == rows or max(map(len, even)) - min(map(len, even)) <= 1


def test_even_rows_do_not_crowd_the_shortest():
    rows = [requests_of([4] * 10), [Request(10 + i, 20, 5) for i in range(2)]]
    assert [len(row) for row in even_rows(rows, 41)] == [6, 6]
    assert even_rows(rows, 39) == rows


def cheapest(lengths: list[int], cost, largest: int) -> float:
    """By trying all cuts of the sorted lengths."""
    best = float("inf")
    for cuts in range(1 << (len(lengths) - 1)):
        total, start = 0.0, 0
        for end in range(1, len(lengths) + 1):
            if end == len(lengths) or cuts >> (end - 1) & 1:
                total += float(cost(np.array([end - start]), lengths[end - 1])[0])
                total = float("inf") if end - start > largest else total
                start = end
        best = min(best, total)
    return best


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    largest=st.integers(1, 8),
    launch=st.floats(0, 30),
    power=st.floats(0.5, 1.5),
)
def test_length_sorted_batches_cost_the_least(lengths, largest, launch, power):
    def cost(numbers, length):
        return launch + (numbers * length) ** power

    batches = length_sorted_batches(requests_of(lengths), cost, largest)
    assert sorted(one.id for batch in batches for one in batch) == list(range(len(lengths)))
    total = sum(float(cost(np.array([len(b)]), b[-1].input_length)[0]) for b in batches)
    assert max(map(len, batches)) <= largest
    assert total == pytest.approx(cheapest(sorted(lengths), cost, largest))
