"""The step pattern of each policy on cases small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.policies import Chunk, LaneSettings, OneLane, OneLaneRule, Pool, Request, Rule, Step, lane_settings
from xgpt.core.policies.request import MicroBatch
from xgpt.core.policies.slack import TokenRoom
from xgpt.core.schema import ChunkedSettings, OrcaSettings, RraSettings, StaticSettings
from xsimulator.events import SimulatedEngine, SimulatedRequest


def run(
    lane: LaneSettings, requests: list[tuple[int, int]], *, max_output: int = 100
) -> list[tuple[list[int], list[int]]]:
    """(requests encoded, requests decoded) of each step, for (input, output) lengths that all wait at the start."""
    pool = Pool(10**6, 16, holds_finished=lane.refill_when_empty)
    simulated = [SimulatedRequest(i, input_, max_output, output) for i, (input_, output) in enumerate(requests)]
    log = SimulatedEngine(OneLane(lane, pool), lambda start, _step: start + 1, simulated).run()
    return [([id_ for id_, _, _ in record.encode], list(record.decode)) for record in log]


def test_settings_become_lanes() -> None:
    rra = lane_settings(RraSettings(encode_batch=4, decode_iterations=9), encode_tokens=512.0, decode_batch=14.0)
    assert rra == LaneSettings(mix=False, encode_every=9, encode_tokens=512.0, carried_batch=10.0, decode_batch=14.0)
    assert lane_settings(OrcaSettings(max_batch=8), 1.0, 1.0) == LaneSettings(mix=True, max_batch=8)
    assert lane_settings(ChunkedSettings(token_budget=64, max_batch=8), 1.0, 1.0) == LaneSettings(
        mix=True, token_budget=64, max_batch=8
    )
    assert lane_settings(StaticSettings(batch=8), 1.0, 1.0) == LaneSettings(
        mix=False, max_batch=8, refill_when_empty=True
    )


def test_rra_encodes_after_every_phase() -> None:
    lane = LaneSettings(mix=False, encode_every=2, encode_tokens=20.0, carried_batch=2.0, decode_batch=4.0)
    assert run(lane, [(10, 5)] * 6)[:9] == [
        ([0, 1], []),
        ([], [0, 1]),
        ([], [0, 1]),
        ([2, 3], []),
        ([], [0, 1, 2, 3]),
        ([], [0, 1, 2, 3]),
        ([4, 5], []),
        ([], [2, 3, 4, 5]),
        ([], [2, 3, 4, 5]),
    ]


def test_rra_starts_a_phase_early_when_none_decodes() -> None:
    lane = LaneSettings(mix=False, encode_every=50, encode_tokens=10.0, carried_batch=0.0, decode_batch=1.0)
    assert run(lane, [(10, 2)] * 2) == [([0], []), ([], [0]), ([1], []), ([], [1])]


def test_rra_takes_one_prompt_however_long() -> None:
    lane = LaneSettings(mix=False, encode_every=3, encode_tokens=10.0, carried_batch=0.0, decode_batch=1.0)
    assert run(lane, [(1000, 1)]) == [([0], [])]


def test_rra_keeps_the_mean_of_its_phases_on_the_target() -> None:
    rng = np.random.default_rng(0)
    # A decode batch that never deviates: the target itself is not adjusted.
    lane = LaneSettings(mix=False, encode_every=1, encode_tokens=1000.0, carried_batch=1.0, decode_batch=1e9)
    schedule = OneLane(lane, Pool(10**6, 16))
    for id_, length in enumerate(rng.integers(1, 513, 6000)):
        schedule.submit(Request(id_, int(length), 10**3))
    tokens: list[int] = []
    while len(tokens) < 1000:
        step = schedule.next_step()
        assert step is not None
        schedule.settle(step, [])
        if step.encode:
            tokens.append(sum(chunk.length for chunk in step.encode))
    # Never further from the target than half a prompt, however many phases have passed.
    assert np.abs(np.cumsum(tokens) - 1000 * np.arange(1, 1001)).max() <= 256


@pytest.mark.parametrize(("carried", "encoded"), [(10, 10), (14, 9), (6, 11)])
def test_rra_steers_the_decode_batch(carried: int, encoded: int) -> None:
    """Beyond 10% too many requests in decode the phase encodes a tenth less, beyond 10% too few a tenth more."""
    lane = LaneSettings(mix=False, encode_every=1, encode_tokens=100.0, carried_batch=10.0, decode_batch=20.0)
    pool = Pool(10**6, 16)
    (batch,) = pool.add_batches(1)
    for id_ in range(50):
        pool.submit(Request(id_, 10, 100))
    for _ in range(carried):
        assert pool.admit(batch) is not None
    pool.settle(Step(tuple(Chunk(id_, 0, 10) for id_ in pool.encoding), ()), batch, [])
    step = OneLaneRule(lane).next_step(pool, batch)
    assert step is not None
    assert len(step.encode) == encoded


def test_orca_refills_every_free_slot_at_once() -> None:
    assert run(LaneSettings(mix=True, max_batch=2), [(10, 2), (10, 3), (10, 2), (10, 1)]) == [
        ([0, 1], []),
        ([], [0, 1]),
        ([2], [1]),
        ([3], [2]),
    ]


def test_chunked_fills_its_budget_and_never_exceeds_it() -> None:
    lane = LaneSettings(mix=True, token_budget=8, max_batch=10)
    schedule = OneLane(lane, Pool(10**6, 16))
    for id_, length in enumerate([5, 20, 3, 1]):
        schedule.submit(Request(id_, length, 100))
    steps = []
    for _ in range(8):
        step = schedule.next_step()
        assert step is not None
        schedule.settle(step, [])
        steps.append(([tuple(chunk) for chunk in step.encode], list(step.decode)))
        assert sum(chunk.length for chunk in step.encode) + len(step.decode) <= 8
    assert steps[:5] == [
        ([(0, 0, 5), (1, 0, 3)], []),
        ([(1, 3, 7)], [0]),
        ([(1, 10, 7)], [0]),
        ([(1, 17, 3), (2, 0, 3), (3, 0, 1)], [0]),
        ([], [0, 1, 2, 3]),
    ]


def test_a_rule_may_have_its_own_room_for_prompts() -> None:
    class FourTokens(Rule):
        def room(self, pool: Pool, batch: MicroBatch) -> TokenRoom:
            return TokenRoom(4)  # however many decode

    schedule = OneLane(LaneSettings(mix=True, max_batch=10), Pool(10**6, 16), rule=FourTokens())
    for id_, length in enumerate([3, 6, 2]):
        schedule.submit(Request(id_, length, 100))
    steps = []
    for _ in range(4):
        step = schedule.next_step()
        assert step is not None
        schedule.settle(step, [])
        steps.append(([tuple(chunk) for chunk in step.encode], list(step.decode)))
    assert steps == [([(0, 0, 3), (1, 0, 1)], []), ([(1, 1, 4)], [0]), ([(1, 5, 1), (2, 0, 2)], [0]), ([], [0, 1, 2])]


def test_static_holds_the_finished_until_the_batch_ends() -> None:
    """No request enters early, and a finished one computes on, but not beyond its maximum."""
    lane = LaneSettings(mix=False, max_batch=2, refill_when_empty=True)
    assert run(lane, [(10, 2), (10, 4), (10, 1)], max_output=4) == [
        ([0, 1], []),
        ([], [0, 1]),
        ([], [1, 0]),
        ([], [1, 0]),
        ([2], []),
    ]
    assert run(lane, [(10, 1), (10, 4)], max_output=4)[-1] == ([], [1, 0])


@pytest.mark.parametrize("times", [0, 1, 7])
def test_an_idle_engine_may_be_asked_any_number_of_times(times: int) -> None:
    """The long prompt leaves a debt that keeps the second short one waiting, however often an idle engine polls."""
    lane = LaneSettings(mix=False, encode_every=2, encode_tokens=10.0, carried_batch=1.0, decode_batch=20.0)
    schedule = OneLane(lane, Pool(10**6, 16))
    schedule.submit(Request(0, 100, 1))
    step = schedule.next_step()
    assert step is not None
    schedule.settle(step, [0])
    for _ in range(times):
        assert schedule.next_step() is None
    schedule.submit(Request(1, 10, 100))
    schedule.submit(Request(2, 10, 100))
    encoded = []
    for _ in range(22):
        step = schedule.next_step()
        assert step is not None
        schedule.settle(step, [])
        encoded.append(len(step.encode))
    # A phase of two decode steps pays 10 tokens: nine for the debt of 90, one for the prompt.
    assert encoded == [1, *[0] * 20, 1]
