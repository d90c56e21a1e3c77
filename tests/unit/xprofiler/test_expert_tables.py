"""Experts, latent attention, windows and stored weights of profiles from others' tables."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.xprofiler.test_imported import (
    BARE,
    H100,
    SPEC,
    all_reduce_rows,
    attention_rows,
    gemm_ms,
    gemm_rows,
    write,
)
from xgpt.core.errors import InputError
from xgpt.core.schema import Experts, LatentAttention, ModelSpec, Profile, Quantization
from xprofiler import analytic, imported
from xprofiler.experts import Routing
from xprofiler.tables import Tables

EXPERTS = Experts(number=16, active=4, ffn_size=512, skew=1.2)
MOE = SPEC.model_copy(update={"family": "mixtral", "experts": EXPERTS, "ffn_size": 512})
LATENT = LatentAttention(kv_rank=512, q_rank=1536, rope_head_dim=64, value_head_dim=128)


def expert_ms(tokens: float, slices: int, parts: int, skewed: bool) -> float:
    return 1e-3 * tokens**0.5 * (1.5 if skewed else 1.0) / slices / parts**0.5


def expert_rows(dtype: str = "bfloat16", slower: float = 1.0, topk: int = 4) -> list[dict[str, Any]]:
    groups = ((1, 1), (2, 1), (1, 2))
    return [
        {
            "moe_dtype": dtype,
            "num_tokens": tokens,
            "hidden_size": 1024,
            "inter_size": 512,
            "topk": topk,
            "num_experts": 16,
            "moe_tp_size": slices,
            "moe_ep_size": parts,
            "distribution": "power_law_1.2" if skewed else "balanced",
            "latency": kernel * slower * expert_ms(tokens, slices, parts, skewed),
        }
        for (slices, parts), tokens, skewed, kernel in product(groups, (1, 16, 1024), (True, False), (1.0, 3.0))
    ]


def latent_rows(phase: str) -> list[dict[str, Any]]:
    return [
        {
            "num_heads": heads,
            "kv_cache_dtype": kv,
            "gemm_type": stored,
            "batch_size": batch,
            "isl": 1 if phase == "generation" else length,
            "step": length - 1 if phase == "generation" else 0,
            "latency": batch * length * heads * (0.5 if kv == "fp8" else 1.0) * (1.0 if stored == "fp8_block" else 2.0),
        }
        for heads, kv, stored, batch, length in product(
            (64, 128), ("bfloat16", "fp8"), ("bfloat16", "fp8_block"), (1, 64), (1, 512)
        )
    ]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "h100_sxm"
    blocks = [row | {"gemm_dtype": "fp8_block"} for row in gemm_rows(2.0) if row["gemm_dtype"] == "bfloat16"]
    write(root, "gemm/vllm/0.24.0/gemm", [*gemm_rows(), *blocks])
    write(root, "attention/vllm/0.24.0/context_attention", attention_rows("context"))
    write(root, "attention/vllm/0.24.0/generation_attention", attention_rows("generation"))
    write(root, "comm/vllm/0.24.0/custom_allreduce", all_reduce_rows())
    write(root, "moe/vllm/0.19.0/moe", [*expert_rows(), *expert_rows("fp8_block", 0.5)])
    write(root, "moe/vllm/0.24.0/moe", expert_rows(slower=9.0, topk=2))  # of another model: newer, and not asked for
    write(root, "mla/vllm/0.24.0/mla_context_module", latent_rows("context"))
    write(root, "mla/vllm/0.24.0/mla_generation_module", latent_rows("generation"))
    return root


def made(tables: Path, spec: ModelSpec = MOE, dtype: Any = "bfloat16", **more: Any) -> Profile:
    return imported.profile(spec, H100, dtype, BARE, tables, **more)


def rest(profile: Profile, group: tuple[int, int], tokens: int) -> float:
    curve = profile.layer(*group).rest
    return curve.seconds[curve.points.index(tokens)]


def linked(tables: Path, root: Path) -> Path:
    """A folder with the same tables, but those of experts."""
    for name in ("gemm", "attention", "comm"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(tables / name)
    return root


def test_experts_come_from_the_newest_table_that_holds_them(tables: Path) -> None:
    profile = made(tables)
    assert profile.groups == ((1, 1), (2, 1), (2, 2))
    assert profile.provenance["moe"] == "h100_sxm/moe/vllm/0.19.0"
    for tokens in (1, 16, 512):
        by_slices, by_parts = rest(profile, (2, 1), tokens), rest(profile, (2, 2), tokens)
        saved = expert_ms(tokens, 1, 2, True) - expert_ms(tokens, 2, 1, True)
        assert by_parts - by_slices == pytest.approx(saved / 1e3, rel=1e-6)


def test_a_layer_is_the_mean_of_those_with_experts_and_without(tables: Path) -> None:
    spec = MOE.model_copy(update={"experts": EXPERTS.model_copy(update={"dense_layers": (0,)}), "ffn_size": 2048})
    for tokens in (8, 512):
        with_experts = expert_ms(tokens, 1, 1, True) + gemm_ms(tokens, 512, 1024)  # the smallest width
        dense = gemm_ms(tokens, 4096, 1024) + gemm_ms(tokens, 1024, 2048)
        bandwidth = 3.35e12 * analytic.Kernels(H100, "bfloat16").efficiency.kv  # activations of the dense layers
        small = 2 * tokens * 0.25 * 3 * 2048 / bandwidth
        change = rest(made(tables, spec), (1, 1), tokens) - rest(made(tables), (1, 1), tokens)
        assert change == pytest.approx((dense - with_experts) / 4e3 + small, rel=1e-6)


def test_routing_is_the_nearest_that_was_measured(tables: Path) -> None:
    even = {skew: MOE.model_copy(update={"experts": EXPERTS.model_copy(update={"skew": skew})}) for skew in (0.0, 1.0)}
    assert made(tables, even[1.0]).layers == made(tables).layers
    more = rest(made(tables), (1, 1), 1) - rest(made(tables, even[0.0]), (1, 1), 1)
    assert more == pytest.approx(0.5 * expert_ms(1, 1, 1, False) / 1e3)


def test_tokens_that_choose_by_themselves_meet_fewer_experts_than_tokens_dealt_in_turn(tables: Path) -> None:
    """Four tokens dealt in turn meet all sixteen experts; by chance they meet 16 (1 - 0.75 ** 4)."""
    even = MOE.model_copy(update={"experts": EXPERTS.model_copy(update={"skew": 0.0})})
    met = 4 * (1 - 0.75**4)
    saved = rest(made(tables), (1, 1), 4) - rest(made(tables, even), (1, 1), 4)
    assert saved == pytest.approx((expert_ms(4, 1, 1, True) - expert_ms(met, 1, 1, False)) / 1e3)
    # In two parts, the busiest device has sqrt(2 ln 2 / 16) more than the mean.
    busiest = 4 * (1 + (2 * np.log(2) / 16) ** 0.5)
    met = 4 * (1 - 0.75**busiest)
    seconds = expert_ms(busiest, 1, 2, False) - expert_ms(4, 1, 2, False) + expert_ms(met, 1, 2, False)
    saved = rest(made(tables), (2, 2), 4) - rest(made(tables, even), (2, 2), 4)
    assert saved == pytest.approx((expert_ms(4, 1, 2, True) - seconds) / 1e3)


def test_stored_weights_have_products_of_their_own(tables: Path) -> None:
    """Those around experts take no longer than in half precision, which was measured to be faster here."""
    stored = MOE.model_copy(update={"quantization": Quantization(kind="fp8_block")})
    change = rest(made(tables, stored), (1, 1), 16) - rest(made(tables), (1, 1), 16)
    assert change == pytest.approx(-0.5 * expert_ms(16, 1, 1, True) / 1e3)
    with pytest.raises(InputError, match="int8_wo"):
        made(tables, MOE.model_copy(update={"quantization": Quantization(kind="int8")}))


def test_experts_of_a_shape_without_a_table_are_those_of_the_nearest_shape_scaled_by_rooflines(tables: Path) -> None:
    known, other = (made(tables, MOE.but(experts=EXPERTS.but(number=number))) for number in (16, 24))
    assert other.provenance["experts"].startswith("of 16 experts of 512, 4 active, hidden size 1024, the nearest shape")
    assert other.groups == ((1, 1), (2, 1), (2, 2))
    kernels, params = analytic.Kernels(H100, "bfloat16"), 3 * 1024 * 512
    saved = 0.0  # by two slices instead of one, in which the router takes the same time
    for slices, sign in ((1, 1), (2, -1)):
        own, near = (kernels.grouped(16, params / slices, Routing(EXPERTS.but(number=n))) for n in (24, 16))
        saved += sign * expert_ms(16, slices, 1, True) / 1e3 * (own / near - 1)
    differ = [rest(profile, (1, 1), 16) - rest(profile, (2, 1), 16) for profile in (other, known)]
    assert saved > 0
    assert differ[0] - differ[1] == pytest.approx(saved, rel=1e-6)


def test_experts_of_a_type_without_a_table_are_the_datasheets(tables: Path) -> None:
    stored = MOE.model_copy(update={"quantization": Quantization(kind="nvfp4", kept=("attention", "dense", "shared"))})
    assert made(tables, stored).provenance["experts"].startswith("datasheet")


@pytest.mark.parametrize(("slower", "share"), [(2.0, 1.0), (0.5, 0.5)])
@pytest.mark.parametrize("dtype", ["fp8_block", "nvfp4"])
def test_launches_in_a_table_do_not_make_small_types_slower_than_half_precision(
    dtype: str, slower: float, share: float, tmp_path: Path
) -> None:
    rows = [row for row in gemm_rows() if row["gemm_dtype"] == "bfloat16"]
    small = [row | {"gemm_dtype": dtype, "latency": slower * row["latency"]} for row in rows]
    write(tmp_path, "gemm/vllm/0.19.0/gemm", [*rows, *small])
    found = Tables(tmp_path, "vllm", "bfloat16")
    assert found.product(16, 512, 512, dtype) == pytest.approx(share * found.product(16, 512, 512))


def test_latent_attention_has_its_products_in_its_own_table(tables: Path) -> None:
    spec = MOE.model_copy(
        update={
            "family": "deepseek_v3",
            "latent": LATENT,
            "num_heads": 128,
            "num_kv_heads": 128,
            "head_dim": 192,
            "quantization": Quantization(kind="fp8_block"),
        }
    )
    by_kv = {kv: made(tables, spec, kv_dtype=kv).layer(2) for kv in ("bfloat16", "float8")}
    for kv, share in (("bfloat16", 1.0), ("float8", 0.5)):
        assert by_kv[kv].decode_attention.seconds[1][1] == pytest.approx(share * 64 * 512 * 64 / 1e3)
        assert by_kv[kv].encode_attention.seconds[0][1] == pytest.approx(share * 512 * 64 / 1e3)
    other = made(tables, spec.model_copy(update={"latent": LATENT.model_copy(update={"kv_rank": 256})}))
    assert other.provenance["attention"].startswith("datasheet")


def test_beyond_a_window_a_decode_costs_no_more(tables: Path) -> None:
    spec = SPEC.model_copy(update={"sliding_window": 64, "full_attention_layers": (1,)})
    whole, windowed = made(tables, SPEC).layer(1), made(tables, spec).layer(1)
    full, half = np.asarray(whole.decode_attention.seconds), np.asarray(windowed.decode_attention.seconds)
    assert half[:, :2] == pytest.approx(full[:, :2])
    assert half[:, 2] == pytest.approx(0.25 * full[:, 2] + 0.75 * full[:, 1])
    full, half = np.asarray(whole.encode_attention.seconds), np.asarray(windowed.encode_attention.seconds)
    assert (half <= full * (1 + 1e-12)).all() and (half[:, 2] < full[:, 2]).all()


@pytest.mark.parametrize("framework", ["vllm", "trtllm"])
def test_an_engine_that_rounds_activations_has_kernels_for_it_where_a_device_has(
    framework: str, tables: Path, tmp_path: Path
) -> None:
    """Its own, or those that FlashInfer hands to others."""
    root = linked(tables, tmp_path / "h100_sxm")
    stored = MOE.model_copy(update={"quantization": Quantization(kind="mxfp4", experts_only=True)})
    write(root, "moe/vllm/1.0.0/moe", expert_rows("w4a16_mxfp4"))
    write(root, f"moe/{framework}/1.0.1/moe", [*expert_rows("w4a16_mxfp4"), *expert_rows("w4a8_mxfp4_mxfp8", 0.5)])
    rounds = BARE.model_copy(update={"rounds_activations": True})
    seconds = [
        rest(imported.profile(stored, H100, "bfloat16", engine_spec, root), (1, 1), 16)
        for engine_spec in (BARE, rounds)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(0.5 * expert_ms(16, 1, 1, True) / 1e3)


def test_tables_are_those_of_the_engines_version(tables: Path, tmp_path: Path) -> None:
    """From its own upwards, or else the newest before; a group that one version lacks comes from the next."""
    root, slower = linked(tables, tmp_path / "h100_sxm"), {"0.17.0": 5.0, "0.19.0": 3.0, "0.24.0": 1.0}
    for version, factor in slower.items():
        rows = [row for row in expert_rows(slower=factor) if version != "0.19.0" or row["moe_tp_size"] == 1]
        write(root, f"moe/vllm/{version}/moe", rows)

    def seconds(version: str, group: tuple[int, int]) -> float:
        engine_spec = BARE.model_copy(update={"version": version})
        return rest(imported.profile(MOE, H100, "bfloat16", engine_spec, root), group, 16)

    for version, factor in {"0.15": 5, "0.18": 3, "0.19.0": 3, "0.20": 1, "0.32": 1}.items():
        more = (factor - 1) * expert_ms(16, 1, 1, True) / 1e3
        assert seconds(version, (1, 1)) - seconds("0.24.0", (1, 1)) == pytest.approx(more, abs=1e-12)
    assert seconds("0.18", (2, 1)) == seconds("0.24.0", (2, 1)) < seconds("0.15", (2, 1))


@pytest.mark.parametrize(("later", "factor"), [("triton", 1.0), ("cutlass", 3.0)])
def test_of_one_kernel_in_two_versions_the_shorter_times_count(
    later: str, factor: float, tables: Path, tmp_path: Path
) -> None:
    root = linked(tables, tmp_path / "h100_sxm")
    for version, kernel, slower in (("0.19.0", "triton", 3.0), ("0.24.0", later, 1.0)):
        rows = [row | {"kernel_source": kernel} for row in expert_rows(slower=slower)]
        write(root, f"moe/vllm/{version}/moe", rows)
    own, plain = (
        rest(imported.profile(MOE, H100, "bfloat16", BARE.model_copy(update={"version": version}), root), (1, 1), 16)
        for version in ("0.19.0", "0.24.0")
    )
    assert own - plain == pytest.approx((factor - 1) * expert_ms(16, 1, 1, True) / 1e3, abs=1e-12)


@pytest.mark.parametrize(("defect", "group"), [("undivided", (2, 2)), ("few points", (2, 2)), ("slower", (2, 1))])
def test_groups_that_a_table_measured_in_part_or_not_divided_come_from_another(
    defect: str, group: tuple[int, int], tables: Path, tmp_path: Path
) -> None:
    root, rows = linked(tables, tmp_path / "h100_sxm"), expert_rows()
    write(root, "moe/vllm/0.24.0/moe", rows)
    sound = made(root)
    if defect == "undivided":
        whole = [row for row in rows if (row["moe_tp_size"], row["moe_ep_size"]) == (1, 1)]
        wrong = [row for row in rows if row["moe_ep_size"] == 1] + [row | {"moe_ep_size": 2} for row in whole]
    elif defect == "slower":
        wrong = [row | {"latency": row["latency"] * row["moe_tp_size"] ** 3} for row in rows]
    else:
        wrong = [row for row in rows if row["moe_ep_size"] == 1 or row["num_tokens"] == 1024]
        wrong = [row | ({"latency": 9.0} if row["moe_ep_size"] == 2 else {}) for row in wrong]
    write(root, "moe/vllm/0.19.0/moe", wrong)
    profile = imported.profile(MOE, H100, "bfloat16", BARE.model_copy(update={"version": "0.19.0"}), root)
    assert profile.layer(*group).rest == sound.layer(*group).rest
