"""The window of observed lengths: what is in flight counts, and chance is not taken for a change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgpt.core.schema import Histogram, Workload
from xgpt.core.workload import histogram_of, sample
from xgpt.observation.windows import (
    FALSE_ALARM,
    HALF_LIFE,
    MIN_FINISHED,
    ChangeDetector,
    LengthWindow,
    Sample,
    observe,
    observe_lengths,
    surprise,
    wasserstein,
)


def workload(input_mean: float, output_mean: float, seed: int = 0, spread: float = 0.5) -> Workload:
    """Gamma-distributed lengths, a spread of half the mean (of the outputs: this share of it)."""
    rng = np.random.default_rng(seed)
    shapes = ((4.0, input_mean), (spread**-2, output_mean))
    draws = [np.maximum(1, rng.gamma(shape, m / shape, 20_000)).astype(int) for shape, m in shapes]
    return Workload(name="w", input=histogram_of(draws[0]), output=histogram_of(draws[1]))


def run(window: LengthWindow, lengths: Workload, count: int, rng: np.random.Generator) -> None:
    """Requests that arrive one by one and have all ended."""
    for i, (input_, output) in enumerate(zip(*sample(lengths, count, rng, stratified=False), strict=True)):
        seen = window.arrive(float(i), int(input_), int(output))
        seen.generated, seen.has_ended = int(output), True


def taken(window: LengthWindow) -> Sample:
    return Sample.of(window.requests())


lengths = st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=6).map(
    lambda d: Histogram(
        lengths=tuple(sorted(d)), probabilities=tuple(d[length] / sum(d.values()) for length in sorted(d))
    )
)


@given(lengths, lengths)
def test_distances(a: Histogram, b: Histogram) -> None:
    steps = np.arange(1, 61)
    curves = [np.cumsum([dict(zip(h.lengths, h.probabilities, strict=True)).get(n, 0) for n in steps]) for h in (a, b)]
    assert wasserstein(a, b) == pytest.approx(np.abs(curves[0] - curves[1]).sum())
    assert wasserstein(a, a) == 0


def test_outputs_in_flight_are_not_forgotten() -> None:
    """Requests that arrive one a step, each step giving every one a token: those that ended lately are short."""
    rng = np.random.default_rng(1)
    true = workload(20, 80)
    _, outputs = sample(true, 600, rng, stratified=False)
    window = LengthWindow()
    for i, output in enumerate(outputs):
        seen = window.arrive(float(i), 20, 400)
        seen.generated = min(int(output), 600 - i)
        seen.has_ended = seen.generated == output
    last = taken(window)
    late = last.tail(100)
    ended = late.outputs[late.has_ended].mean()
    corrected = late.output_histogram().mean
    assert ended < 0.75 * true.output.mean
    assert corrected == pytest.approx(true.output.mean, rel=0.2)
    assert abs(corrected - true.output.mean) < abs(ended - true.output.mean)


def test_later_requests_count_more() -> None:
    window = LengthWindow()
    for length, count in ((10, HALF_LIFE), (20, HALF_LIFE)):
        for _ in range(count):
            seen = window.arrive(0.0, length, length)
            seen.generated, seen.has_ended = length, True
    last = taken(window)
    observation = observe(last, workload(10, 10))
    assert observation.workload.input.probabilities == pytest.approx((1 / 3, 2 / 3), rel=1e-3)
    assert observation.weight < observation.num_requests


def test_the_longest_allowed_output_is_planned_for() -> None:
    window = LengthWindow()
    seen = window.arrive(0.0, 5, 64)
    seen.generated, seen.has_ended = 3, True
    last = taken(window)
    observed = observe(last, workload(10, 10)).workload.output
    assert (observed.lengths, observed.probabilities) == ((3, 64), (1.0, 0.0))


def test_counts_that_chance_explains_and_such_that_it_does_not() -> None:
    from scipy.stats import chi2

    planned = Histogram(lengths=(10, 20), probabilities=(0.5, 0.5))
    seven = Histogram(lengths=(10, 20), probabilities=(0.7, 0.3))
    # 70 of 100 where half was planned: 100 KL(0.7 || 0.5) = 8.23 nats with one degree of freedom.
    assert surprise(seven, 100, planned) == pytest.approx(-chi2.logsf(2 * 8.2283, 1), rel=2e-3)
    assert surprise(planned, 100, planned) == 0
    assert surprise(seven, 100, planned, 1e9) == pytest.approx(surprise(seven, 100, planned), rel=1e-3)
    assert surprise(seven, 100, planned, 100) < surprise(seven, 100, planned) / 1.5
    # What a plan does not have at all: one is chance, two are not.
    for length in (5, 30):
        lengths = (length, 10) if length < 10 else (10, length)
        for count in (1, 2):
            share = (count / 100, 1 - count / 100) if length < 10 else (1 - count / 100, count / 100)
            other, constant = (Histogram(lengths=n, probabilities=p) for n, p in ((lengths, share), ((10,), (1.0,))))
            assert (surprise(other, 100, constant) > np.log(2 / FALSE_ALARM)) == (count == 2)
    # All 100 are longer than 10, and nothing more is known of them.
    longer = Histogram(lengths=(11,), probabilities=(1.0,))
    assert surprise(longer, 100, planned, known_to=11) > 60
    assert surprise(longer, 100, planned, known_to=10) == 0


@settings(max_examples=3)
@given(st.integers(0, 1000))
def test_chance_is_no_change(seed: int) -> None:
    planned, rng = workload(50, 30), np.random.default_rng(seed)
    window, detector = LengthWindow(), ChangeDetector(planned)
    for _ in range(60):
        run(window, planned, 64, rng)
        assert detector.look(taken(window)) is None


@pytest.mark.parametrize("factor", [0.7, 0.85, 1.15, 1.3])
def test_a_change_is_found_and_dated(factor: float) -> None:
    rng = np.random.default_rng(2)
    planned = workload(50, 30)
    window, detector = LengthWindow(), ChangeDetector(planned)
    run(window, planned, 1500, rng)
    num_changed = 0
    while num_changed < 1100:
        num_changed += 32
        run(window, workload(50, 30 * factor, seed=3), 32, rng)
        changed = detector.look(taken(window))
        if changed is not None:
            break
    assert changed is not None
    assert MIN_FINISHED <= len(changed) <= 1.5 * num_changed
    assert num_changed <= (320 if abs(factor - 1) > 0.2 else 1000)


@pytest.mark.parametrize("spread", [0.35, 0.65])
def test_a_change_of_the_spread_alone_is_found(spread: float) -> None:
    rng = np.random.default_rng(2)
    planned = workload(50, 30)
    window, detector = LengthWindow(), ChangeDetector(planned)
    run(window, planned, 1000, rng)
    num_changed, changed = 0, None
    while changed is None and num_changed < 600:
        num_changed += 32
        run(window, workload(50, 30, seed=3, spread=spread), 32, rng)
        changed = detector.look(taken(window))
    assert changed is not None
    assert num_changed <= 550


def test_what_was_learnt_from_few_is_looked_at_again() -> None:
    rng = np.random.default_rng(4)
    planned = workload(50, 30)
    window, detector = LengthWindow(), ChangeDetector(planned, weight=120)
    run(window, planned, 200, rng)
    assert detector.look(taken(window)) is None
    run(window, planned, 100, rng)
    again = detector.look(taken(window))
    assert again is not None and len(again) == 300


def test_a_trace_is_an_observation_too() -> None:
    observation = observe_lengths([4, 4, 8], [1, 2, 3], workload(10, 10))
    assert (observation.num_requests, observation.weight) == (3, 3)
    assert observation.workload.input.lengths == (4, 8)


def test_the_arrival_rate_is_a_number_from_the_first_arrival_and_falls_while_nothing_arrives() -> None:
    window = LengthWindow()
    assert window.arrival_rate_per_s(100.0) == 0
    window.arrive(100.0, 1, 1)
    assert window.arrival_rate_per_s(100.0) == pytest.approx(1 / 60)
    for number in range(1, 200):
        window.arrive(100.0 + number / 10, 1, 1)
    last_s = 100.0 + 19.9
    assert window.arrival_rate_per_s(last_s) == pytest.approx(10, rel=0.02)
    rates = [window.arrival_rate_per_s(last_s + later_s) for later_s in (0, 5, 20, 50, 61, 3600)]
    assert rates == sorted(rates, reverse=True) and 0 < rates[2] < 3 and rates[-2:] == [0, 0]


def test_prompts_that_arrive_at_once_are_no_rate_without_bound() -> None:
    window = LengthWindow()
    for _ in range(64):
        window.arrive(5.0, 1, 1)
    assert window.arrival_rate_per_s(5.0) == 64 and window.arrival_rate_per_s(13.0) == pytest.approx(8, rel=0.02)
    window.forget_before(10.0)
    assert window.arrival_rate_per_s(5.5) == 64
