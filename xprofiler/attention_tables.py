"""Read the times of latent, sparse and linear attention from other projects' tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import Attention, Recurrent, Surface
from xprofiler import analytic
from xprofiler.tables import Tables, surface_of

Array = npt.NDArray[np.float64]
Rows = dict[str, npt.NDArray[Any]]
Shapes = Sequence[tuple[float, float]]

MODULE_COLUMNS = ("num_heads", "kv_cache_dtype", "gemm_type", "batch_size", "isl", "step", "latency")
KERNEL_COLUMNS = ("num_heads", "kv_cache_dtype", "batch_size", "isl", "step", "latency")
PHASES = ("context", "generation")
LINEAR_COLUMNS = (
    *("phase", "batch_size", "seq_len", "model_name", "latency"),
    *("d_model", "num_v_heads", "head_k_dim", "head_v_dim"),
)
DENSE_SIZES = (512, 1536, 64, 128, 192)
"""Sizes of latent attention in the tables (DeepSeek-V3's): the ranks of K/V and of the query, then the widths of a
head's rotated part, value and query."""
SPARSE_MODELS: Mapping[tuple[int | None, ...], str] = {
    DENSE_SIZES: "DeepseekV32ForCausalLM",
    (512, 2048, 64, 256, 256): "GlmMoeDsaForCausalLM",
}
"""The tables' names of models with sparse latent attention, by the same sizes."""
LONGEST = 2**20


def latent_attention(
    tables: Tables, hidden: int, attention: Attention, t: int, dtype: str, slower: float
) -> tuple[Surface, Surface, Shapes] | None:
    """Return the seconds of latent attention on one of t devices, for prompts and for decode. The third item lists the
    sizes (n, k) of the projections that these times do not include. Return None if no table has this attention.
    """
    latent, heads = attention.latent, attention.num_heads // t
    assert latent is not None
    sizes = (latent.kv_rank, latent.q_rank, latent.rope_head_dim, latent.value_head_dim, attention.head_dim)
    if attention.indexer is not None:
        model = SPARSE_MODELS.get(sizes)
        if model is None or not tables.has("sparse_attention", "dsa_context_module"):
            return None
        operation = "_skip_indexer" if attention.indexer.is_shared else ""
        return *_modules(tables, ("sparse_attention", "dsa"), heads, dtype, slower, model, operation), ()
    if sizes != DENSE_SIZES:
        return None
    if all(tables.has("mla", f"mla_{phase}_module") for phase in PHASES):
        return *_modules(tables, ("mla", "mla"), heads, dtype, slower), ()
    if not all(tables.has("mla", f"{phase}_mla") for phase in PHASES):
        return None
    encode, decode = (_kernel(tables, phase, heads, slower) for phase in PHASES)
    shapes = (
        ((latent.q_rank or 0) + latent.kept_per_token, hidden),
        (heads * attention.head_dim, latent.q_rank or hidden),
        (heads * (attention.head_dim - latent.rope_head_dim + latent.value_head_dim), latent.kv_rank),
        (hidden, heads * latent.value_head_dim),
    )
    return encode, decode, shapes


def _modules(
    tables: Tables,
    names: tuple[str, str],
    heads: int,
    dtype: str,
    slower: float,
    model: str | None = None,
    operation: str = "",
) -> tuple[Surface, Surface]:
    found, (family, name) = [], names
    for phase in PHASES:
        operator = f"{name}_{phase}_module"
        path = tables.paths(family, operator)[0]
        rows = tables.read(path, MODULE_COLUMNS, ("op_name", "architecture"))
        chosen = rows["num_heads"] == heads
        if model is not None:
            chosen &= (rows["architecture"] == model) & (rows["op_name"] == operator + operation)
        if phase == "context":
            chosen &= rows["step"] == 0
        of_type = chosen & (rows["gemm_type"] == dtype) & (rows["kv_cache_dtype"] == tables.kv_dtype)
        if not of_type.any():
            kinds = sorted(set(zip(rows["gemm_type"].tolist(), rows["kv_cache_dtype"].tolist(), strict=True)))
            known = ", ".join(f"{weights} with K/V in {kv}" for weights, kv in kinds)
            says = f"the tables have latent attention only in {known}"
            raise InputError("dtype", f"{dtype} with K/V in {tables.kv_dtype}", says)
        tables.note(operator, path)
        found.append(_fastest(rows, of_type, (slower if phase == "context" else 1.0) / 1e3))
    return found[0], found[1]


def _kernel(tables: Tables, phase: str, heads: int, slower: float) -> Surface:
    path = tables.paths("mla", f"{phase}_mla")[0]
    rows = tables.read(path, KERNEL_COLUMNS)
    chosen = (rows["num_heads"] == heads) & (rows["kv_cache_dtype"] == tables.kv_dtype)
    if not chosen.any():
        says = f"the tables have no latent attention of {heads} heads with K/V in this type"
        raise InputError("dtype", tables.kv_dtype, says)
    tables.note(f"{phase}_mla", path)
    return _fastest(rows, chosen, (slower if phase == "context" else 1.0) / 1e3)


def _fastest(rows: Rows, chosen: npt.NDArray[np.bool_], factor: float) -> Surface:
    """Return the surface through the chosen rows of a table. If a point has several kernels, the fastest counts."""
    latency = rows["latency"][chosen]
    order = np.argsort(latency)[::-1]
    length = (rows["isl"] + rows["step"])[chosen]
    return surface_of(rows["batch_size"][chosen][order], length[order], latency[order] * factor)


def recurrence(
    tables: Tables, kernels: analytic.Kernels, hidden: int, recurrent: Recurrent, t: int, slower: float
) -> tuple[Surface, Surface]:
    """Return a recurrent block's seconds on one of t devices, for prompts and for decode. Times of gated delta nets
    come from the tables, those of other blocks from the datasheet.
    """
    found = _delta_nets(tables, hidden, recurrent, t)
    if found is None:
        tables.provenance["recurrence"] = "datasheet: no table has this kind"
        return (
            analytic.surface(lambda b, length: kernels.recurrence(b, length, recurrent, t)),
            analytic.surface(lambda b, _: kernels.recurrence(b, 1, recurrent, t)),
        )
    batch, length, seconds = found["context"]
    encode = surface_of(batch, length, slower * seconds)
    batch, length, seconds = found["generation"]
    longer = np.full_like(length, LONGEST)
    decode = surface_of(np.append(batch, batch), np.append(length, longer), np.append(seconds, seconds))
    return encode, decode


def _delta_nets(
    tables: Tables, hidden: int, recurrent: Recurrent, t: int
) -> dict[str, tuple[Array, Array, Array]] | None:
    """Return the batch sizes, lengths and seconds of a gated delta net's kernels, by phase."""
    if not tables.has("linear_attention", "gdn") or recurrent.num_heads % t:
        return None
    path, heads = tables.paths("linear_attention", "gdn")[0], recurrent.num_heads // t
    rows = tables.read(path, LINEAR_COLUMNS)
    state = rows["num_v_heads"] * rows["head_k_dim"] * rows["head_v_dim"]
    chosen = (rows["d_model"] == hidden) & (rows["num_v_heads"] == heads) & (state == recurrent.state_elements // t)
    models = [
        name
        for name in sorted(set(rows["model_name"][chosen].tolist()))
        if rows["num_v_heads"][(rows["model_name"] == name) & (rows["d_model"] == hidden)].max() == recurrent.num_heads
    ]
    if not models:
        return None
    tables.note("gdn", path)
    chosen &= rows["model_name"] == models[0]
    found = {}
    for phase in PHASES:
        of_phase = chosen & (rows["phase"] == phase)
        pairs = np.stack([rows["batch_size"][of_phase], rows["seq_len"][of_phase]], axis=1)
        points, place = np.unique(pairs, axis=0, return_inverse=True)
        seconds = np.zeros(len(points))
        np.add.at(seconds, place.reshape(-1), rows["latency"][of_phase] / 1e3)  # the convolution, and the recurrence
        found[phase] = (points[:, 0], points[:, 1], seconds)
    return found


def within_window(surface: Surface, window: int | None, *, prompts: bool) -> Surface:
    """Convert times of attention without a window to times with a sliding window.

    Decode over a context longer than the window takes as long as at the window's length. Each prompt token beyond the
    window takes as long as the last token within it.
    """
    if window is None:
        return surface
    lengths = np.asarray(surface.lengths, float)

    def of_batch(row: tuple[float, ...]) -> tuple[float, ...]:
        seconds = np.asarray(row)
        at_window = np.interp(window, lengths, seconds)
        beyond = at_window * (1 + 2 * (lengths - window) / window) if prompts else np.full_like(lengths, at_window)
        return tuple(np.where(lengths <= window, seconds, np.minimum(beyond, seconds)).tolist())

    return surface.but(seconds=tuple(map(of_batch, surface.seconds)))
