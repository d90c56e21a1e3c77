"""Captured decode steps, and steps run ahead of the loop, where a "graph" just runs its step again.

tests/numerics/test_joins_and_leaves.py holds their tokens and blocks against those of a solitary run.
"""

import numpy as np
import pytest
import torch

from benchmarks.lib.served_plans import SPEC
from tests.numerics.steps import run_again
from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import SLICE_TOKENS
from xprofiler.bench import Bench
from xrunner.ahead import AheadWorker
from xrunner.attention import Sequences, make_batch
from xrunner.attention.base import pack, unpack
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation, SamplingParams
from xrunner.gpu.graphs import MIXED_SIZES, SIZES, GraphedModel, size_of
from xrunner.kv_cache import KvCache
from xrunner.worker import Worker

GREEDY = SamplingParams()
BLOCK_SIZE = 4
NUM_BLOCKS = 60
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def worker(small_opt):
    return build_worker(
        WorkerSettings(spec=read_spec(small_opt[0]), dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    )


class Replays:
    """Captures, and counts how often which capture is replayed."""

    def __init__(self):
        self.counts = []

    def __call__(self, run):
        replay, number = run_again(run), len(self.counts)
        self.counts.append(0)

        def counted():
            self.counts[number] += 1
            replay()

        return counted


def graphed(worker, sizes, most_tokens=64, mixed_sizes=(8, 24)):
    """The same weights, a random cache, and captures that are counted."""
    cache = KvCache(worker.model.spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    replays = Replays()
    model = GraphedModel(
        worker.model,
        cache,
        worker.backend,
        most_tokens=most_tokens,
        capture=replays,
        sizes=sizes,
        mixed_sizes=mixed_sizes,
    )
    return model, cache, replays


def step_of(contexts, chunks, rng, wants_logits=None):
    """Decodes of these contexts and pieces (start, length) of prompts, over blocks of their own."""
    lengths = np.array([1] * len(contexts) + [length for _, length in chunks], dtype=np.int32)
    ends = np.array([*contexts, *(start + length for start, length in chunks)], dtype=np.int32)
    width = -(-int(ends.max()) // BLOCK_SIZE)
    tables = rng.permutation(NUM_BLOCKS - 1)[: len(ends) * width].astype(np.int32).reshape(len(ends), width)
    return make_batch(
        rng.integers(0, 211, int(lengths.sum())),
        Sequences(lengths, ends, tables),
        block_size=BLOCK_SIZE,
        num_decodes=len(contexts),
        wants_logits=wants_logits,
    )


def check_replay(run, cache, replays, worker, batch):
    """Logits and cache are those of the model, but for the block of no request."""
    with torch.inference_mode():
        before = [layer.clone() for layer in cache.layers]
        logits = run(batch, cache, worker.backend).clone()
        after = [layer.clone() for layer in cache.layers]
        for layer, old in zip(cache.layers, before, strict=True):
            layer.copy_(old)
        expected = worker.model(batch, cache, worker.backend)
    assert sum(replays.counts) == 2
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    filler = NUM_BLOCKS - 1
    for replayed, plain in zip(after, cache.layers, strict=True):
        others = torch.arange(NUM_BLOCKS) != filler
        torch.testing.assert_close(replayed[:, others], plain[:, others], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("contexts", [[5], [1, 9, 16], [3, 30, 2, 8, 11, 6]], ids=len)
def test_a_replay_computes_what_the_model_computes_and_touches_no_other_cache(worker, contexts):
    run, cache, replays = graphed(worker, sizes=(1, 4, 8))
    with torch.inference_mode():
        run(step_of([20] * 8, [], np.random.default_rng(1)), cache, worker.backend)  # leaves all rows filled
    check_replay(run, cache, replays, worker, step_of(contexts, [], np.random.default_rng(2)))


@pytest.mark.parametrize(
    ("contexts", "chunks"),
    [([], [(0, 7)]), ([], [(3, 5), (0, 9)]), ([9, 2], [(0, 1), (5, 3)]), ([3, 30, 2], [(8, 11), (0, 1), (4, 6)])],
    ids=str,
)
def test_so_does_a_replay_of_a_step_with_prompts(worker, contexts, chunks):
    run, cache, replays = graphed(worker, sizes=(1,))
    rng = np.random.default_rng(3)
    with torch.inference_mode():
        run(step_of([4] * 11, [(2, 13)], rng), cache, worker.backend)  # leaves all places filled
    ends = rng.random(len(contexts) + len(chunks)) < 0.7
    check_replay(run, cache, replays, worker, step_of(contexts, chunks, rng, ends))


def test_what_was_not_captured_runs_as_it_is(worker):
    run, cache, replays = graphed(worker, sizes=(1, 2), most_tokens=16)
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        run(step_of([5, 6, 7], [], rng), cache, worker.backend)  # more rows than any capture
        run(step_of([17], [], rng), cache, worker.backend)  # a longer context
        run(step_of([3], [(0, 12), (0, 12)], rng), cache, worker.backend)  # more tokens than any capture
        run(step_of([3], [(0, 17)], rng), cache, worker.backend)  # a longer prompt
    assert sum(replays.counts) == 0


def test_sizes_waste_little():
    for count in range(1, SLICE_TOKENS + 1):
        assert size_of(count, MIXED_SIZES) - count < (16 if count <= 256 else 64)
    assert [size_of(n, SIZES) for n in (1, 3, 5, 9, 64, 65, 512)] == [1, 4, 8, 16, 64, 80, 512]
    for count in range(1, 513):
        size = size_of(count, SIZES)
        assert size >= count and (size - count < 8 or size - count <= count / 4)


def run_all(worker, lane, sampling=GREEDY, outputs=(30, 11, 19)):
    engine = Engine(OneLane(lane, Pool(NUM_BLOCKS, BLOCK_SIZE)), worker)
    tokens = {id_: [] for id_ in range(len(outputs))}
    for id_, count in enumerate(outputs):
        engine.submit(Generation(id_, tuple(range(3 + id_, 12 + id_)), count, sampling=sampling))
    while (settled := engine.step()) is not None:
        for token in settled:
            tokens[token.id].append(token.token)
    return tokens


def ahead(worker):
    run, cache, replays = graphed(worker, sizes=(1, 2, 4))
    return AheadWorker(worker.model, cache, worker.backend, run=run), replays


def test_steps_that_only_decode_run_ahead(worker):
    runner, replays = ahead(worker)
    lane = LaneSettings(mix=True, max_batch=4)
    assert run_all(runner, lane) == run_all(worker, lane)
    # The longest decodes 29 times: the first two are asked for, and the last is launched once too often.
    assert runner.num_hits == 27
    assert sum(replays.counts) == 2 + 28


def test_a_guess_that_was_wrong_costs_a_step_and_no_more(worker):
    runner, replays = ahead(worker)
    run, cache, asked_for = graphed(worker, sizes=(1, 2, 4))
    lane = LaneSettings(mix=False, encode_every=6, encode_tokens=9.0, carried_batch=1.0, decode_batch=2.0)
    assert run_all(runner, lane) == run_all(Worker(worker.model, cache, worker.backend, run=run), lane)
    assert runner.num_hits > 0 and sum(replays.counts) > sum(asked_for.counts)


def test_drawn_tokens_wait_to_be_asked_for(worker):
    runner, replays = ahead(worker)
    lane, sampling = LaneSettings(mix=True, max_batch=4), SamplingParams(temperature=1.0, seed=5)
    assert run_all(runner, lane, sampling) == run_all(worker, lane, sampling)
    assert runner.num_hits == 0 and sum(replays.counts) == 29


def test_a_batch_in_one_piece_of_memory():
    arrays = {
        "tokens": np.arange(5),
        "starts": np.arange(3, dtype=np.int32),
        "none": np.zeros(0, dtype=np.int64),
        "tables": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    packed = pack(arrays)
    unpacked = unpack(packed, arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(unpacked[name].numpy(), array)
        assert unpacked[name].numpy().dtype == array.dtype
        assert (unpacked[name].data_ptr() - packed.data_ptr()) % 16 == 0


def test_the_loop_of_a_gpu_is_measured_with_the_worker_that_runs_ahead():
    plain = build_worker(WorkerSettings(spec=SPEC, dtype="float32", num_blocks=400, block_size=16))
    ahead = AheadWorker(plain.model, plain.cache, plain.backend)
    bench = Bench(ahead, lambda done, total, what: None)
    jobs = bench.jobs()
    assert jobs["overhead", 2]() >= 0.0
    assert ahead.num_hits > 0
    assert jobs["mixed step", 0]() > 0.0
    assert not list(ahead._rows), "requests are left in the worker"


def test_steps_with_more_prompts_than_their_kernels_are_launched_for_are_not_captured(worker, monkeypatch):
    monkeypatch.setattr("xrunner.gpu.graphs.MOST_PROMPTS", 4)
    run, cache, replays = graphed(worker, (1, 4), mixed_sizes=(16,))
    with torch.inference_mode():
        for count in (4, 5):
            run(step_of([7], [(0, 2)] * count, np.random.default_rng(0)), cache, worker.backend)
            assert sum(replays.counts) == 1
