"""What requests have in common is seen in the engine's log, and a plan is judged again when that changes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes import fake_plan
from tools.structured import shared_prompts
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import Arrival, StepRecord
from xgpt.core.workload import TraceLengths
from xgpt.observation.observer import Observer
from xgpt.observation.reuse import MOST_KEYS, ReuseWindow, changed, observed_reuse, share_of
from xgpt.observation.windows import observe_lengths

BLOCK = 16


def record(number: int, trace: TraceLengths, at: int, found: int, salt: bytes = b"") -> StepRecord:
    """The step in which a request begins and ends."""
    assert trace.prefixes is not None
    length, output = int(trace.input[at]), int(trace.output[at])
    left = trace.prefixes.output_chain(at, length, output, BLOCK)
    chain = tuple(salt + key for key in trace.prefixes.chain(at, length, BLOCK))
    arrival = Arrival(number, length, 100, 0, chain=tuple(key.rjust(16, b"\0")[-8:] + key for key in chain))
    encode = ((number, found, length - found),)
    return StepRecord(0, 1, encode, (), (number,), (arrival,), (), outputs=((number, left),))


def play(window: ReuseWindow, trace: TraceLengths, tokens: float, first: int = 0) -> None:
    cached = ReuseCurve(trace, BLOCK).cached(tokens)
    for at in range(len(trace.input)):
        window.note(record(first + at, trace, at, int(cached[at])))


def test_the_observed_curve_is_the_traces() -> None:
    trace = shared_prompts(1200, np.random.default_rng(0), prompts=40)
    window = ReuseWindow(fake_plan())
    window.block_size = BLOCK
    play(window, trace, 8000)
    expected_curve, curve = observed_reuse(window.requests(), BLOCK), ReuseCurve(trace, BLOCK)
    assert expected_curve is not None
    assert expected_curve.share == pytest.approx(curve.share(8000))
    for size, share in zip(expected_curve.sizes, expected_curve.shares, strict=True):
        assert share == pytest.approx(curve.share(size, 600), abs=1e-9)
    assert expected_curve.most == pytest.approx(curve.share(np.inf, 600))


def test_memory_is_bounded_whatever_the_prompts() -> None:
    trace = shared_prompts(3000, np.random.default_rng(0), prompt_tokens=4000)
    window = ReuseWindow(fake_plan())
    for at in range(3000):
        window.note(record(at, trace, at, 0))
    kept = sum(len(request.keys) for request in window.requests())
    assert 0.9 * MOST_KEYS < kept <= MOST_KEYS


def test_a_change_is_seen_and_a_cold_cache_is_none() -> None:
    trace = shared_prompts(1200, np.random.default_rng(1), prompts=20)
    alone = trace._replace(input=trace.input)
    window = ReuseWindow(fake_plan())
    play(window, trace, 1e9)
    seen = window.requests()
    share, error = share_of(seen)
    assert error < 0.02 < 0.5 < share
    assert changed(seen, share) is None
    assert changed(seen[:160], share + 0.3) is None, "the cache is not full yet: it finds less than it will"
    since = changed(seen, 0.0)
    assert since is not None and share_of(since)[0] > 0.4
    for at in range(400):
        window.note(record(5000 + at, alone, at, 0))
    gone = changed(window.requests(), share)
    assert gone is not None and share_of(gone)[0] < share - 0.1


def test_an_observer_asks_for_a_plan_where_hits_appear() -> None:
    plan: Plan = fake_plan()
    trace = shared_prompts(500, np.random.default_rng(2), prompts=20)
    lengths = observe_lengths(trace.input, trace.output, plan.workload).workload
    observer = Observer(plan.model_copy(update={"workload": lengths, "block_size": BLOCK}))
    asked = 0
    cached = ReuseCurve(trace, BLOCK).cached(1e9)
    for at in range(500):
        seen = observer.window.arrive(float(at), int(trace.input[at]), int(trace.output.max()))
        seen.generated = int(trace.output[at])
        observer.reuse.note(record(at, trace, at, int(cached[at])))
        observer.end(seen)
        if at % 16 == 0 and at:
            now = observer.snapshot()
            found = None if now is None else observer.look(now)
            asked += found is not None
            if found is not None:
                assert found.reuse is not None and found.reuse.share > 0.4
    assert 1 <= asked <= 3
