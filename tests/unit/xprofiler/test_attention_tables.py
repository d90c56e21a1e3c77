"""Latent, sparse and linear attention, and INT4 experts, of profiles from others' tables."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.xprofiler.test_expert_tables import EXPERTS, MOE, expert_ms, expert_rows, linked, made, rest, tables
from tests.unit.xprofiler.test_imported import SPEC, gemm_rows, write
from xgpt.core.schema import Attention, Block, Indexer, LatentAttention, ModelSpec, Quantization, Recurrent, Surface
from xprofiler.tables import mean_surface

__all__ = ["tables"]

LATENT = LatentAttention(kv_rank=512, q_rank=2048, rope_head_dim=64, value_head_dim=256)
SPARSE = Attention(
    num_heads=64, num_kv_heads=64, head_dim=256, latent=LATENT, indexer=Indexer(num_heads=32, head_dim=128, top_k=2048)
)
DELTA = Recurrent(num_heads=16, weights=1024 * 4096, state_elements=16 * 128 * 128, state_bytes=16 * 128 * 128 * 4)
FULL = Attention(num_heads=16, num_kv_heads=4, head_dim=64)


def sparse_rows(phase: str) -> list[dict[str, Any]]:
    rows = []
    models, sizes = ("Glm", "DeepseekV32"), ((1, 64), (1, 512), (0, 64))
    for heads, model, shared, batch, length, step in product((64, 32), models, (False, True), *sizes):
        decodes = phase == "generation"
        if decodes and step:
            continue
        latency = batch * length * (1 if model == "Glm" else 5) * (0.5 if shared else 1.0) + 100 * step
        rows.append(
            {
                "op_name": f"dsa_{phase}_module" + ("_skip_indexer" if shared else ""),
                "architecture": "GlmMoeDsaForCausalLM" if model == "Glm" else "DeepseekV32ForCausalLM",
                "num_heads": heads,
                "kv_cache_dtype": "bfloat16",
                "gemm_type": "bfloat16",
                "batch_size": batch,
                "isl": 1 if decodes else length,
                "step": length - 1 if decodes else step,
                "latency": latency,
            }
        )
    return rows


def delta_rows() -> list[dict[str, Any]]:
    return [
        {
            "phase": phase,
            "batch_size": batch,
            "seq_len": length,
            "d_model": 1024,
            "num_v_heads": heads,
            "head_k_dim": 128,
            "head_v_dim": 128,
            "model_name": name,
            "kernel_source": kernel,
            "latency": ms * batch * length * heads * (1 if name == "small" else 50),
        }
        for name, most in (("small", 16), ("large", 32))
        for heads in (most, most // 2)
        for phase, lengths in (("context", (1, 512)), ("generation", (1,)))
        for batch, length, (kernel, ms) in product((1, 64), lengths, (("conv", 1e-3), ("rule", 2e-3)))
    ]


@pytest.fixture(scope="module")
def more(tables: Path) -> Path:
    for phase in ("context", "generation"):
        write(tables, f"sparse_attention/vllm/0.24.0/dsa_{phase}_module", sparse_rows(phase))
    write(tables, "linear_attention/vllm/0.24.0/gdn", delta_rows())
    return tables


def of_blocks(*blocks: Block) -> ModelSpec:
    return SPEC.model_copy(update={"family": "other", "blocks": blocks})


def test_sparse_attention_is_of_its_model_and_its_index_is_left_out_where_it_is_shared(more: Path) -> None:
    shared = SPARSE.model_copy(update={"indexer": SPARSE.indexer.model_copy(update={"is_shared": True})})
    for attention, share in ((SPARSE, 1.0), (shared, 0.5)):
        layer = made(more, of_blocks(Block(layers=(0, 1, 2, 3), attention=attention, ffn_size=2048))).layer(1)
        assert layer.decode_attention.seconds[1][1] == pytest.approx(share * 64 * 512 / 1e3)
        assert layer.encode_attention.seconds[1][1] == pytest.approx(share * 64 * 512 / 1e3)


def test_layers_of_two_kinds_are_their_mean_and_a_recurrence_does_not_grow_with_the_context(more: Path) -> None:
    linear, full = (
        Block(layers=(0, 1, 2), recurrent=DELTA, ffn_size=2048),
        Block(layers=(3,), attention=FULL, ffn_size=2048),
    )
    both, one = (
        made(more, of_blocks(*blocks)).layer(1)
        for blocks in ((linear, full), (full.model_copy(update={"layers": (0, 1, 2, 3)}),))
    )
    i, j = both.decode_attention.batches.index(64), both.decode_attention.lengths.index(512)
    whole_s = one.decode_attention.seconds[one.decode_attention.batches.index(64)][
        one.decode_attention.lengths.index(512)
    ]
    delta_s = 3e-3 * 64 * 16 / 1e3
    assert both.decode_attention.seconds[i][j] == pytest.approx(0.75 * delta_s + 0.25 * whole_s)
    encode = both.encode_attention
    prompt_s = encode.seconds[encode.batches.index(1)][encode.lengths.index(512)]
    assert prompt_s > 0.75 * 3e-3 * 512 * 16 / 1e3


def test_what_no_table_holds_is_the_datasheets(more: Path) -> None:
    odd = DELTA.model_copy(update={"state_elements": 16 * 64 * 128})
    profile = made(more, of_blocks(Block(layers=(0, 1, 2, 3), recurrent=odd, ffn_size=2048)))
    assert profile.provenance["recurrence"].startswith("datasheet")


def test_kernels_of_latent_attention_have_their_products_added(more: Path, tmp_path: Path) -> None:
    root = linked(more, tmp_path / "h100_sxm")
    rows = [
        {"num_heads": heads, "kv_cache_dtype": "bfloat16", "batch_size": b, "isl": 1, "step": n - 1, "latency": b * n}
        for heads, b, n in product((16, 8), (1, 64), (1, 512))
    ]
    for phase in ("context", "generation"):
        write(root, f"mla/vllm/0.24.0/{phase}_mla", rows)
    latent = LatentAttention(kv_rank=512, q_rank=1536, rope_head_dim=64, value_head_dim=128)
    attention = Attention(num_heads=16, num_kv_heads=16, head_dim=192, latent=latent)
    profile = made(root, of_blocks(Block(layers=(0, 1, 2, 3), attention=attention, ffn_size=2048)))
    without = made(root, of_blocks(Block(layers=(0, 1, 2, 3), ffn_size=2048)))
    assert profile.layer(1).decode_attention.seconds[1][1] == pytest.approx(64 * 512 / 1e3)
    assert rest(profile, (1, 1), 64) > 1.2 * rest(without, (1, 1), 64)


def test_int4_experts_take_no_longer_than_half_precision_and_read_less(tables: Path, tmp_path: Path) -> None:
    root = linked(tables, tmp_path / "h100_sxm")
    write(root, "moe/vllm/0.24.0/moe", [*expert_rows(), *expert_rows("int4_wo", 4.0)])
    stored = Quantization(kind="int4", experts_only=True)
    int4, half = (made(root, MOE.model_copy(update={"quantization": q})) for q in (stored, None))
    saved_s = rest(half, (1, 1), 1) - rest(int4, (1, 1), 1)
    assert saved_s == pytest.approx((1 - stored.bytes_per_weight / 2) * expert_ms(1, 1, 1, skewed=True) / 1e3)
    assert rest(int4, (1, 1), 8192) <= (1 + 1e-12) * rest(half, (1, 1), 8192)
    assert EXPERTS.active == MOE.experts.active


def test_a_table_with_a_few_odd_sizes_is_read_without_them(tables: Path, tmp_path: Path) -> None:
    odd = [{"gemm_dtype": "bfloat16", "m": 1, "n": 1, "k": 512, "latency": 1.0}]
    root = linked(tables, tmp_path / "h100_sxm")
    (root / "gemm").unlink()
    write(root, "gemm/vllm/0.24.0/gemm", [*gemm_rows(), *odd])
    assert rest(made(root, SPEC), (1, 1), 16) == pytest.approx(rest(made(tables, SPEC), (1, 1), 16))


def test_the_mean_of_surfaces_covers_the_points_of_all() -> None:
    short = Surface(batches=(1, 4), lengths=(1, 16), seconds=((1.0, 16.0), (4.0, 64.0)))
    long = Surface(batches=(1, 8), lengths=(1, 64), seconds=((2.0, 128.0), (16.0, 1024.0)))
    mean = mean_surface([short, long], [0.5, 0.5])
    assert mean.batches == (1, 4, 8) and mean.lengths == (1, 16, 64)
    assert np.asarray(mean.seconds) == pytest.approx(1.5 * np.outer((1, 4, 8), (1, 16, 64)))
