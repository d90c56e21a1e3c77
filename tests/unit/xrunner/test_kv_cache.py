"""Blocks are handed out once, come back, and hold what was written."""

import numpy as np
import pytest
import torch

from xgpt.schema import ModelSpec
from xrunner.attention.reference import gather_kv
from xrunner.kv_cache import KvCache, write_kv

SPEC = ModelSpec(
    name="tiny",
    family="opt",
    num_layers=2,
    hidden_size=12,
    num_heads=3,
    num_kv_heads=3,
    head_dim=4,
    ffn_size=8,
    vocab_size=10,
    max_context=64,
)


def make_cache(num_blocks=10, block_size=4):
    return KvCache(SPEC, num_blocks, block_size, torch.float32, torch.device("cpu"))


def test_allocates_whole_blocks_once():
    cache = make_cache()
    first, second = cache.allocate(1, 5), cache.allocate(2, 8)
    assert len(first) == len(second) == 2
    assert first.dtype == np.int32
    assert not set(first) & set(second)
    assert cache.num_free == 6


def test_freed_blocks_serve_again():
    cache = make_cache()
    rng = np.random.default_rng(0)
    owned = {}
    for id_ in range(200):
        while cache.num_free < 5:
            gone = int(rng.choice(list(owned)))
            cache.free([gone])
            del owned[gone]
        owned[id_] = set(cache.allocate(id_, int(rng.integers(1, 20))).tolist())
        assert sum(map(len, owned.values())) == len(set().union(*owned.values())) == 10 - cache.num_free
    cache.free(owned)
    assert cache.num_free == 10


def test_misuse_is_an_assertion():
    cache = make_cache()
    cache.allocate(1, 12)
    with pytest.raises(AssertionError, match="owns blocks already"):
        cache.allocate(1, 1)
    with pytest.raises(AssertionError, match="7 are free"):
        cache.allocate(2, 29)
    with pytest.raises(AssertionError, match="owns no blocks"):
        cache.free([2])


def test_what_is_written_is_gathered():
    cache = make_cache()
    table = torch.from_numpy(cache.allocate(1, 11))
    positions = torch.arange(11)
    slots = table[positions // 4].long() * 4 + positions % 4
    keys, values = torch.randn(2, 11, 3, 4)
    write_kv(keys, values, cache.layers[1], slots)
    torch.testing.assert_close(gather_kv(cache.layers[1], table, 11), torch.stack([keys, values]))
    assert not cache.layers[0].any()
