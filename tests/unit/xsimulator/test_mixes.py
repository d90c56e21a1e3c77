"""What the steps of orca and chunked are made of."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import one_lane, problem
from xgpt.core.schema import EngineSpec, Histogram, Workload
from xsimulator.forecast.mixes import Chunked, MixedSteps, mixes_of, most_displaced
from xsimulator.lengths import Lengths


@pytest.mark.parametrize("workload", ["chat-short", "chat-long", "azure-code"])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("has_budget", [True, False])
def test_steps_that_encode_decode_hardly_fewer_requests_than_the_mean(
    workload: str, ahead: bool, has_budget: bool
) -> None:
    lengths = Lengths(problem("llama-3.1-8b", "h200x1", workload).workload)
    rng, size = np.random.default_rng(1), 4000
    microbatches = rng.integers(1, 12, size).astype(float)
    max_batch = np.maximum(np.floor(5000 ** rng.random(size)), microbatches)
    budget = np.maximum(np.exp(rng.uniform(np.log(16), np.log(40_000), size)), max_batch + microbatches)
    mix = mixes_of(lengths, ahead=ahead)(max_batch, budget if has_budget else None, microbatches)
    displaced = (1 - mix.busy) * (mix.columns[0, 0] - mix.decode_batch)
    assert 0.3 < displaced.max() <= most_displaced(lengths)
    assert (mix.decode_batch - mix.busy * mix.columns[0, 1] <= (1 - mix.busy) * mix.columns[0, 0] + 1e-9).all()


def test_a_step_that_a_long_prompt_fills_encodes_no_prompt_twice() -> None:
    """Tokens that do not fit into one step fill others: with long prompts' share of requests, not with short ones'."""
    prompts = Histogram(lengths=(6, 44, 248), probabilities=(0.3, 0.3, 0.4))
    outputs = Histogram(lengths=(1, 6, 28), probabilities=(0.2, 0.3, 0.5))
    lengths = Lengths(Workload(name="ragged", input=prompts, output=outputs))
    budget, max_batch = np.repeat([40.0, 88.0, 256.0, 1024.0], 3), np.tile([2.0, 8.0, 30.0], 4)
    mix = mixes_of(lengths)(max_batch, budget, np.ones(12))
    assert (mix.counts * mix.shares).sum(axis=0) == pytest.approx(mix.requests)
    assert (mix.columns[2, 1:-1] * mix.shares).sum(axis=0) == pytest.approx(mix.tokens)


def test_a_policy_can_mix_in_its_own_way_whatever_the_engine_does() -> None:
    class Apart(Chunked):
        steps = type("ApartSteps", (MixedSteps,), {"apart": True})

    engine = EngineSpec(name="toy", framework="toy", version="1")
    columns = {"max_batch": np.asarray([8.0, 64.0]), "token_budget": np.asarray([256.0, 512.0])}

    def ttft(policy: Chunked, *, mixes: bool) -> list[float]:
        model = one_lane("llama-3.1-8b", "h200x1", "orca", engine.but(mixes=mixes))
        return policy.predict(model, columns).ttft.tolist()

    assert ttft(Apart(), mixes=True) == ttft(Chunked(), mixes=False) != ttft(Chunked(), mixes=True)
