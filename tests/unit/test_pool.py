"""The pool never promises more K/V than there is, whatever the order of submissions, steps, endings and cancels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgpt.policies import LaneSettings, OneLaneRule, Pool, Request
from xgpt.schema import KvPromise

BLOCK_SIZE = 4


def blocks_in_use(pool: Pool) -> int:
    """What the requests inside come to need ("reserve"), or hold by now ("quantile")."""
    inside = [*pool.encoding.values(), *pool.decoding.values(), *pool.held.values()]
    tokens = [r.input_length + (r.max_output if pool.kv == "reserve" else r.generated) for r in inside]
    return sum(-(-n // BLOCK_SIZE) for n in tokens)


@pytest.mark.parametrize(("kv", "hold"), [("reserve", False), ("reserve", True), ("quantile", False)])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_never_over_commits(kv: KvPromise, hold: bool, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=15))
    longest = max(-(-(i + o) // BLOCK_SIZE) for i, o in lengths)
    pool = Pool(longest + data.draw(st.integers(0, 10)), BLOCK_SIZE, kv=kv, hold_finished=hold)
    rule = OneLaneRule(LaneSettings(mix=not hold, max_batch=6, refill_when_empty=hold))
    for id_, (input_, output) in enumerate(lengths):
        request = Request(id_, input_, output)
        assert pool.can_ever_fit(request)
        pool.submit(request)
    ended: set[int] = set()
    while not pool.is_idle:
        if data.draw(st.booleans()):
            ended.update(pool.cancel(data.draw(st.integers(0, len(lengths)))))
        step = rule.next_step(pool)
        if step is None:
            continue
        assert blocks_in_use(pool) <= pool.reserved_blocks <= pool.kv_blocks
        running = {**pool.encoding, **pool.decoding}
        done = [c.id for c in step.encode if c.start + c.length == running[c.id].context]
        tokens = [id_ for id_ in [*done, *step.decode] if id_ in running]
        finished = [
            id_
            for id_ in tokens
            if running[id_].generated + 1 == running[id_].max_output or data.draw(st.integers(0, 3)) == 0
        ]
        ended.update(pool.settle(step, finished))
    assert pool.reserved_blocks == pool.num_running == 0
    assert ended == set(range(len(lengths)))


def test_admits_in_order_and_waits_for_memory() -> None:
    pool = Pool(kv_blocks=10, block_size=4)
    for id_, input_length in enumerate([20, 20, 4]):
        pool.submit(Request(id_, input_length, 4))
    first = pool.admit()
    assert first is not None
    assert (first.id, pool.reserved_blocks) == (0, 6)
    # The short one would fit, but nobody overtakes.
    assert pool.admit() is None
    assert [request.id for request in pool.waiting] == [1, 2]


def test_a_request_too_long_can_never_fit() -> None:
    pool = Pool(kv_blocks=4, block_size=4)
    assert pool.can_ever_fit(Request(0, 10, 6))
    assert not pool.can_ever_fit(Request(0, 10, 7))


def test_cancelling_what_is_not_there_is_ignored() -> None:
    assert Pool(4, 4).cancel(7) == []
