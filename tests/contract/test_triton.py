"""The Triton kernels against the reference: on a GPU where there is one, else interpreted (tests/conftest.py)."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.fakes import SPEC
from tests.numerics.steps import random_batch
from xrunner.build import BACKENDS, default_backend
from xrunner.gpu import fused
from xrunner.gpu.attention import MOST_SPLITS, TritonAttention, decode_tile, num_splits, prompt_tile
from xrunner.models.layers import Rotary

pytest.importorskip("triton", reason="triton is not installed: it is for Linux alone")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = [(4, 4, 16), (6, 2, 8), (5, 1, 64), (3, 3, 20)]  # heads, kv heads, head dim
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def on_device(step):
    (q, k, v), cache, batch = step
    for name in batch.__slots__:
        if isinstance(value := getattr(batch, name), torch.Tensor):
            setattr(batch, name, value.to(DEVICE))
    return [x.to(DEVICE) for x in (q, k, v)], cache.to(DEVICE), batch


def compare(step, dtype):
    qkv, cache, batch = on_device(step)
    q, k, v, cache = (x.to(dtype) for x in (*qkv, cache))
    expected_cache = cache.clone()
    expected = BACKENDS["reference"]().forward(q, k, v, expected_cache, batch)
    actual = TritonAttention().forward(q, k, v, cache, batch)
    torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0)


RAGGED = {
    "decode": ([1, 16, 17, 63], []),
    "decode, split": ([1, 100, 150], []),
    "prompts": ([], [(0, 1), (0, 37), (0, 2)]),
    "later pieces": ([], [(5, 7), (16, 16), (40, 33)]),
    "both": ([9, 33], [(0, 12), (20, 5), (0, 1)]),
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shape", RAGGED)
def test_agrees_with_reference(heads, shape):
    compare(random_batch(*RAGGED[shape], heads, 16, np.random.default_rng(len(shape))), torch.float32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shape", RAGGED)
def test_sequences_are_told_apart_on_the_device(heads, shape):
    """As a captured step has them: places are left over, and no launch knows which sequences decode."""
    qkv, cache, batch = random_batch(*RAGGED[shape], heads, 16, np.random.default_rng(len(shape)))
    num_tokens = len(batch.token_ids)
    qkv = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3)) for x in qkv]
    cache = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, 0, 0, 1))
    captured = dataclasses.replace(
        batch,
        cache_slots=torch.cat([batch.cache_slots, torch.full((3,), 16 * cache.shape[1] - 16)]),
        query_start=torch.nn.functional.pad(batch.query_start, (0, 2), value=num_tokens),
        context_len=torch.nn.functional.pad(batch.context_len, (0, 2), value=1),
        block_tables=torch.nn.functional.pad(batch.block_tables, (0, 20, 0, 2)),
        num_decodes=0,
        counts=torch.tensor([batch.num_decodes, len(batch.context_len)], dtype=torch.int32),
    )
    expected_cache = cache.clone().to(DEVICE)
    (q, k, v), cache, captured = on_device((qkv, cache, captured))
    _, _, batch = on_device((qkv, cache, batch))
    parts = [x[:num_tokens] for x in (q, k, v)]
    expected = BACKENDS["reference"]().forward(*parts, expected_cache, batch)
    actual = TritonAttention().forward(q, k, v, cache, captured)
    torch.testing.assert_close(actual[:num_tokens], expected, **TOLERANCES[torch.float32])
    torch.testing.assert_close(cache[:, :-1], expected_cache[:, :-1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 1, 32), (2, 2, 20)], ids=str)
def test_agrees_with_reference_in_half_precision(heads, dtype):
    compare(random_batch([9, 140], [(0, 12), (20, 5)], heads, 16, np.random.default_rng(1)), dtype)


@pytest.mark.parametrize("block_size", [4, 16])
def test_prompts_of_several_tiles(block_size):
    tile = prompt_tile(8, torch.float32, group=3)
    tokens = tile.rows // 3
    chunks = [(0, 3 * tokens + 1), (tile.keys + 3, 2 * tokens), (0, tokens)]
    compare(random_batch([], chunks, (3, 1, 8), block_size, np.random.default_rng(2)), torch.float32)


def test_filling_rows_in_a_wide_table():
    """As a captured step has them: contexts far below what the table has room for, so that splits stay empty."""
    (q, k, v), cache, batch = random_batch([1, 1, 40], [], (2, 1, 8), 4, np.random.default_rng(3))
    batch.block_tables = torch.nn.functional.pad(batch.block_tables, (0, 200))
    assert num_splits(3, batch.block_tables.shape[1] * 4, decode_tile(8, q.dtype, 2).keys, 4) > 1
    compare(((q, k, v), cache, batch), torch.float32)


@pytest.mark.parametrize(
    ("num_tiles", "most_keys", "expected"),
    [(8, 131072, 64), (64, 131072, 8), (512, 131072, 1), (5000, 131072, 1), (8, 100, 1), (8, 700, 4)],
)
def test_splits_fill_the_device_and_no_more(num_tiles, most_keys, expected):
    assert num_splits(num_tiles, most_keys, keys=64, num_processors=132) == expected <= MOST_SPLITS


def test_it_is_what_a_gpu_gets():
    for dtype in TOLERANCES:
        assert default_backend(torch.device("cuda"), dtype) == "triton"


@pytest.mark.long
@pytest.mark.parametrize(("capability", "most_spilled_bytes"), [(80, 128), (90, 0)])
def test_compiles_for_gpus_that_are_not_here(capability, most_spilled_bytes):
    """Down to machine code, in half precision from registers, in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels", "--capability", str(capability), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kernels = json.loads(done.stdout)
    assert len(kernels) > 3
    for kernel in kernels:
        assert kernel["registers"] > 0
        assert kernel["spilled_bytes"] <= most_spilled_bytes or kernel["dtype"] == "float32", kernel


@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (3, 20), (1, 64)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotates_as_the_layer_does(heads, dim, dtype):
    spec = SPEC.model_copy(update={"head_dim": dim})
    layer = Rotary(torch.empty, spec)
    fused_qkv = torch.randn(7, heads + 2, dim).to(dtype)
    positions = torch.tensor([0, 1, 5, 100, 4095, 2, 77])
    (expected,) = layer(positions, fused_qkv[:, :heads])
    actual = fused.rotate(fused_qkv[:, :heads].to(DEVICE), positions.to(DEVICE), layer.frequencies.to(DEVICE))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gates_as_the_layer_does(dtype):
    x = (4 * torch.randn(5, 2 * 1100)).to(dtype)
    gate, up = x.float().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(fused.gate(x.to(DEVICE)).cpu().float(), expected, **TOLERANCES[dtype])
