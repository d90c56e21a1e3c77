"""Tokens follow the distribution that was asked for, and depend on nothing but their own request."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rings import examples, few
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import ModelSpec
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation, SamplingParams
from xrunner.sampling import Sampler, _draw, highest, token_noise

VOCAB = 40
NUM_DRAWS = 20_000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
CPU = torch.device("cpu")


def draws(params: SamplingParams, logits: torch.Tensor, count: int) -> np.ndarray:
    """Tokens at positions 0, 1, ... of a request that would see the same logits all along."""
    sampler = Sampler(len(logits), CPU)
    sampler.start(0, params)
    tokens, _ = sampler(logits.expand(count, -1), np.zeros(count, dtype=np.int64), np.arange(count, dtype=np.int32))
    return tokens


def exact(params: SamplingParams, logits: torch.Tensor) -> np.ndarray:
    """The distribution as transformers' own warpers make it, in double precision."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(params.temperature)(None, logits.double()[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)[0].numpy()


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Nothing that has no probability; chi-square over the rest, rare tokens taken together."""
    from scipy import stats

    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    rare = (expected < 10) & (probabilities > 0)
    observed, wanted = counts[expected >= 10], expected[expected >= 10]
    if rare.any():
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    assert stats.chisquare(observed, wanted).pvalue > 0.001


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=1.7, seed=3),
        SamplingParams(temperature=1.0, top_k=5, seed=4),
        SamplingParams(temperature=1.0, top_p=0.8, seed=5),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.7, seed=6),
        SamplingParams(temperature=1.3, min_p=0.1, seed=7),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.95, min_p=0.05, seed=8),
        SamplingParams(temperature=1.0, top_k=VOCAB + 7, seed=9),
    ],
)
def test_tokens_follow_the_exact_distribution(params: SamplingParams) -> None:
    assert_follows(draws(params, LOGITS, NUM_DRAWS), exact(params, LOGITS))


def test_top_p_beyond_the_tokens_that_are_sorted_first() -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(4)) * 0.3
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    tokens = draws(params, logits, 2000)
    assert (exact(params, logits)[tokens] > 0).all()
    assert len(set(tokens.tolist())) > 500


def test_the_extremes() -> None:
    best = int(LOGITS.argmax())
    for params in (
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=1e-300),
    ):
        assert set(draws(params, LOGITS, 50).tolist()) == {best}


def test_draws_are_even_and_independent_of_neighbours() -> None:
    from scipy import stats

    seeds, positions = (a.ravel() for a in np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300)))
    settings = np.full(len(seeds), Sampler(VOCAB, CPU)._settings_of(np.zeros(1, int))[0])
    settings["seed"], settings["temperature"], settings["top_k"] = seeds, 1, VOCAB
    tokens = _draw(torch.zeros(len(seeds), VOCAB), settings, positions, token_noise(VOCAB)).numpy()
    assert stats.chisquare(np.bincount(tokens, minlength=VOCAB)).pvalue > 0.001
    grid = tokens.reshape(300, 300)
    for first, second in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        pairs = np.bincount((first * VOCAB + second).ravel(), minlength=VOCAB * VOCAB)
        assert stats.chisquare(pairs).pvalue > 0.001


@pytest.mark.parametrize("params", few([SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(temperature=1.0)]))
def test_rounding_of_logits_hardly_ever_changes_a_draw(params: SamplingParams) -> None:
    vocab, count = 8000, examples(1000, 100)
    generator = torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(count, vocab, generator=generator)
    rounded = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    sampler, rows = Sampler(vocab, CPU), np.arange(count)
    for row in range(count):
        sampler.start(row, replace(params, seed=row))
    drawn, again = (sampler(values, rows, rows)[0] for values in (logits, rounded))
    assert (drawn != again).sum() <= 1


def test_each_row_as_if_alone() -> None:
    """Greedy, drawn, penalised and reporting rows in one batch."""
    params = {
        3: SamplingParams(temperature=1.0, seed=5),
        100: SamplingParams(),
        7: SamplingParams(temperature=0.7, top_p=0.9, seed=-(2**63), frequency_penalty=1.0),
        0: SamplingParams(logprobs=2),
        8: SamplingParams(temperature=0.7, top_k=3, seed=2**63 - 1),
    }
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(5))
    positions = np.arange(5, dtype=np.int32) * 9
    together = Sampler(VOCAB, CPU)
    alone = []
    for index, (row, wanted) in enumerate(params.items()):
        together.start(row, wanted)
        sampler = Sampler(VOCAB, CPU)
        sampler.start(row, wanted)
        alone.append(sampler(logits[index : index + 1], np.array([row]), positions[index : index + 1])[0][0])
    tokens, logprobs = together(logits, np.array(list(params)), positions)
    assert tokens.tolist() == alone
    assert tokens[1] == logits[1].argmax()
    assert list(logprobs) == [3]
    for row in params:
        together.release(row)
    assert together.is_idle


def test_penalties_by_hand() -> None:
    """Each time a token is said, its price rises; what was said before a preemption counts."""
    logits = torch.tensor([[3.0, 2.4, 2.0, -9.0]])
    sampler = Sampler(4, CPU)
    sampler.start(0, SamplingParams(presence_penalty=0.25, frequency_penalty=0.5), output=[1])
    row = np.array([0])
    # Scores before each choice: 3, 1.65, 2 | 2.25, 1.65, 2 | 1.75, 1.65, 2 | 1.75, 1.65, 1.25
    said = [int(sampler(logits, row, row)[0][0]) for _ in range(4)]
    assert said == [0, 0, 2, 0]
    sampler.release(0)
    sampler.start(0, SamplingParams(presence_penalty=0.25))  # the counts that were released are clean again
    assert [int(sampler(logits, row, row)[0][0]) for _ in range(2)] == [0, 0]


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(9))
    sampler = Sampler(VOCAB, CPU)
    prompt, output = [3, 3, 11], [7]
    sampler.start(0, SamplingParams(repetition_penalty=1.7), output, prompt)
    from transformers import RepetitionPenaltyLogitsProcessor

    warp, row = RepetitionPenaltyLogitsProcessor(1.7), np.zeros(1, dtype=np.int64)
    for line in logits:
        expected = int(warp(torch.tensor([[*prompt, *output]]), line[None].clone()).argmax())
        assert int(sampler(line[None], row, row)[0][0]) == expected
        output.append(expected)
    assert len(set(output)) > 10
    sampler.release(0)
    sampler.start(0, SamplingParams(repetition_penalty=100.0))
    assert int(sampler(logits[:1], row, row)[0][0]) == int(logits[0].argmax())


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    sampler = Sampler(VOCAB, CPU)
    sampler.start(0, SamplingParams(temperature=0.3, top_k=2, seed=1, logprobs=5, presence_penalty=2.0))
    sampler.start(1, SamplingParams(logprobs=0))
    tokens, logprobs = sampler(logits, np.array([0, 1]), np.array([4, 4]))
    expected = torch.log_softmax(logits.double(), dim=-1)
    for index in (0, 1):
        assert math.isclose(logprobs[index].chosen, float(expected[index, tokens[index]]), abs_tol=1e-5)
    values, ids = expected[0].topk(5)
    assert [token for token, _ in logprobs[0].top] == ids.tolist()
    assert [value for _, value in logprobs[0].top] == pytest.approx(values.tolist(), abs=1e-5)
    assert logprobs[1].top == ()


def test_a_temperature_alone_takes_the_highest_of_logits_and_clocks() -> None:
    sampler, rows, positions = Sampler(VOCAB, CPU), np.arange(400), np.arange(400, dtype=np.int32)
    assert sampler.takes_highest(rows) and sampler.clocks(rows, positions) is None
    for row in rows[::2]:
        sampler.start(int(row), SamplingParams(temperature=0.01 + row / 300, seed=int(row)))
    logits = LOGITS.expand(400, -1)
    clocks = sampler.clocks(rows, positions)
    assert clocks is not None and sampler.takes_highest(rows)
    assert highest(logits + clocks).numpy().tolist() == sampler(logits, rows, positions)[0].tolist()
    assert sampler.clocks(rows[1::2], positions[1::2]) is None


@pytest.mark.parametrize(
    "rule",
    [
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((3, 1.0),)},
    ],
)
def test_what_a_temperature_alone_does_not_decide(rule: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB, CPU)
    sampler.start(1, SamplingParams(temperature=1.0, **rule))
    assert not sampler.takes_highest(np.array([0, 1]))
    assert sampler.takes_highest(np.array([0, 2])), "requests of other steps do not matter"


SPEC = ModelSpec(
    name="tiny",
    family="opt",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=64,
    vocab_size=97,
    max_context=128,
)
PROMPTS = [tuple((i * 31 + j) % 97 for j in range(3 + i)) for i in range(12)]


def outputs(ids: list[int], max_batch: int, kv_blocks: int = 200, kv: str = "reserve") -> dict[int, list[int]]:
    """The worker's tokens for these requests; every third is greedy, the others draw, some with penalties."""
    worker = build_worker(WorkerSettings(spec=SPEC, dtype="float32", num_blocks=kv_blocks, block_size=4))
    pool = Pool(kv_blocks, 4, kv=kv)
    engine = Engine(OneLane(LaneSettings(mix=True, max_batch=max_batch, token_budget=9), pool), worker)
    for id_ in ids:
        params = SamplingParams(temperature=1.5 * (id_ % 3), top_p=0.9, seed=id_, presence_penalty=id_ % 2)
        engine.submit(Generation(id_, PROMPTS[id_], max_output=20, sampling=params))
    said: dict[int, list[int]] = {id_: [] for id_ in ids}
    while (tokens := engine.step()) is not None:
        for token in tokens:
            said[token.id].append(token.token)
    assert pool.memory.decodes.num_used == 0
    assert kv == "reserve" or pool.num_preemptions > 0
    return said


def test_same_tokens_whatever_else_is_in_the_batch() -> None:
    everyone = outputs(list(range(12)), max_batch=12)
    assert everyone == {id_: outputs([id_], max_batch=1)[id_] for id_ in range(12)}
    assert everyone == outputs(list(range(12))[::-1], max_batch=5)
    assert len({tuple(said) for said in everyone.values()}) == 12


def test_same_tokens_after_a_preemption() -> None:
    assert outputs(list(range(12)), max_batch=12) == outputs(list(range(12)), max_batch=12, kv_blocks=30, kv="quantile")
