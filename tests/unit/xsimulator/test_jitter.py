"""Single steps in simulation: their mean is the profile's, and they differ as measured short steps do."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.contract.scenarios import problem
from tests.rings import examples
from xgpt.core.io import dump_json
from xgpt.core.schema import Constraint, Jitter, Profile
from xgpt.core.workload import TraceLengths
from xscheduler.objectives.arrivals import Arrivals
from xscheduler.schedule import Scheduler
from xsimulator.clock import NUM_DRAWN, JitteredTimes, Span
from xsimulator.run import run_requests, simulate

STALLS = Jitter(seconds=0.01, ratios=(*[0.95] * 90, *[1.0] * 8, 2.0, 4.5))
"""One short step in a hundred takes twice as long, one 4.5 times; the mean is 1."""


def times(jitter: Jitter, mean_s: float, count: int) -> np.ndarray:
    draws = JitteredTimes(jitter)
    return np.asarray([draws(round(1e9 * mean_s)) for _ in range(count)]) / 1e9 / mean_s


@pytest.mark.parametrize("stretches", [0.2, 1, 7, 60])
def test_means_are_kept_and_long_steps_vary_less(stretches: float) -> None:
    ratios = times(STALLS, stretches * STALLS.seconds, 30_000)
    assert ratios.mean() == pytest.approx(1.0, abs=0.01)
    expected = np.std(STALLS.ratios) / np.sqrt(max(1, stretches))
    assert ratios.std() == pytest.approx(expected, rel=0.1)


def test_short_steps_have_the_measured_quantiles() -> None:
    ratios = times(STALLS, STALLS.seconds, 50_000)
    assert np.quantile(ratios, 0.5) == pytest.approx(0.95, abs=0.01)
    assert np.quantile(ratios, 0.985) == pytest.approx(2.0, abs=0.03)
    assert ratios.max() == pytest.approx(4.5, abs=0.1)


@given(
    st.lists(st.floats(0.1, 20.0), min_size=1, max_size=8),
    st.floats(1e-4, 1.0),
    st.lists(st.integers(1, 10**13), min_size=1, max_size=20),
)
def test_any_jitter_gives_any_step_a_positive_time_within_its_ratios(
    ratios: list[float], seconds: float, means: list[int]
) -> None:
    jitter = Jitter(seconds=seconds, ratios=tuple(sorted(ratios)))
    draws, mean_ratio = JitteredTimes(jitter), np.mean(ratios)
    for mean_ns in means:
        found = draws(mean_ns)
        assert found >= 1
        if mean_ns >= 100:
            assert min(ratios) / mean_ratio * 0.8 <= found / mean_ns <= max(ratios) / mean_ratio * 1.25


def test_the_same_calls_give_the_same_times_beyond_the_last_drawn_stretch() -> None:
    means = [10**7, 3 * 10**9] * (NUM_DRAWN // 150)
    first, second = ([*map(draws, means)] for draws in (JitteredTimes(STALLS), JitteredTimes(STALLS)))
    assert first == second and len(set(first)) > 2


def test_only_gaps_that_are_single_steps_get_longer() -> None:
    """What is a sum of many steps is as without jitter; a slowed profile's figures are all longer by the factor."""
    subject = problem("opt-13b", "a40x4", "summarization", latency_bound_s=30.0)
    plan = Arrivals(Scheduler(subject.under(Constraint(latency_bound_s=30.0)))).of_kind("orca", 1)[0][0]
    jittery = subject.profile.model_copy(update={"jitter": STALLS.times(100)})  # as long as this plan's longest steps
    calm, shaken, again, slowed = (
        simulate(plan, profile, subject.workload, examples(5000, 1500), np.random.default_rng(0))[0]
        for profile in (subject.profile, jittery, jittery, jittery.slowed(1.5))
    )
    assert (shaken.itl_p99_s, shaken.latency_s) == (again.itl_p99_s, again.latency_s)
    assert shaken.throughput_rps == pytest.approx(calm.throughput_rps, rel=0.02)
    assert shaken.latency_s == pytest.approx(calm.latency_s, rel=0.05)
    assert shaken.itl_p99_s > 1.05 * calm.itl_p99_s
    assert slowed.itl_p99_s == pytest.approx(1.5 * shaken.itl_p99_s, rel=1e-6)


def test_spans_are_as_long_as_the_single_steps() -> None:
    subject = problem("opt-13b", "a40x4", "summarization", latency_bound_s=30.0)
    plan = Arrivals(Scheduler(subject.under(Constraint(latency_bound_s=30.0)))).of_kind("orca", 1)[0][0]
    profile = subject.profile.model_copy(update={"jitter": STALLS})
    lengths = TraceLengths(np.full(40, 100), np.full(40, 20), None)
    spans = list[Span]()
    log = run_requests(plan, profile, lengths, 20, spans.append)
    assert {span.end_ns for span in spans} >= {record.end_ns for record in log}
    assert all(span.start_ns < span.end_ns for span in spans)
    for stage in {span.stage for span in spans}:
        assert all(b.start_ns >= a.end_ns for a, b in pairwise(span for span in spans if span.stage == stage))
    without = run_requests(plan, profile.of_means, lengths, 20)
    assert without == run_requests(plan, subject.profile, lengths, 20) != log


def test_profiles_keep_their_jitter_and_their_hash_without_one() -> None:
    profile = problem("opt-13b", "a40x4", "summarization").profile
    assert '"jitter"' not in dump_json(profile)
    jittery = profile.model_copy(update={"jitter": STALLS})
    assert Profile.model_validate_json(dump_json(jittery)) == jittery
    assert jittery.of_means == profile and profile.of_means is profile
    slowed = jittery.slowed(2.0).jitter
    assert slowed is not None and slowed.seconds == 2 * STALLS.seconds and slowed.ratios == STALLS.ratios


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ((1.0, 0.5), "must rise"),
        ((0.0, 0.0), "all of them are 0"),
        ((), "at least 1"),
        ((-1.0,), "greater than or equal to 0"),
    ],
)
def test_a_jitter_that_cannot_be_drawn_from_is_refused(ratios: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Jitter(seconds=0.01, ratios=ratios)
