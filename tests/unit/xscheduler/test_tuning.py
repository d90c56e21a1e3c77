"""A search among an engine's settings: what measurements say of them, and which one is next."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import ChunkedSettings
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xscheduler.tuning.belief import Array, Belief, MeasuredRate
from xscheduler.tuning.model import EngineModel, MeasuredTimes, Prior
from xscheduler.tuning.tuner import Tuner
from xsimulator.capacity import CapacitySearch, Trial
from xsimulator.fitted import Fit

PLACES = np.arange(12.0)[:, None] / 2


def believed(truth: Array, error: float, samples: int = 400, seed: int = 0) -> Belief:
    """Predictions whose common factor is unknown by 30%, and whose shape is wrong by `error` everywhere."""
    rng = np.random.default_rng(seed)
    wrong = truth * np.exp(error * np.linspace(-1, 1, len(truth)))
    return Belief(PLACES, wrong * np.exp(0.3 * rng.standard_normal((samples, 1))), np.zeros(samples))


def searched(belief: Belief, truth: Array) -> tuple[int, list[int]]:
    """What is best in the end, and what was measured until then."""
    verdict, order = belief.standing(), list[int]()
    while not verdict.ends:
        assert verdict.next is not None
        order.append(verdict.next)
        belief = belief.measure(MeasuredRate(verdict.next, float(truth[verdict.next])))
        verdict = belief.standing()
    assert verdict.best is not None
    return verdict.best, order


def test_a_model_that_is_right_up_to_a_factor_needs_few_measurements() -> None:
    truth = np.exp(-(((np.arange(12.0) - 7) / 4) ** 2))
    best, order = searched(believed(truth, 0.0), truth)
    assert best == 7 and len(order) <= 4


def test_ranks_that_measurements_refute_are_given_up() -> None:
    """The model says that the last candidate is best; the first one is, by far."""
    truth = np.exp(-np.arange(12.0) / 3)
    best, order = searched(believed(truth, 2.2), truth)
    assert best == 0 and order[0] != 0 and len(order) <= 9


def test_the_certainty_of_a_decision_is_how_often_it_is_right() -> None:
    """Over machines that are drawn from the belief itself: of those decided, at least nine in ten are right."""
    right = decided = 0
    belief = believed(np.ones(12), 0.0)
    machines = belief.draws[:60]
    for truth in machines:
        now, verdict = belief, belief.standing()
        for _ in range(12):
            assert verdict.next is not None
            now = now.measure(MeasuredRate(verdict.next, float(truth[verdict.next])))
            verdict = now.standing()
            if verdict.is_decided:
                decided += 1
                right += bool(truth.max() <= 1.05 * truth[verdict.best])
                break
    assert decided >= 30 and right >= 0.9 * decided


def test_what_does_not_start_is_worth_nothing_but_what_has_run_can_run() -> None:
    belief = believed(np.ones(12), 0.0).measure(MeasuredRate(11, 1.0)).exclude({9, 10, 11})
    assert belief.excluded == {9, 10} and not belief.draws[:, 9:11].any() and belief.draws[:, 11].all()


def test_what_lacks_memory_excludes_what_needs_no_less(model: EngineModel) -> None:
    tuner, places = Tuner(model), [(each.token_budget, each.max_batch) for _, each in model.settings]
    first = next(at for at, (tokens, seqs) in enumerate(places) if tokens > 1000 and seqs > 100)
    tuner.tell_failed(first, for_memory=True)
    tokens, seqs = places[first]
    assert {places[at] for at in tuner.belief.excluded} == {(t, s) for t, s in places if t >= tokens and s >= seqs}
    other = next(at for at, (t, s) in enumerate(places) if t < 500 and s >= seqs)
    tuner.tell_failed(other, for_memory=True)
    assert all(s < places[other][1] or at in tuner.belief.excluded for at, (_, s) in enumerate(places))


@pytest.fixture(scope="module")
def model() -> EngineModel:
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "engine": "vllm-0.32"}
    bounds = {"latency_bound_s": None, "ttft_s": 1.0, "tpot_s": 0.03}
    return EngineModel(resolve(plan_request(**asked, **bounds, policy="chunked")))


def test_rates_between_the_samples_are_those_of_the_closed_form(model: EngineModel) -> None:
    belief = model.belief()
    for sample in (3, 400, 2000):
        fit = model.prior.fits(model.samples[sample : sample + 1], model._least_step_s)[0]
        exact = model.rates(fit)
        off = np.abs(belief.predictions[sample] - exact) / exact.max()
        assert np.median(off) < 0.02 and off.max() < 0.2


def test_a_slow_engine_is_recognised_by_the_times_of_one_load(model: EngineModel) -> None:
    """Half as fast in decode only: the best settings of this engine are found, and its parameters."""
    hidden = Fit(decode=1.6, prefill=1.0)
    profile = hidden.of_profile(model.problem.profile)
    tuner = Tuner(model)

    def true_rate(candidate: int) -> float:
        return CapacitySearch(model.plan(candidate), profile, least_requests=500).rate

    for _ in range(3):
        following = tuner.standing().next
        assert following is not None
        rate = true_rate(following)
        times = Trial(model.plan(following), profile, least_requests=400).at(0.9 * rate)
        assert times is not None
        load = MeasuredTimes(following, 0.9 * rate, float(times.ttft_s.mean()), float(times.tpot_s.mean()))
        tuner.tell(MeasuredRate(following, rate), load)
    assert 1.3 < tuner.fit.decode < 1.9 and 0.75 < tuner.fit.prefill < 1.3
    best = tuner.standing().best
    assert best is not None
    closed = model.rates(hidden)
    others = np.argsort(-closed)[:6]
    assert true_rate(best) >= 0.93 * max(true_rate(int(other)) for other in others)


def test_settings_that_run_now_are_candidates() -> None:
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "engine": "vllm-0.32"}
    problem = resolve(plan_request(**asked, latency_bound_s=9.0, policy="chunked"))
    now = ChunkedSettings(token_budget=1000, max_batch=97)
    found = EngineModel(problem, more=[now])
    settings = found.settings[found.nearest(now)][1]
    assert (settings.token_budget, settings.max_batch) == (1000, 97)


def test_a_model_that_fits_nowhere_is_infeasible() -> None:
    problem = resolve(plan_request(model="llama-3.1-70b", cluster="h100x1", workload="azure-conv", latency_bound_s=9.0))
    with pytest.raises(InfeasibleError, match="memory"):
        EngineModel(problem)


def test_a_fit_changes_what_its_parameters_mean(model: EngineModel) -> None:
    profile = model.problem.profile
    slow = Fit(decode=2.0, prefill=1.0, step_s=1e-3).of_profile(profile)
    before, after = profile.layers[0], slow.layers[0]
    assert after.rest.seconds[0] == pytest.approx(2 * before.rest.seconds[0])
    assert after.encode_attention == before.encode_attention
    assert after.decode_attention == before.decode_attention.times(2.0)
    assert slow.overhead.seconds[0] == pytest.approx(profile.overhead.seconds[0] + 1e-3)
    assert Fit().of_profile(profile) == profile
    assert Prior.of(slow).pace < Prior.of(profile).pace, "after a fit less is unknown"
