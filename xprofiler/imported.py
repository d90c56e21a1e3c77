"""Compute a profile from published latencies: AIConfigurator's tables, from its wheel or a folder.

The folder of a kind of device holds `<family of operators>/<framework>/<version>/<operator>_perf.parquet` with
latencies in milliseconds. Matrix products, attention and all-reduces come from these tables; everything else (norms,
activations, hops between stages, K/V transfer) comes from the datasheet, and `provenance` says so.

Between the points of a table, logarithms of latencies are interpolated, which is exact for every power law; beyond the
last point, latencies grow in proportion to size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import (
    BYTES_PER_ELEMENT,
    ClusterSpec,
    Curve,
    DType,
    EngineSpec,
    LayerTimes,
    ModelSpec,
    Profile,
    Quantization,
    Surface,
)
from xprofiler import analytic
from xprofiler.expert_tables import ExpertTable, latent_attention, stored_as, within_window
from xprofiler.experts import Routing
from xprofiler.tables import Tables

Array = npt.NDArray[np.float64]

PACKAGE = "aiconfigurator_core"

SYSTEMS = {
    "a100-sxm4-80gb": "a100_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "h100-80gb-hbm3": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
"""The tables' folder for each kind of device."""

TABLE_DTYPES: Mapping[DType, str] = {"float16": "bfloat16", "bfloat16": "bfloat16", "float8": "fp8"}
"""The tables' name for each dtype; both half-precision types are equally fast."""

TOKENS = tuple(sorted({*analytic.TOKENS, *(3 * n for n in analytic.TOKENS if 8 <= n <= 4096)}))


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    engine: EngineSpec,
    folder: Path | None = None,
    kv_dtype: DType | None = None,
) -> Profile:
    """Return a profile from the tables of every tensor-parallel degree that fits in a node, and each way to divide
    experts.

    Args:
        kv_dtype: type of K/V; None: the dtype.
        engine: the engine, whose framework's kernels and whose loop are used.
        folder: tables of one kind of device, or of several by the names in `SYSTEMS`; None: those of the installed
            wheel.

    Raises:
        InputError: no tables for this device, framework, dtype or model; pyarrow is not installed.
    """
    if spec.is_encoder_decoder:
        raise InputError("model", spec.name, "tables can be imported for decoder-only models")
    if spec.blocks:
        raise InputError("model", spec.name, "no tables cover its blocks: leave out `import_from`")
    if dtype not in TABLE_DTYPES:
        raise InputError("dtype", dtype, f"tables can be imported for {', '.join(TABLE_DTYPES)}")
    root = _folder_of(cluster.device.name, folder)
    kept = TABLE_DTYPES[kv_dtype or dtype]
    tables = Tables(root, engine.framework, TABLE_DTYPES[dtype], kept, cluster.device, engine.version)
    kernels = analytic.Kernels(cluster, dtype)
    layers = tuple(_layers(spec, cluster, tables, kernels, engine))
    return Profile(
        source="imported",
        model=spec.shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine=engine.framework,
        engine_version=engine.version,
        layers=layers,
        embedding=analytic.curve(lambda n: kernels.copy(2 * n * spec.hidden_size), TOKENS),
        head=_head(spec, tables, kernels, 1),
        overhead=analytic.loop(engine.step_s or 0.0, engine),
        **analytic.transfers(spec, cluster, dtype, kv_dtype),
        provenance={
            **tables.provenance,
            "norms, activations, embedding, hops, K/V transfer": "datasheet",
            "serving loop": f"configs/engines/{engine.name}.yaml",
        },
        environment=_package() if folder is None else {"folder": root.name},
    )


def wheel_folder() -> Path:
    """Return the folder of the installed wheel's tables.

    Raises:
        InputError: the wheel is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise InputError(
            "import_from", "aiconfigurator", "it is not installed: pip install --no-deps aiconfigurator-core"
        )
    return Path(found.submodule_search_locations[0]) / "systems"


def _package() -> dict[str, str]:
    try:
        return {"aiconfigurator-core": version("aiconfigurator-core")}
    except PackageNotFoundError:
        return {}


def _folder_of(device: str, folder: Path | None) -> Path:
    if folder is not None and (folder / "gemm").is_dir():
        return folder
    base = wheel_folder() / "data" if folder is None else folder
    root = base / SYSTEMS.get(device, device)
    if not (root / "gemm").is_dir():
        systems = sorted(name for name, system in SYSTEMS.items() if (base / system / "gemm").is_dir())
        raise InputError(
            "cluster.device", device, f"{base} has tables for {', '.join(systems) or 'no device'}; choose one of these"
        )
    return root


def product_shapes(spec: ModelSpec, t: int) -> list[tuple[int, int]]:
    """Return (n, k) of a layer's matrix products on one of t devices: [m, k] times [k, n]."""
    return [*_attention_shapes(spec, t), *_ffn_shapes(spec, spec.ffn_size // t)]


def _attention_shapes(spec: ModelSpec, t: int) -> list[tuple[int, int]]:
    q, kv = spec.num_heads // t * spec.head_dim, max(1, spec.num_kv_heads // t) * spec.head_dim
    return [(q + 2 * kv, spec.hidden_size), (spec.hidden_size, q)]


def _ffn_shapes(spec: ModelSpec, width: int) -> list[tuple[int, int]]:
    return [((2 if spec.gated_ffn else 1) * width, spec.hidden_size), (spec.hidden_size, width)]


def _layers(
    spec: ModelSpec, cluster: ClusterSpec, tables: Tables, kernels: analytic.Kernels, engine: EngineSpec
) -> Iterator[LayerTimes]:
    """Yield the times of a layer for every group of devices; experts without a table come from the datasheet's
    roofline."""
    if spec.experts is None:
        for t in analytic.tp_degrees(spec, cluster):
            yield _layer(spec, tables, kernels, (t, 1), engine, None)
        return
    stored = stored_as(spec.quantization, tables.dtype)
    experts_table = ExpertTable(tables, spec, stored, rounds=engine.rounds_activations)
    degrees = analytic.tp_degrees(spec, cluster)
    groups = {group for group in experts_table.groups if group[0] in degrees}
    usual = set(analytic.groups(spec, cluster))
    if not groups:
        tables.provenance["experts"] = "datasheet: no table has this shape in this type"
    elif usual - groups:
        of_missing = ", ".join(f"{t} devices in {ep} parts" for t, ep in sorted(usual - groups))
        tables.provenance["experts"] = f"of {of_missing}: scaled by the datasheet's ratios"
    for group in sorted(groups | usual):
        yield _layer(spec, tables, kernels, group, engine, experts_table)


def _layer(
    spec: ModelSpec,
    tables: Tables,
    kernels: analytic.Kernels,
    group: tuple[int, int],
    engine: EngineSpec,
    experts: ExpertTable | None,
) -> LayerTimes:
    t, ep = group
    slower, captured_tokens = engine.uncaptured or 1.0, engine.captured_tokens or 0
    tokens = np.asarray(TOKENS, float)
    encode, decode, products = _attention(spec, tables, t, slower)
    products = products + _feed_forward(spec, tables, kernels, group, experts)
    reduced = 2 * tables.all_reduce(tokens * spec.hidden_size, t)
    if spec.norms_span_heads:  # sums of squares of queries and keys, in float32
        reduced = reduced + tables.all_reduce(4 * tokens, t)
    # Read and written in half precision: two norms with their residuals, rotations with writing K/V, the activation.
    q, kv = spec.num_heads // t * spec.head_dim, max(1, spec.num_kv_heads // t) * spec.head_dim
    dense = 1 - spec.num_expert_layers() / spec.num_layers
    elements = 8 * spec.hidden_size + 2 * (q + 2 * kv) + dense * (3 if spec.gated_ffn else 2) * (spec.ffn_size // t)
    half = BYTES_PER_ELEMENT["bfloat16"] / kernels.size
    small = np.asarray([kernels.copy(n * elements * half) for n in TOKENS]) / kernels.elementwise
    rest = products + reduced + small
    captured = np.interp(captured_tokens, tokens, rest)
    rest = (engine.layer_s or 0.0) + np.where(tokens > captured_tokens, captured + slower * (rest - captured), rest)
    return LayerTimes(
        tp_degree=t,
        ep_degree=ep,
        rest=Curve(points=TOKENS, seconds=tuple(rest.tolist())),
        encode_attention=encode,
        decode_attention=decode,
        head=None if t == 1 else _head(spec, tables, kernels, t),
    )


def _attention(spec: ModelSpec, tables: Tables, t: int, slower: float) -> tuple[Surface, Surface, Array]:
    """Return attention of prompts and of decode, and the projections around it unless these include them. # [tokens]"""
    heads, kv_heads = spec.num_heads // t, max(1, spec.num_kv_heads // t)
    stored = spec.quantization
    outside = stored_as(None if stored is not None and stored.experts_only else stored, tables.dtype)
    if spec.latent is not None:
        return *latent_attention(tables, spec, heads, outside, slower), np.zeros(len(TOKENS))
    products = _in_turn(tables, _attention_shapes(spec, t), outside, stored)
    encode = tables.attention("context", heads, kv_heads, spec.head_dim, slower)
    decode = tables.attention("generation", heads, kv_heads, spec.head_dim)
    return (
        within_window(encode, spec, prompts=True),
        within_window(decode, spec, prompts=False),
        products,
    )


def _in_turn(tables: Tables, shapes: Sequence[tuple[int, int]], dtype: str, stored: Quantization | None) -> Array:
    """Return the seconds of two matrix products; the operator between them may round to eight bits. # [tokens]"""
    finds_scales, (first, second) = stored is not None and stored.finds_scales, shapes
    before = tables.product(TOKENS, *first, dtype, finds_scales=finds_scales)
    return before + tables.product(TOKENS, *second, dtype, finds_scales=finds_scales, arrives_rounded=True)


def _feed_forward(
    spec: ModelSpec, tables: Tables, kernels: analytic.Kernels, group: tuple[int, int], experts: ExpertTable | None
) -> Array:
    """Return the seconds of the feed-forward block, the mean over layers with experts and without. # [tokens]"""
    t, ep = group
    stored = spec.quantization
    outside = stored_as(None if stored is not None and stored.experts_only else stored, tables.dtype)

    def block(width: int) -> Array:
        return _in_turn(tables, _ffn_shapes(spec, width), outside, stored)

    if spec.experts is None or experts is None:
        return block(spec.ffn_size // t)
    tokens, share = np.asarray(TOKENS, float), spec.num_expert_layers() / spec.num_layers

    def roofline(group: tuple[int, int]) -> Array:
        assert spec.experts is not None
        routing, each = Routing(spec.experts, group[1]), spec.expert_params / (group[0] // group[1])
        return np.asarray([kernels.grouped(n, each, routing, stored) for n in TOKENS])

    groups = experts.groups
    if group in groups:
        routed = experts.seconds(tokens, t, ep)
    elif groups:
        near = min(groups, key=lambda other: (abs(np.log(other[0] / t)), abs(np.log(other[1] / ep))))
        routed = experts.seconds(tokens, *near) * roofline(group) / roofline(near)
    else:
        routed = roofline(group)
    found = share * (routed + tables.product(tokens, spec.experts.number, spec.hidden_size, "bfloat16"))
    if spec.experts.shared_ffn_size:
        found = found + share * block(spec.experts.shared_ffn_size // t)
    if share < 1:
        found = found + (1 - share) * block(spec.ffn_size // t)
    return found


def _head(spec: ModelSpec, tables: Tables, kernels: analytic.Kernels, t: int) -> Curve:
    """Return the head's seconds; its product stays in half precision."""
    rows = np.asarray(analytic.BATCHES, float)
    half = BYTES_PER_ELEMENT["bfloat16"] / kernels.size
    gathered = [kernels.all_gather(n * spec.vocab_size * half, t) for n in analytic.BATCHES]
    seconds = tables.product(rows, spec.vocab_size / t, spec.hidden_size, "bfloat16") + gathered
    return Curve(points=analytic.BATCHES, seconds=tuple(seconds.tolist()))
