"""OPT computes what `transformers` computes: logits, and greedy tokens under every policy."""

import numpy as np
import pytest
import torch

import xrunner.attention.reference as reference
from xgpt.checkpoint import read_spec
from xgpt.policies import Chunk, LaneSettings, OneLaneRule, Pool, Step
from xrunner.attention import BACKENDS
from xrunner.engine import Engine, Generation
from xrunner.kv_cache import KvCache
from xrunner.weights import load_checkpoint
from xrunner.worker import Worker, build_worker

TOLERANCE = 1e-4


def make_worker(directory, backend, num_blocks=64, block_size=8):
    return build_worker(
        read_spec(directory),
        "float32",
        checkpoint=directory,
        num_blocks=num_blocks,
        block_size=block_size,
        backend=backend,
    )


def step_logits(worker, step, records):
    """Execute a step, keeping the logits of the tokens that it samples."""
    sample = worker.sample

    def keep(logits):
        records.append(logits.clone())
        return sample(logits)

    worker.sample = keep
    try:
        return worker.execute(step)
    finally:
        worker.sample = sample


def compare(worker, model):
    """Logits of a batch that mixes whole prompts, pieces of prompts and decodes, against transformers'."""
    rng = np.random.default_rng(3)
    prompts = {id_: tuple(rng.integers(0, 211, n).tolist()) for id_, n in enumerate((19, 1, 33, 8))}
    for id_, prompt in prompts.items():
        worker.start(Generation(id_, prompt, max_output=4))
    steps = [
        Step((Chunk(0, 0, 19), Chunk(2, 0, 10)), ()),
        Step((Chunk(2, 10, 16), Chunk(1, 0, 1)), (0,)),
        Step((Chunk(2, 26, 7), Chunk(3, 0, 8)), (1, 0)),
        Step((), (3, 2, 1)),
    ]
    texts = {id_: list(prompt) for id_, prompt in prompts.items()}
    for step in steps:
        records = []
        sampled = step_logits(worker, step, records)
        for id_, logits in zip(sampled, records[0], strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([texts[id_]])).logits[0, -1]
            torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
            assert expected.std() >= 1, "logits too small for the tolerance to mean anything"
            texts[id_].append(sampled[id_])
    worker.release(prompts)
    assert worker.cache.num_free == worker.cache.num_blocks


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_logits_equal_transformers(opt_checkpoint, backend):
    directory, model = opt_checkpoint
    compare(make_worker(directory, backend), model)


def test_logits_equal_without_prepacked_weights(opt_checkpoint):
    directory, model = opt_checkpoint
    loaded = load_checkpoint(directory)
    cache = KvCache(loaded.spec, 64, 8, torch.float32, torch.device("cpu"))
    compare(Worker(loaded, cache, BACKENDS["reference"]()), model)


def test_the_comparison_notices_a_dropped_causal_mask(small_opt, monkeypatch):
    directory, model = small_opt
    monkeypatch.setattr(reference, "causal_mask", lambda n, context, device: torch.zeros(n, context, dtype=torch.bool))
    with pytest.raises(AssertionError, match="not close"):
        compare(make_worker(directory, "reference"), model)


def test_the_comparison_notices_dropped_positions(small_opt):
    directory, model = small_opt
    worker = make_worker(directory, "reference")
    worker.model.position_embedding.weight.zero_()
    with pytest.raises(AssertionError, match="not close"):
        compare(worker, model)


def test_the_comparison_notices_a_dropped_head(small_opt, monkeypatch):
    directory, model = small_opt
    attend = reference.attend

    def without_last_head(q, keys, values):
        out = attend(q, keys, values)
        out[:, -1] = 0
        return out

    monkeypatch.setattr(reference, "attend", without_last_head)
    with pytest.raises(AssertionError, match="not close"):
        compare(make_worker(directory, "reference"), model)


POLICIES = {
    "rra": LaneSettings(mix=False, encode_every=3, encode_tokens=40.0, decode_batch=6.0),
    "orca": LaneSettings(mix=True, max_batch=7),
    "chunked": LaneSettings(mix=True, token_budget=16, max_batch=9),
    "static": LaneSettings(mix=False, max_batch=6, refill_when_empty=True),
}


@pytest.fixture(scope="module")
def expected_tokens(small_opt):
    """40 requests with the tokens that transformers generates for each, alone."""
    _, model = small_opt
    rng = np.random.default_rng(11)
    requests = []
    for id_ in range(40):
        prompt = tuple(rng.integers(3, 211, rng.integers(1, 45)).tolist())
        max_output = int(rng.integers(1, 20))
        with torch.inference_mode():
            text = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_output,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=1,
            )
        requests.append((Generation(id_, prompt, max_output), text[0, len(prompt) :].tolist()))
    return requests


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_equal_transformers_whoever_shares_the_batch(small_opt, expected_tokens, policy, backend):
    directory, _ = small_opt
    num_blocks, block_size = 60, 8
    worker = make_worker(directory, backend, num_blocks, block_size)
    pool = Pool(num_blocks, block_size, hold_finished=policy == "static")
    engine = Engine(OneLaneRule(POLICIES[policy]), pool, worker)
    rng = np.random.default_rng(5)
    waiting = [generation for generation, _ in expected_tokens]
    outputs = {generation.id: [] for generation in waiting}
    while waiting or not pool.is_idle:
        for _ in range(min(len(waiting), rng.integers(0, 4))):
            engine.submit(waiting.pop(0))
        for token in engine.step() or ():
            outputs[token.id].append(token.token)
    assert outputs == {generation.id: tokens for generation, tokens in expected_tokens}
    assert worker.cache.num_free == num_blocks
    assert len(set().union(*outputs.values())) > 20, "tokens too alike for the comparison to mean anything"
