"""The pool never promises more K/V than there is, whatever the order of submissions, steps, endings and cancels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import examples
from xgpt.core.policies import LaneSettings, OneLane, Pool, Request, Step
from xgpt.core.policies.admission import make_queue
from xgpt.core.policies.rule import rest_of_prompt
from xgpt.core.schema import AdmissionOrder, KvPromise

BLOCK_SIZE = 4


def blocks_in_use(pool: Pool) -> int:
    """What the requests inside come to need ("reserve"), or hold by now ("quantile")."""
    tokens = [r.input_length + (r.max_output if pool.kv == "reserve" else r.generated) for r in pool.running.values()]
    return sum(-(-n // BLOCK_SIZE) for n in tokens)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("kv", "hold"), [("reserve", False), ("reserve", True), ("quantile", False)])
@settings(max_examples=examples(60, 15))
@given(data=st.data())
def test_never_over_commits(kv: KvPromise, hold: bool, microbatches: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=15))
    longest = max(-(-(i + o) // BLOCK_SIZE) for i, o in lengths)
    pool = Pool(longest + data.draw(st.integers(0, 10)), BLOCK_SIZE, kv=kv, holds_finished=hold)
    lane = LaneSettings(mix=not hold, max_batch=6, refill_when_empty=hold, microbatches=microbatches)
    schedule = OneLane(lane, pool)
    for id_, (input_, output) in enumerate(lengths):
        request = Request(id_, input_, output)
        assert pool.can_ever_fit(request)
        schedule.submit(request)
    ended: set[int] = set()
    under_way: list[Step] = []
    while not pool.is_idle:
        if data.draw(st.booleans()):
            ended.update(schedule.cancel(data.draw(st.integers(0, len(lengths)))))
        while (step := schedule.next_step()) is not None:
            touched = {id_ for other in under_way for id_ in other.ids}
            assert touched.isdisjoint({*step.ids, *step.preempted})
            under_way.append(step)
        assert len(under_way) <= microbatches
        assert blocks_in_use(pool) <= pool.reserved_blocks <= pool.kv_blocks
        for batch in pool.batches:
            inside = [r for r in (*batch.decoding.values(), *batch.held.values()) if r.id not in batch.stopped]
            counted = sum(r.context for r in inside), sum(r.input_length for r in inside), len(inside)
            assert (batch.context, batch.input_tokens, batch.num_decoding) == counted
        if not under_way:
            continue
        step = under_way.pop(0)
        running = pool.running
        finished = [
            id_
            for id_ in schedule.sampled(step)
            if not pool.is_silent(id_)
            and (running[id_].generated + 1 == running[id_].max_output or data.draw(st.integers(0, 3)) == 0)
        ]
        ended.update(schedule.settle(step, finished))
    assert pool.reserved_blocks == pool.num_running == 0
    assert ended == set(range(len(lengths)))


def test_admits_in_order_and_waits_for_memory() -> None:
    pool = Pool(kv_blocks=10, block_size=4)
    (batch,) = pool.add_batches(1)
    for id_, input_length in enumerate([20, 20, 4]):
        pool.submit(Request(id_, input_length, 4))
    first = pool.admit(batch)
    assert first is not None
    assert (first.id, pool.reserved_blocks) == (0, 6)
    # The short one would fit, but no request overtakes.
    assert pool.admit(batch) is None
    assert [request.id for request in pool.waiting] == [1, 2]


def test_a_request_too_long_can_never_fit() -> None:
    pool = Pool(kv_blocks=4, block_size=4)
    assert pool.can_ever_fit(Request(0, 10, 6))
    assert not pool.can_ever_fit(Request(0, 10, 7))


def test_cancelling_what_is_not_there_is_ignored() -> None:
    assert Pool(4, 4).cancel(7) == []


@pytest.mark.parametrize("order", ["fcfs", "sjf", "lpt", "edf", "das", "shuffled"])
def test_a_fresh_pool_lets_requests_in_in_the_same_order(order: AdmissionOrder) -> None:
    """A restart made every order first come, first served."""
    pool = Pool(100, BLOCK_SIZE, waiting=make_queue(order, 20 if order == "das" else None))
    requests = [Request(0, 9, 2, 0, 50), Request(1, 3, 8, 0, 90), Request(2, 5, 5, 0, 10), Request(3, 7, 1, 0, 20)]

    def entered(pool: Pool) -> list[int]:
        for request in requests:
            pool.submit(request)
        return [request.id for request in pool.waiting.ahead(4)]

    assert entered(pool.fresh()) == entered(pool.fresh().fresh()) == entered(pool)


def drive(lane: OneLane, outputs: dict[int, int], count: int) -> list[Step]:
    """Return `count` steps, in which each request ends after as many tokens as `outputs` says."""
    steps = []
    for _ in range(count):
        if (step := lane.next_step()) is None:
            break
        running = lane.pool.running
        lane.settle(step, [id_ for id_ in lane.sampled(step) if running[id_].generated + 1 == outputs[id_]])
        steps.append(step)
    return steps


def test_an_output_beyond_its_promise_has_what_others_leave() -> None:
    """Before, eight that named no maximum held all memory, and the next waited for one of them to end."""
    outputs = dict.fromkeys(range(8), 100) | {8: 2}
    for promised, waits in ((None, True), (4, False)):
        pool = Pool(112, BLOCK_SIZE)
        lane = OneLane(LaneSettings(mix=True), pool)
        for id_ in range(8):
            lane.submit(Request(id_, 4, 100, promised_output=promised))
        drive(lane, outputs, 80)
        lane.submit(Request(8, 60, 2))
        step = lane.next_step()
        assert step is not None
        assert (8 not in pool.running) == waits
        assert pool.reserved_blocks <= pool.kv_blocks
        if not waits:
            assert step.preempted  # the newest of those that have outgrown their promise
            assert not set(step.preempted) & set(step.ids)
        lane.settle(step, ())
        if not waits:
            drive(lane, outputs, 2000)
            assert pool.is_idle
            assert pool.reserved_blocks == 0


def test_a_request_within_its_promise_is_never_preempted() -> None:
    pool = Pool(40, BLOCK_SIZE)
    lane = OneLane(LaneSettings(mix=True), pool)
    for id_ in range(4):
        lane.submit(Request(id_, 4, 80, promised_output=4 if id_ else None))
    preempted = [id_ for step in drive(lane, dict.fromkeys(range(4), 80), 3000) for id_ in step.preempted]
    assert preempted
    assert 0 not in preempted
    assert pool.is_idle


def test_a_batch_that_is_held_sets_all_of_its_memory_aside() -> None:
    """Requests may come from a plan under which they could outgrow a promise; none that has finished is preempted."""
    schedule = OneLane(LaneSettings(mix=False, max_batch=2, refill_when_empty=True), Pool(6, 4, holds_finished=True))
    for id_ in range(2):
        schedule.submit(Request(id_, 4, 16, promised_output=1))
    steps = 0
    while (step := schedule.next_step()) is not None:
        steps += 1
        schedule.settle(step, [id_ for id_ in step.ids if schedule.pool.running[id_].generated == 15])
    assert schedule.pool.is_idle and schedule.pool.num_preemptions == 0 and steps == 32


def test_a_micro_batch_keeps_nothing_of_requests_that_never_decode() -> None:
    """A server whose requests all end with their first token has no decode step that would clear its notes."""
    pool = Pool(100, 4)
    (batch,) = pool.add_batches(1)
    for id_ in range(50):
        pool.submit(Request(id_, 7, 9))
        request = pool.admit(batch)
        assert request is not None
        step = Step((rest_of_prompt(request),), ())
        pool.begin(step, batch)
        pool.end(step, batch)
        assert pool.settle(step, batch, [id_]) == [id_]
        assert (batch.num_decoding, batch.context, batch.joined) == (0, 0, [])
    assert pool.reserved_blocks == 0
