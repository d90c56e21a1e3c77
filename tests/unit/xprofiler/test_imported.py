"""Profiles from others' tables, on small tables that follow power laws."""

from __future__ import annotations

import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from xgpt.cli import main
from xgpt.core.errors import InputError
from xgpt.core.schema import EngineSpec, ModelSpec, Profile, Quantization
from xgpt.resolve import load_cluster, load_engine
from xprofiler import analytic, imported

SPEC = ModelSpec(
    name="small",
    family="llama",
    num_layers=4,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=2048,
    gated_ffn=True,
    vocab_size=16384,
    max_context=4096,
    default_dtype="bfloat16",
)
H100 = load_cluster("h100x8").model_copy(update={"devices_per_node": 2})
Rows = list[dict[str, Any]]


def gemm_ms(m: float, n: float, k: float) -> float:
    return 1e-7 * m**0.5 * n * k**0.9


def context_ms(batch: float, length: float, heads: float) -> float:
    return 1e-7 * batch * length**1.5 * heads


def generation_ms(batch: float, length: float, kv_heads: float) -> float:
    return 1e-6 * batch * length * kv_heads


def reduced_ms(elements: float, devices: int) -> float:
    return 1e-6 * elements * devices


def write(root: Path, where: str, rows: Rows) -> None:
    path = root / f"{where}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def gemm_rows(slower: float = 1.0) -> Rows:
    sizes = product((1, 16, 1024, 8192), (512, 4096), (512, 4096))
    rows = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": slower * share * gemm_ms(m, n, k)}
        for m, n, k in sizes
        for dtype, share in (("bfloat16", 1.0), ("fp8", 0.5))
    ]
    # A second kernel for the same product: the faster counts.
    return rows + [row | {"latency": 9 * row["latency"]} for row in rows[:4]]


def attention_rows(phase: str) -> Rows:
    rows: Rows = []
    for batch, length, heads, kv_heads in product((1, 8, 64), (1, 64, 512), (8, 16), (2, 4)):
        if batch * length > 8 * 512:
            continue
        decodes = phase == "generation"
        ms = generation_ms(batch, length, kv_heads) if decodes else context_ms(batch, length, heads)
        row = {
            "batch_size": batch,
            "isl": 1 if decodes else length,
            "step": length - 1 if decodes else 0,
            "num_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 64,
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "window_size": 0,
            "latency": ms,
        }
        rows += [row, row | {"window_size": 128, "latency": ms / 100}, row | {"kv_cache_dtype": "fp8"}]
    return rows


def all_reduce_rows() -> Rows:
    rows = [
        {"num_gpus": devices, "message_size": 2**power, "kernel_source": "vLLM_custom_graph"}
        for devices in (2, 4)
        for power in range(7, 25, 2)
    ]
    rows = [row | {"latency": reduced_ms(row["message_size"], row["num_gpus"])} for row in rows]
    return rows + [row | {"kernel_source": "vLLM_custom_eager", "latency": 50.0} for row in rows]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "h100_sxm"
    write(root, "gemm/vllm/0.24.0/gemm", gemm_rows())
    write(root, "gemm/vllm/0.9.1/gemm", gemm_rows(slower=7.0))
    write(root, "attention/vllm/0.24.0/context_attention", attention_rows("context"))
    write(root, "attention/vllm/0.24.0/generation_attention", attention_rows("generation"))
    write(root, "comm/vllm/0.24.0/custom_allreduce", all_reduce_rows())
    return root


BARE = EngineSpec(
    name="bare-1.0",
    framework="vllm",
    version="1.0",
    layer_s=3e-6,
    step_s=1e-3,
    uncaptured=1.0,
    captured_tokens=512,
    sources=dict.fromkeys(("layer_s", "step_s", "uncaptured", "captured_tokens"), "assumed"),
)


@pytest.fixture(scope="module")
def profile(tables: Path) -> Profile:
    return imported.profile(SPEC, H100, "bfloat16", BARE, tables)


SHAPES = [((16 + 8) * 64, 1024), (1024, 1024), (4096, 1024), (1024, 2048)]


def products_s(tokens: int, t: int, share: float = 1.0) -> float:
    shapes = [((16 + 8) * 64 // t, 1024), (1024, 1024 // t), (4096 // t, 1024), (1024, 2048 // t)]
    return share * sum(gemm_ms(tokens, n, k) for n, k in shapes) / 1e3


def rest_s(profile: Profile, t: int, tokens: int) -> float:
    """Without what the datasheet and the loop add, which is the same in every dtype."""
    curve = profile.layer(t).rest
    return curve.seconds[curve.points.index(tokens)]


def test_products_come_from_the_newest_tables_and_power_laws_are_exact(profile: Profile, tables: Path) -> None:
    eight_bit = imported.profile(SPEC, H100, "float8", BARE, tables)
    for t, tokens in product((1, 2), (1, 8, 512, 4096)):
        saved = rest_s(profile, t, tokens) - rest_s(eight_bit, t, tokens)
        assert saved == pytest.approx(products_s(tokens, t, share=0.5), rel=1e-6)
    assert profile.provenance["gemm"] == "h100_sxm/gemm/vllm/0.24.0"
    assert profile.source == "imported" and profile.tp_degrees == (1, 2)


def scale_rows(ms: float) -> Rows:
    return [{"m": m, "k": k, "quant_dtype": "fp8", "latency": ms} for m, k in product((1, 8192), (64, 8192))]


def test_finding_scales_that_a_checkpoint_holds_is_taken_off(tables: Path, tmp_path: Path) -> None:
    """Products in FP8 were measured with it; rounding goes with attention and the activation, not with the norms."""
    folder = tmp_path / "h100_sxm"
    shutil.copytree(tables, folder)
    write(folder, "quantize/vllm/0.24.0/computescale", scale_rows(4e-3))
    write(folder, "quantize/vllm/0.24.0/scale_matrix", scale_rows(1e-3))
    anew = SPEC.model_copy(update={"quantization": Quantization(kind="fp8", finds_scales=True)})
    with_scales, found = (imported.profile(spec, H100, "float8", BARE, folder) for spec in (SPEC, anew))
    saved = rest_s(found, 1, 4096) - rest_s(with_scales, 1, 4096)
    assert saved == pytest.approx((4 * 4e-3 + 2 * 1e-3) / 1e3, rel=1e-6)
    assert with_scales.provenance["scales of activations"] == "in the checkpoint, so not computed in a step"
    untold = imported.profile(SPEC, H100, "float8", BARE, tables)
    assert "no table has their time" in untold.provenance["scales of activations"]
    assert rest_s(untold, 1, 4096) == pytest.approx(rest_s(found, 1, 4096))
    write(folder, "quantize/vllm/0.24.0/computescale", scale_rows(1e3))
    least_s = 2 * 4096 * sum(n * k for n, k in SHAPES) / 1979e12
    beyond = rest_s(imported.profile(SPEC, H100, "float8", BARE, folder), 1, 4096)
    assert beyond == pytest.approx(rest_s(found, 1, 4096) - products_s(4096, 1, share=0.5) + least_s, rel=1e-3)


def test_what_adds_to_the_products(profile: Profile) -> None:
    """Two all-reduces of a token's hidden state in elements, from captured graphs; the loop; small kernels."""
    for tokens in (8, 4096):
        others = [rest_s(profile, t, tokens) - products_s(tokens, t) - BARE.layer_s for t in (1, 2)]
        bandwidth = 3.35e12 * analytic.Kernels(H100, "bfloat16").efficiency.kv
        small = [2 * tokens * (8 * 1024 + 2 * 1536 / t + 3 * 2048 / t) / bandwidth for t in (1, 2)]
        assert others[0] == pytest.approx(small[0], rel=1e-6)
        assert others[1] - small[1] == pytest.approx(2 * reduced_ms(tokens * 1024, 2) / 1e3, rel=1e-6)


def test_tokens_beyond_captured_graphs_take_longer(profile: Profile, tables: Path) -> None:
    slow = imported.profile(SPEC, H100, "bfloat16", BARE.model_copy(update={"uncaptured": 1.5}), tables)
    for t in (1, 2):
        assert rest_s(slow, t, 256) == pytest.approx(rest_s(profile, t, 256))
        at_512, bare, slowed = rest_s(profile, t, 512), rest_s(profile, t, 4096), rest_s(slow, t, 4096)
        assert slowed - at_512 == pytest.approx(1.5 * (bare - at_512))


def test_beyond_the_last_point_time_grows_in_proportion(profile: Profile) -> None:
    head = profile.head  # 16,384 columns, of which tables hold 4,096
    at_16 = head.seconds[head.points.index(16)]
    assert at_16 == pytest.approx(4 * gemm_ms(16, 4096, 1024) / 1e3)


def test_attention_by_heads_and_filled_where_too_large_to_measure(profile: Profile) -> None:
    prompts, decode = profile.layer(1).encode_attention, profile.layer(2).decode_attention
    assert prompts.seconds[1][2] == pytest.approx(context_ms(8, 512, 16) / 1e3)
    assert prompts.seconds[2][2] == pytest.approx(context_ms(64, 512, 16) / 1e3)
    assert decode.lengths == (1, 64, 512)
    assert decode.seconds[2][1] == pytest.approx(generation_ms(64, 64, 2) / 1e3)


def test_heads_that_were_not_measured_are_scaled_and_said_so(tables: Path) -> None:
    spec = SPEC.model_copy(update={"num_heads": 32, "num_kv_heads": 8})
    profile = imported.profile(spec, H100, "bfloat16", BARE, tables)
    decode = profile.layer(1).decode_attention
    assert decode.seconds[1][1] == pytest.approx(generation_ms(8, 64, 8) / 1e3)
    said = profile.provenance["generation attention of 32 heads of 64, 8 for K/V"]
    assert said == "the time for 16 heads of 64, 4 for K/V, at 2 times the batch"
    assert profile.provenance["serving loop"] == "configs/engines, bare-1.0"


def test_no_point_is_faster_than_the_device(tables: Path) -> None:
    slow = H100.device.model_copy(update={"memory_bandwidth_bytes_per_s": 1e9})
    profile = imported.profile(SPEC, H100.model_copy(update={"device": slow}), "bfloat16", BARE, tables)
    decode = profile.layer(1).decode_attention
    reads = 2 * 64 * 512 * 4 * 64 * 2  # K and V of 64 requests, 512 tokens, 4 heads, 64 elements of two bytes
    assert decode.seconds[decode.batches.index(64)][-1] == pytest.approx(reads / 1e9)
    assert "to the device's rates" in profile.provenance["generation attention, lifted"]
    assert "generation attention, lifted" not in imported.profile(SPEC, H100, "bfloat16", BARE, tables).provenance


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cluster": load_cluster("a100x16")}, "cluster.device: 'a100-sxm4-80gb' is not accepted; "),
        ({"dtype": "float32"}, "dtype: 'float32' is not accepted; tables can be imported only for float16"),
        ({"engine": load_engine("sglang")}, "framework: 'sglang' is not accepted; the tables have gemm only for vllm"),
    ],
)
def test_what_tables_do_not_hold_is_said(tables: Path, change: dict[str, Any], says: str) -> None:
    arguments = {"spec": SPEC, "cluster": H100, "dtype": "bfloat16", "engine": BARE} | change
    with pytest.raises(InputError) as caught:
        imported.profile(**arguments, folder=tables.parent)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "it must be a table with columns gemm_dtype"),
        ([{"m": 1}], "it must be a table with columns gemm_dtype"),
        ([row | {"latency": float("nan")} for row in gemm_rows()], "every latency must be above zero"),
        (
            [row | {"gemm_dtype": "int8"} for row in gemm_rows()],
            "the tables of h100_sxm have matrix products only in int8",
        ),
    ],
)
def test_broken_tables(tables: Path, tmp_path: Path, rows: Rows, says: str) -> None:
    root = tmp_path / "h100_sxm"
    root.mkdir()
    for family in ("attention", "comm"):
        (root / family).symlink_to(tables / family)
    write(root, "gemm/vllm/1.0/gemm", rows)
    with pytest.raises(InputError) as caught:
        imported.profile(SPEC, H100, "bfloat16", BARE, root)
    assert says in str(caught.value)


def test_without_pyarrow(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install"):
        imported.profile(SPEC, H100, "bfloat16", BARE, tables)


def test_the_wheel_is_looked_for(monkeypatch: pytest.MonkeyPatch, tables: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(imported, "PACKAGE", "a_wheel_that_is_not_there")
    with pytest.raises(InputError, match="it is not installed"):
        imported.profile(SPEC, H100, "bfloat16", BARE)
    systems = tmp_path / "a_wheel_that_is_there" / "systems"
    (systems / "data").mkdir(parents=True)
    (systems / "data" / "h100_sxm").symlink_to(tables)
    monkeypatch.setattr(imported, "PACKAGE", "a_wheel_that_is_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        imported.profile(SPEC, H100, "bfloat16", BARE).layers
        == imported.profile(SPEC, H100, "bfloat16", BARE, tables).layers
    )


def test_on_the_command_line(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "small.yaml"
    model.write_text(SPEC.model_dump_json())
    cluster = tmp_path / "h100x2.yaml"
    cluster.write_text(H100.model_dump_json())
    to = tmp_path / "profile.json"
    arguments = ["profile", "--model", str(model), "--cluster", str(cluster), "--dtype", "float8", "-o", str(to)]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--import-from", str(tables)])
    assert end.value.code == 0
    assert "gemm: h100_sxm/gemm/vllm/0.24.0" in capsys.readouterr().out
    profile = Profile.model_validate_json(to.read_text())
    assert (profile.source, profile.dtype) == ("imported", "float8")


def test_a_head_size_or_a_degree_without_a_table_takes_the_nearest_one(tables: Path) -> None:
    wide, eight = SPEC.but(head_dim=128), H100.but(devices_per_node=8)
    found = imported.profile(wide, eight, "bfloat16", BARE, tables)
    assert {layer.tp_degree for layer in found.layers} == {1, 2, 4, 8}
    assert found.layer(1).decode_attention.seconds[1][1] == pytest.approx(2 * generation_ms(8, 64, 4) / 1e3)
    said = " ".join(f"{part}: {source}" for part, source in found.provenance.items())
    assert "generation attention of 16 heads of 128" in said and "16 heads of 64" in said
    assert "all-reduce over 8 devices: that over 4" in said
