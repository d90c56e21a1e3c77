"""Lengths and arrivals: exact histograms, sampling, traces good and bad."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import examples
from tests.traces import write
from tools.make_workload import render
from xgpt.core import workload
from xgpt.core.errors import InputError
from xgpt.core.io import load_yaml, parse
from xgpt.core.schema import Constant, Histogram, TruncatedNormal, Uniform, Workload, WorkloadSpec

TWO_POINTS = Histogram(lengths=(3, 8), probabilities=(0.99, 0.01))


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


# Table 3 of ExeGPT, as the product's sources give it: mean and 99th percentile after the cut, from scipy.
@pytest.mark.parametrize(
    ("mean", "sd", "max_"), [(32, 13, 80), (128, 68, 320), (192, 93, 480), (256, 252, 512), (20, 4.47, 100)]
)
def test_normal_is_the_density_integrated_over_each_length(mean: float, sd: float, max_: int) -> None:
    from scipy import stats

    histogram = workload.histogram(TruncatedNormal(mean=mean, sd=sd, max=max_))
    cut = stats.truncnorm((0.5 - mean) / sd, (max_ + 0.5 - mean) / sd, mean, sd)
    k = np.arange(1, max_ + 1)
    assert histogram.lengths == tuple(k)
    np.testing.assert_allclose(histogram.probabilities, cut.cdf(k + 0.5) - cut.cdf(k - 0.5), atol=1e-14)
    assert min(histogram.probabilities) > 0, "the far tail keeps its digits"
    assert workload.quantile(histogram, 0.99) == math.ceil(cut.ppf(0.99) - 0.5)
    assert histogram.mean == pytest.approx(cut.mean(), abs=0.01)


def test_uniform_constant_and_histogram() -> None:
    uniform = workload.histogram(Uniform(min=32, max=512))
    assert (uniform.lengths[0], uniform.lengths[-1], len(uniform.lengths)) == (32, 512, 481)
    assert uniform.mean == pytest.approx(272)
    assert workload.histogram(Constant(value=9)) == Histogram(lengths=(9,), probabilities=(1.0,))
    assert workload.histogram(TWO_POINTS) is TWO_POINTS


@pytest.mark.parametrize(
    "distribution",
    [Uniform(min=5, max=4), TruncatedNormal(mean=1e6, sd=1, max=10), TruncatedNormal(mean=5, sd=1, min=9, max=8)],
)
def test_distribution_without_a_length_is_refused(distribution: Uniform | TruncatedNormal) -> None:
    with pytest.raises(InputError):
        workload.histogram(distribution)


def test_histogram_of_counts() -> None:
    assert workload.histogram_of([5, 2, 5, 5]) == Histogram(lengths=(2, 5), probabilities=(0.25, 0.75))


def test_quantile_is_the_smallest_length_that_covers() -> None:
    assert workload.quantile(TWO_POINTS, 0.99) == 3
    assert workload.quantile(TWO_POINTS, 0.9901) == 8
    assert workload.quantile(TWO_POINTS, 1) == 8
    tenths = Histogram(lengths=tuple(range(1, 11)), probabilities=(0.1,) * 10)
    assert [workload.quantile(tenths, q / 10) for q in range(1, 11)] == list(range(1, 11))
    for q in (0, -0.1, 1.01, math.nan):
        with pytest.raises(InputError):
            workload.quantile(TWO_POINTS, q)


def summarization() -> Workload:
    return Workload(
        name="s",
        input=workload.histogram(TruncatedNormal(mean=256, sd=252, max=512)),
        output=workload.histogram(TruncatedNormal(mean=32, sd=13, max=80)),
    )


@pytest.mark.parametrize("stratified", [True, False])
def test_sample_follows_both_histograms_independently(stratified: bool) -> None:
    loads = summarization()
    inputs, outputs = workload.sample(loads, 40_000, rng(), stratified=stratified)
    for lengths, histogram in ((inputs, loads.input), (outputs, loads.output)):
        counts = np.bincount(lengths, minlength=histogram.lengths[-1] + 1)[1:]
        assert np.abs(np.cumsum(counts) / 40_000 - np.cumsum(histogram.probabilities)).max() < 0.01
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.02


def test_stratified_blocks_take_each_stratum_once() -> None:
    percent = Histogram(lengths=tuple(range(1, 101)), probabilities=(0.01,) * 100)
    inputs, _ = workload.sample(Workload(name="p", input=percent, output=percent), 250, rng())
    cdf_edges = np.arange(1, 101)
    for block in (inputs[:100], inputs[100:200]):
        # A rounding at a stratum's edge may move a draw to the next length.
        assert np.abs(np.sort(block) - cdf_edges).max() <= 1
        assert not np.array_equal(block, np.sort(block)), "the order is random"
    rest = np.sort(inputs[200:])
    assert np.all(rest >= 2 * np.arange(50) + 1) and np.all(rest <= 2 * np.arange(50) + 3)


def test_stratified_means_vary_less() -> None:
    loads = summarization()
    spread = {
        stratified: np.std(
            [workload.sample(loads, 300, rng(seed), stratified=stratified)[1].mean() for seed in range(60)]
        )
        for stratified in (True, False)
    }
    assert spread[True] < spread[False] / 5


@settings(max_examples=examples(60, 15))
@given(
    st.dictionaries(st.integers(1, 50), st.integers(0, 5), min_size=1).filter(lambda d: sum(d.values()) > 0),
    st.integers(0, 230),
    st.booleans(),
)
def test_samples_are_lengths_of_positive_probability(counts: dict[int, int], n: int, stratified: bool) -> None:
    total = sum(counts.values())
    lengths = sorted(counts)
    histogram = Histogram(lengths=tuple(lengths), probabilities=tuple(counts[k] / total for k in lengths))
    inputs, outputs = workload.sample(
        Workload(name="w", input=histogram, output=histogram), n, rng(), stratified=stratified
    )
    assert len(inputs) == len(outputs) == n
    assert all(counts[length] > 0 for length in [*inputs.tolist(), *outputs.tolist()])


def test_sampling_is_reproducible() -> None:
    first, again = (workload.sample(summarization(), 150, rng(3)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness(cv: float) -> None:
    times = workload.gamma_arrivals(4.0, 100_000, cv, rng())
    gaps = np.diff(times)
    assert np.all(gaps >= 0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_counts_have_variance_equal_to_mean() -> None:
    times = workload.gamma_arrivals(10.0, 50_000, 1.0, rng())
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.03)
    assert counts.var() == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("rate", "cv"), [(0, 1), (-1, 1), (math.inf, 1), (math.nan, 1), (1, 0), (1, -2)])
def test_impossible_arrivals_are_refused(rate: float, cv: float) -> None:
    with pytest.raises(InputError):
        workload.gamma_arrivals(rate, 5, cv, rng())


@settings(max_examples=examples(40, 10))
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=400))
def test_bins_keep_mean_and_maximum(values: list[int]) -> None:
    full, small = workload.histogram_of(values), workload.binned(values)
    assert len(small.lengths) <= 101
    assert small.lengths[-1] == full.lengths[-1]
    assert small.mean == pytest.approx(full.mean, abs=0.5)


def test_rendered_workload_reads_back(tmp_path: Path) -> None:
    values = rng().integers(1, 2000, 5000)
    full, small = workload.histogram_of(values), workload.binned(values)
    path = write(tmp_path, render("mine", "a: test", small, small), "mine.yaml")
    spec = parse(load_yaml(path, "workload"), WorkloadSpec, "workload")
    assert (spec.name, spec.source) == ("mine", "a: test")
    assert spec.input == spec.output
    for q in (0.5, 0.9, 0.99):
        read = workload.quantile(workload.histogram(spec.output), q)
        assert read == pytest.approx(workload.quantile(full, q), rel=0.05)
