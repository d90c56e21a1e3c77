"""Blocks hold what was written."""

import torch

from xgpt.core.schema import ModelSpec
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


def test_what_is_written_is_gathered():
    cache = make_cache()
    table = torch.tensor([4, 0, 9], dtype=torch.int32)
    positions = torch.arange(11)
    slots = table[positions // 4].long() * 4 + positions % 4
    keys, values = torch.randn(2, 11, 3, 4)
    write_kv(keys, values, cache.layers[1], slots)
    torch.testing.assert_close(gather_kv(cache.layers[1], table, 11), torch.stack([keys, values]))
    assert not cache.layers[0].any()
