"""Every attention backend agrees with the reference on ragged batches, and writes the same cache."""

import numpy as np
import pytest
import torch

from tests.numerics.steps import kept_in, random_batch, random_bias
from tests.rings import few
from xrunner.attention import PositionBias, Scoring
from xrunner.build import BACKENDS, default_backend, usable_backends
from xrunner.cpu import amx
from xrunner.cpu.attention import suits_matrices

HEADS = [(4, 4, 16), (6, 2, 8), (5, 1, 64), (3, 3, 20)]  # heads, kv heads, head dim
HERE = sorted(usable_backends(torch.device("cpu"), torch.float32))
"""Those that run on a CPU; test_triton.py has Triton's."""
RAGGED = {
    "decode": ([1, 2, 16, 17, 63, 200], []),
    "prompts": ([], [(0, 1), (0, 16), (0, 37), (0, 2)]),
    "later chunks": ([], [(5, 7), (16, 16), (31, 1), (40, 33)]),
    "mixed": ([9, 33], [(0, 12), (20, 5), (0, 1)]),
    "single": ([1], []),
}


@pytest.mark.parametrize("backend", sorted(set(HERE) - {"reference"}))
@pytest.mark.parametrize("heads", few(HEADS, 2, whole=True), ids=str)
@pytest.mark.parametrize("shape", RAGGED)
@pytest.mark.parametrize("block_size", few([16, 4, 32]))
@pytest.mark.parametrize("kept_as", few([torch.float32, torch.bfloat16, torch.int8]), ids=str)
def test_agrees_with_reference(backend, heads, shape, block_size, kept_as):
    contexts, chunks = RAGGED[shape]
    rng = np.random.default_rng(len(shape))
    (q, k, v), cache, batch = random_batch(contexts, chunks, heads, block_size, rng)
    cache = kept_in(cache, kept_as)
    expected_cache = cache.clone()
    expected = BACKENDS["reference"]().forward(q, k, v, expected_cache, batch)
    actual = BACKENDS[backend]().forward(q, k, v, cache, batch)
    assert_near(actual, expected, cache)
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0)


def assert_near(actual, expected, cache, rtol=1e-5, atol=2e-6):
    """To float32's precision; to bfloat16's where products are of bfloat16."""
    if suits_matrices(cache):
        assert (actual - expected).norm() < 3e-3 * expected.norm()
        rtol = atol = 2e-2
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


BLOCKS = [(16, torch.float32), (8, torch.float32), (48, torch.float32)]
BLOCKS += [(8, torch.bfloat16), (48, torch.int8), (16, torch.bfloat16), (16, torch.int8)]
LONG_HEADS = [(14, 2, 64), (2, 2, 80), (2, 2, 64), (4, 1, 96), (2, 1, 128), (2, 1, 256)]
# Pieces of several hundred keys, and more rows than a tile and than a span has; the last tile narrow.
LONG = {
    "prompt": ([], [(0, 300)]),
    "chunks": ([], [(450, 37), (13, 140), (129, 1)]),
    "behind decodes": ([700, 5], [(64, 64), (127, 2)]),
}


@pytest.mark.parametrize("backend", sorted(set(HERE) - {"reference"}))
@pytest.mark.parametrize("heads", few(LONG_HEADS, 2, whole=True), ids=str)
@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize(("block_size", "kept_as"), few(BLOCKS), ids=str)
@pytest.mark.parametrize("window", few([150, None, 3]))
def test_long_ones_agree_with_reference(backend, heads, shape, block_size, kept_as, window):
    contexts, chunks = LONG[shape]
    (q, k, v), cache, batch = random_batch(contexts, chunks, heads, block_size, np.random.default_rng(len(shape)))
    cache = kept_in(cache, kept_as)
    scoring = Scoring(window=window, softcap=5.0 if window == 3 else None, sinks=torch.randn(heads[0]))
    expected = BACKENDS["reference"]().forward(q, k, v, cache.clone(), batch, scoring)
    actual = BACKENDS[backend]().forward(q, k, v, cache, batch, scoring)
    assert_near(actual, expected, cache, rtol=1e-4, atol=5e-6)


@pytest.mark.long
def test_without_matrix_registers_bfloat16_is_multiplied_in_float32(monkeypatch):
    monkeypatch.setattr(amx, "is_available", lambda: False)
    (q, k, v), cache, batch = random_batch([9, 33], [(0, 70), (20, 5)], (4, 2, 64), 16, np.random.default_rng(1))
    cache = cache.to(torch.bfloat16)
    expected = BACKENDS["reference"]().forward(q, k, v, cache.clone(), batch)
    actual = BACKENDS["numba"]().forward(q, k, v, cache, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


def test_reads_queries_keys_and_values_out_of_one_product():
    """Queries, keys and values that lie side by side are not copied, and give what copies of them do."""
    rng = np.random.default_rng(2)
    (q, k, v), cache, batch = random_batch([40, 3], [(0, 33)], (4, 4, 16), 16, rng)
    again = cache.clone()
    expected = BACKENDS["numba"]().forward(q, k, v, cache, batch)
    split = torch.cat([q, k, v], dim=1).split(4, dim=1)
    torch.testing.assert_close(BACKENDS["numba"]().forward(*split, again, batch), expected, rtol=0, atol=0)
    torch.testing.assert_close(again, cache, rtol=0, atol=0)


# What an encoder-decoder asks for: heads have keys of their own; decodes look at what follows their prompts.
OWN_KEYS = [(4, 4, 16), (3, 3, 20), (2, 2, 64)]


@pytest.mark.parametrize("backend", sorted(set(HERE) - {"reference"}))
@pytest.mark.parametrize("heads", OWN_KEYS, ids=str)
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_biased_decodes_behind_prompts_agree_with_reference(backend, heads, block_size):
    rng = np.random.default_rng(4)
    contexts = [1, 2, 16, 17, 33, 63, 200]
    (q, k, v), cache, batch = random_batch(contexts, [], heads, block_size, rng)
    batch.first_key = torch.tensor([0, 1, 15, 16, 5, 31, 90], dtype=torch.int32)
    cache[:, :, :, :] = torch.where(cache > 2.5, float("nan"), cache)  # what is not seen may be anything
    for i, context in enumerate(contexts):
        for place in range(int(batch.first_key[i]), context):
            cache[:, batch.block_tables[i, place // block_size], :, place % block_size] = 0.1 * place
    bias = random_bias(batch, heads[0], rng)
    expected = BACKENDS["reference"]().forward(q, k, v, cache.clone(), batch, Scoring(scale=1.0, bias=bias))
    assert expected.isfinite().all()
    actual = BACKENDS[backend]().forward(q, k, v, cache, batch, Scoring(scale=1.0, bias=bias))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("backend", sorted(set(HERE) - {"reference"}))
@pytest.mark.parametrize("heads", OWN_KEYS, ids=str)
@pytest.mark.parametrize("both_ways", [True, False])
def test_biased_prompts_agree_with_reference(backend, heads, both_ways):
    rng = np.random.default_rng(5)
    (q, k, v), cache, batch = random_batch([], [(0, n) for n in (1, 2, 15, 16, 17, 33, 64, 100)], heads, 16, rng)
    batch.both_ways = both_ways
    bias = random_bias(batch, heads[0], rng)
    expected = BACKENDS["reference"]().forward(q, k, v, cache.clone(), batch, Scoring(scale=0.5, bias=bias))
    actual = BACKENDS[backend]().forward(q, k, v, cache, batch, Scoring(scale=0.5, bias=bias))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-6)


def test_the_reference_looks_both_ways_and_adds_biases():
    """By hand: two tokens whose scores are their biases alone."""
    (q, k, v), cache, batch = random_batch([], [(0, 2)], (1, 1, 4), 4, np.random.default_rng(6))
    batch.both_ways = True
    bias = PositionBias(torch.tensor([[1.0, 2.0, 4.0]]), 1)  # of the key one ahead, of the token's own, of one back
    out = BACKENDS["reference"]().forward(q * 0, k, v, cache, batch, Scoring(bias=bias))
    first, second = torch.tensor([2.0, 1.0]).softmax(0), torch.tensor([4.0, 2.0]).softmax(0)
    expected = torch.stack([first @ v[:, 0], second @ v[:, 0]])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", HERE)
def test_large_scores_do_not_overflow(backend):
    (q, k, v), cache, batch = random_batch([70], [(0, 30)], (2, 2, 16), 16, np.random.default_rng(0))
    out = BACKENDS[backend]().forward(q * 100, k * 100, v, cache * 100, batch)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("backend", HERE)
def test_runs_on_as_many_threads_as_torch(backend):
    before = torch.get_num_threads()
    (q, k, v), cache, batch = random_batch([50] * 5, [(0, 8)], (4, 2, 16), 16, np.random.default_rng(0))
    try:
        outputs = []
        for threads in (1, before):
            torch.set_num_threads(threads)
            outputs.append(BACKENDS[backend]().forward(q, k, v, cache, batch))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("backend", few(HERE[::-1]))  # a type of K/V takes numba long to compile
def test_what_is_not_finite_stays_so_in_fewer_bits(backend):
    """A key that is not finite leaves no finite output behind, in a cache of bfloat16 either."""
    (q, k, v), cache, batch = random_batch([], [(0, 5)], (2, 2, 20), 4, np.random.default_rng(0))
    for tensor, bad in ((k, float("inf")), (v, float("-inf")), (v, float("nan")), (v, 3.4e38)):
        spoilt = tensor.clone()
        tensor[2, 0, 3] = bad
        out = BACKENDS[backend]().forward(q, k, v, cache.to(torch.bfloat16), batch).view(5, 2, 20)
        assert not out[2:, 0].isfinite().all() and out[:, 1].isfinite().all()
        tensor.copy_(spoilt)


def test_half_precision_on_a_cpu_falls_back_to_the_reference():
    cpu = torch.device("cpu")
    assert default_backend(cpu, torch.float32) == "numba"
    assert default_backend(cpu, torch.bfloat16) == "reference"


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("half", ["keys", "values"])
def test_what_is_not_finite_stays_so_and_with_those_that_see_it(backend, heads, value, half):
    contexts, chunks = [9, 33, 40], [(0, 12), (20, 5), (0, 33)]
    poisoned = {1: 17, 4: 3, 5: 20}
    (q, k, v), cache, batch = random_batch(contexts, chunks, heads, 16, np.random.default_rng(1))
    expected = BACKENDS[backend]().forward(q, k, v, cache.clone(), batch).view(len(q), *q.shape[1:])
    of_half = cache[int(half == "values")]
    free = sorted(set(range(cache.shape[1])) - set(batch.block_tables.flatten().tolist()))
    of_half[free] = value
    for i, context in enumerate(batch.context_len.tolist()):  # what an earlier request has left in the last block
        last, used = batch.block_tables[i, (context - 1) // 16], context % 16
        if used:
            cache[:, last, :, used:] = value
    for i, place in poisoned.items():
        begin, end, context = int(batch.query_start[i]), int(batch.query_start[i + 1]), int(batch.context_len[i])
        if place < context - (end - begin):
            cache[:, batch.block_tables[i, place // 16], :, place % 16] = value
        else:
            (k, v)[half == "values"][begin + place - (context - (end - begin))] = value
    out = BACKENDS[backend]().forward(q, k, v, cache, batch).view(len(q), *q.shape[1:])
    for i, context in enumerate(batch.context_len.tolist()):
        begin, end = int(batch.query_start[i]), int(batch.query_start[i + 1])
        for row in range(begin, end):
            if i in poisoned and poisoned[i] <= context - (end - row):
                assert not out[row].isfinite().all(dim=-1).any(), (i, row)
            elif i not in poisoned:
                torch.testing.assert_close(out[row], expected[row], rtol=0, atol=0)


@pytest.mark.parametrize("backend", sorted(set(HERE) - {"reference"}))
@pytest.mark.parametrize("heads", few(HEADS, 2, whole=True), ids=str)
@pytest.mark.parametrize("shape", ["decode", "later chunks", "mixed"])
@pytest.mark.parametrize("window", few([5, None, 1, 40], 2))
@pytest.mark.parametrize("loud", few([60.0, None, -3.0], 2))
def test_windows_and_sinks_agree_with_reference(backend, heads, shape, window, loud):
    """Sinks from negligible to louder than any score."""
    contexts, chunks = RAGGED[shape]
    rng = np.random.default_rng(len(shape))
    (q, k, v), cache, batch = random_batch(contexts, chunks, heads, 16, rng)
    sinks = None if loud is None else torch.from_numpy(rng.normal(loud, 1.0, heads[0])).float()
    scoring = Scoring(window=window, sinks=sinks)
    expected = BACKENDS["reference"]().forward(q, k, v, cache.clone(), batch, scoring)
    actual = BACKENDS[backend]().forward(q, k, v, cache, batch, scoring)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", sorted(set(HERE) - {"reference"}))
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shape", ["decode", "mixed"])
@pytest.mark.parametrize("cap", [0.3, 50.0])
def test_soft_caps_agree_with_reference(backend, heads, shape, cap):
    """From one that all scores reach to one that none comes near."""
    (q, k, v), cache, batch = random_batch(*RAGGED[shape], heads, 16, np.random.default_rng(len(shape)))
    scoring = Scoring(scale=0.4, softcap=cap, window=20)
    expected = BACKENDS["reference"]().forward(q, k, v, cache.clone(), batch, scoring)
    actual = BACKENDS[backend]().forward(q, k, v, cache, batch, scoring)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=5e-6)


def test_a_window_of_one_gives_each_token_its_own_value():
    (q, k, v), cache, batch = random_batch([7, 33], [(4, 9)], (4, 2, 16), 16, np.random.default_rng(1))
    for name in HERE:
        found = BACKENDS[name]().forward(q, k, v, cache.clone(), batch, Scoring(window=1))
        torch.testing.assert_close(found.unflatten(-1, (4, 16)), v.repeat_interleave(2, dim=1))
