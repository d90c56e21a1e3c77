"""Rows: no request is lost, none overlap, and length-sorted batches cost the least there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tcb.layouts import length_sorted_batches, slotted_rows
from tests.rings import examples
from tests.unit.xgpt.core.policies.test_admission import algorithm_1
from xgpt.core.policies import LaneSettings
from xgpt.core.policies.admission import make_queue
from xgpt.core.policies.request import Request
from xgpt.core.policies.row_pool import RowPool, RowSchedule
from xgpt.core.policies.tcb import RowBatch, concatenated_rows, even_rows, lay_out, padded_rows

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


@settings(max_examples=examples(100, 25))
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


@settings(max_examples=examples(60, 15))
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


@settings(max_examples=examples(60, 15))
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


def algorithm_2(requests: list[Request], row_tokens: int, eta: float, num_requests: int) -> tuple[int, set[int]]:
    """TCB's Algorithm 2 over rows until `num_requests` fit a slot: the slot's length, and these requests."""
    lengths = {one.id: one.input_length for one in requests}
    waiting, chosen, fitting_slots, longest = list(requests), [], [], 0
    while waiting and len(fitting_slots) < num_requests:
        ordered = sorted(waiting, key=lambda one: one.input_length)
        fitting = np.cumsum([one.input_length for one in ordered]) <= row_tokens
        dominant = ordered[: math.ceil(eta * fitting.sum())]
        longest = max([longest, *(one.input_length for one in dominant)])
        chosen += (row := algorithm_1(waiting, row_tokens, eta))
        waiting = [one for one in waiting if one.id not in row]
        fitting_slots = [id_ for id_ in chosen if lengths[id_] <= longest]
    return longest, set(fitting_slots[:num_requests])


@settings(max_examples=examples(60, 15))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=20, max_size=60),
    row_tokens=st.integers(60, 120),
    eta=st.sampled_from([0.2, 0.5, 0.8]),
)
def test_slots_are_as_long_as_algorithm_2_says_and_longer_requests_wait(lengths, row_tokens, eta):
    """They were as long as the batch's longest prompt."""
    pool = RowPool(10**6, 16, batching="slots", row_tokens=row_tokens, waiting=make_queue("das", row_tokens, eta=eta))
    schedule = RowSchedule(LaneSettings(mix=False, max_batch=15, refill_when_empty=True, microbatches=2), pool)
    requests = requests_of(lengths)
    for one in requests:
        schedule.submit(one)
    longest, members = algorithm_2(requests, row_tokens, eta, 15)
    step = schedule.next_step()
    batch = [requests[chunk.id] for chunk in step.encode]
    assert {one.id for one in batch} == members
    assert max(one.input_length for one in batch) <= longest
    assert lay_out("slots", batch, row_tokens).slot_tokens <= longest
    waiting = [one.id for one in pool.waiting]
    assert sorted(waiting) == waiting == sorted({one.id for one in requests} - members)


def test_the_next_batch_enters_where_slots_have_left():
    """Nothing entered before the last request of the batch had ended."""
    pool = RowPool(8, 16, batching="slots", row_tokens=16, waiting=make_queue())
    schedule = RowSchedule(LaneSettings(mix=False, max_batch=4, refill_when_empty=True, microbatches=2), pool)
    for id_ in range(8):
        schedule.submit(Request(id_, 10, 20))
    ends, inside, joined = {0: 2, 1: 2, 2: 9, 3: 9}, [], None
    while joined is None:
        step = schedule.next_step()
        if step.encode and 4 in step.ids:
            joined = set(pool.running)
        done = [id_ for id_ in step.ids if ends.get(id_, 99) == pool.running[id_].generated + 1]
        schedule.settle(step, done)
        inside.append(len(pool.running))
    assert joined == {2, 3, 4, 5} and max(inside) == 4
    assert pool.reserved_blocks == 8
