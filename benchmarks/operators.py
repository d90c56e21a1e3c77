"""Compare the datasheet's operators with published measurements, on devices that both cover.

    python -m benchmarks.operators [--fit]

Shapes are those of the shipped Llama and Qwen models at every tensor-parallel degree. The measured latencies are vLLM's
in the wheel of aiconfigurator-core 0.12, in half precision and in eight bits. `--fit` prints efficiencies for
configs/devices: for each kind of device and dtype, the set that minimises the mean error of each kind of operator on a
logarithmic scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.lib.results import record, table
from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec, DType, Efficiency, Experts, ModelSpec, Quantization
from xgpt.resolve import load_cluster, load_model
from xprofiler import imported
from xprofiler.analytic import A40_EFFICIENCY, Kernels, tp_degrees
from xprofiler.experts import ExpertTable, Routing, shapes_of, stored_as
from xprofiler.imported import attention_shapes, ffn_shapes

CLUSTERS = ("a100x16", "h100x8", "h200x8", "b200x8", "b300x8", "gb200x4", "l40sx8", "rtx-pro-6000x8")
DTYPES: tuple[DType, ...] = ("bfloat16", "float8")
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b")
TOKENS = tuple(2**i for i in range(14))
ELEMENTS = tuple(2**i for i in range(10, 27))
GROUPS = ((1, 1), (4, 1), (8, 1), (8, 8))
SKEW = 1.2
"""Exponent of the power law of routing in the tables."""
STORED: dict[DType, tuple[str | None, ...]] = {"bfloat16": (None, "fp8_block", "nvfp4"), "float8": ("fp8_block",)}
"""Formats of experts that are fitted together, by the type of everything else."""

Point = tuple[Callable[[Kernels], float], float]
"""The datasheet's time of an operator, and the measured time, in seconds."""

PARAMETERS = {
    "matrix product": ("matrix", "weights", "product_s"),
    "prompt attention": ("attention", "attention_half_length", "attention_s"),
    "decode attention": ("kv", "attention_s"),
    "all-reduce": ("bus", "all_reduce_s"),
    "experts": ("experts", "experts_s"),
}
"""The efficiencies on which each kind of operator depends. `attention_s` belongs to both kinds of attention, and is
fitted on decode."""

LAYER_S = 6e-6
"""Seconds of a layer's norms, rotations and activations, which no table contains: two or three small kernels in a
captured graph."""
SOURCE = "fitted to vLLM's kernels in aiconfigurator-core 0.12 (benchmarks.operators --fit)"

START = {
    "matrix": 0.8,
    "weights": 0.8,
    "product_s": 4e-6,
    "attention": 0.6,
    "attention_half_length": 800.0,
    "attention_s": 12e-6,
    "kv": 0.8,
    "bus": 0.6,
    "all_reduce_s": 5e-6,
    "experts": 0.7,
    "experts_s": 2e-5,
}


def points(cluster: ClusterSpec, dtype: DType) -> dict[str, list[Point]]:
    """Return every operator of the models at every degree, by kind. All-reduces are in half precision whatever the
    dtype."""
    root = imported.wheel_folder() / "data" / imported.SYSTEMS[cluster.device.name]
    tables = imported.Tables(root, "vllm", imported.TABLE_DTYPES[dtype], device=cluster.device)
    found: dict[str, list[Point]] = {kind: [] for kind in PARAMETERS}
    for name in MODELS:
        spec, _ = load_model(name)
        for t in tp_degrees(spec, cluster):
            _of_model(spec, t, tables, found)
    for stored in STORED[dtype]:
        found["experts"] += _of_experts(tables, stored)
    for t in (t for t in (2, 4, 8) if t <= cluster.devices_per_node):
        seconds = tables.all_reduce(ELEMENTS, t)
        found["all-reduce"] += [
            (lambda kernels, n=n, t=t: kernels.all_reduce(n, t), float(s))
            for n, s in zip(ELEMENTS, seconds, strict=True)
        ]
    return found


def _of_experts(tables: imported.Tables, stored: str | None) -> list[Point]:
    found: list[Point] = []
    form = None if stored is None else Quantization.model_validate({"kind": stored})
    for width_in, width, active, number in sorted(shapes_of(tables, stored_as(form, tables.dtype))):
        experts = Experts(number=number, active=active, ffn_size=width, skew=SKEW)
        table = ExpertTable(tables, width_in, experts, stored_as(form, tables.dtype))
        for t, ep in sorted(table.groups & set(GROUPS)):
            routing, params = Routing(experts, ep), 3 * width_in * width / (t // ep)
            found += [
                (lambda kernels, m=m, r=routing, n=params, form=form: kernels.grouped(m, n, r, form), float(s))
                for m, s in zip(TOKENS, table.seconds(np.asarray(TOKENS, float), t, ep), strict=True)
            ]
    return found


def _of_model(spec: ModelSpec, t: int, tables: imported.Tables, found: dict[str, list[Point]]) -> None:
    heads, kv_heads, dim = spec.num_heads // t, max(1, spec.num_kv_heads // t), spec.head_dim
    attention = spec.kinds[0].attention
    assert attention is not None
    for n, k in (*attention_shapes(spec, attention, t), *ffn_shapes(spec, spec.ffn_size // t)):
        seconds = tables.product(TOKENS, n, k)
        found["matrix product"] += [
            (lambda kernels, m=m, n=n, k=k: kernels.matrix(m, n * k), float(s))
            for m, s in zip(TOKENS, seconds, strict=True)
        ]
    for kind, phase in (("prompt attention", "context"), ("decode attention", "generation")):
        surface = tables.attention(phase, heads, kv_heads, dim)
        for batch, row in zip(surface.batches, surface.seconds, strict=True):
            for length, s in zip(surface.lengths, row, strict=True):
                if not (16 <= length <= 16384 and batch * length <= (2**16 if phase == "context" else 2**21)):
                    continue
                if phase == "context":
                    point = (lambda k, b=batch, n=length: k.prompt_attention(b, n, heads * dim, causal=True), s)
                else:
                    point = (lambda k, b=batch, n=length: k.decode_attention(b, n, kv_heads * dim), s)
                found[kind].append(point)


def errors(kernels: Kernels, points_of_kind: list[Point]) -> np.ndarray:
    return np.asarray([predict(kernels) / measured - 1 for predict, measured in points_of_kind])


def with_efficiency(cluster: ClusterSpec, efficiency: Efficiency, dtype: DType) -> Kernels:
    device = cluster.device.model_copy(update={"efficiency": efficiency, "efficiency_float8": efficiency})
    return Kernels(cluster.model_copy(update={"device": device}), dtype)


def fit(cluster: ClusterSpec, found: dict[str, list[Point]], dtype: DType) -> Efficiency:
    values = A40_EFFICIENCY.model_dump() | START
    for kind in ("matrix product", "decode attention", "prompt attention", "all-reduce", "experts"):
        names = [n for n in PARAMETERS[kind] if not (kind == "prompt attention" and n == "attention_s")]
        sample = found[kind][:: max(1, len(found[kind]) // 1000)]
        values |= _fit_kind(cluster, values, names, sample, dtype)
    return Efficiency.model_validate(values | {"layer_s": LAYER_S, "source": SOURCE})


def _fit_kind(
    cluster: ClusterSpec, values: dict[str, Any], names: list[str], kind_points: list[Point], dtype: DType
) -> dict[str, float]:
    start = np.asarray([values[name] for name in names])

    def tried(scale: np.ndarray) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in zip(names, start * np.exp(scale), strict=True)}

    def loss(scale: np.ndarray) -> float:
        found = tried(scale)
        if any(found.get(name, 0) > 1 for name in ("matrix", "weights", "attention", "kv", "bus", "experts")):
            return 1e3
        kernels = with_efficiency(cluster, Efficiency.model_validate(values | found), dtype)
        return float(np.mean(np.abs(np.log1p(errors(kernels, kind_points)))))

    simplex = np.vstack([np.zeros(len(names)), 0.15 * np.eye(len(names))])
    best = minimize(
        loss, simplex[0], method="Nelder-Mead", options={"initial_simplex": simplex, "maxfev": 120, "xatol": 0.01}
    )
    return tried(best.x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--cluster", action="append", choices=CLUSTERS)
    options = parser.parse_args()
    rows: list[list[str]] = []
    for name, dtype in product(options.cluster or CLUSTERS, DTYPES):
        cluster = load_cluster(name)
        device = cluster.device
        if dtype not in device.flops_per_s:
            continue
        try:
            found = points(cluster, dtype)
        except InputError as error:
            raise SystemExit(str(error)) from None
        stored = device.efficiency_float8 if dtype == "float8" else device.efficiency
        efficiency = fit(cluster, found, dtype) if options.fit else stored or device.efficiency or A40_EFFICIENCY
        if options.fit:
            print("efficiency_float8:" if dtype == "float8" else "efficiency:")
            for field, value in efficiency.model_dump().items():
                print(f"  {field}: {value:.3g}" if isinstance(value, float) else f"  {field}: {value}")
        kernels = with_efficiency(cluster, efficiency, dtype)
        rows.append([f"{device.name} {dtype}"])
        for kind_points in found.values():
            sizes = np.abs(errors(kernels, kind_points))
            rows[-1].append(f"{np.median(sizes):.1%}, {np.quantile(sizes, 0.9):.1%}")
    columns = ["device", *(f"{kind}: median error, 90%" for kind in PARAMETERS)]
    claim = "Datasheet profiles differ from measured times of single operators by this much."
    record("fidelity/operators", claim, table(columns, rows))


if __name__ == "__main__":
    main()
