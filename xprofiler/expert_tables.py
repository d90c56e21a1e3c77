"""Read experts and latent attention from others' tables, for `imported`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.errors import InputError
from xgpt.schema import Experts, ModelSpec, Quantization, Surface
from xprofiler.experts import Routing
from xprofiler.tables import Tables, interpolate, surface_of

Array = npt.NDArray[np.float64]
Rows = dict[str, npt.NDArray[Any]]

STORED = {"fp8": "fp8", "fp8_block": "fp8_block", "mxfp4": "w4a16_mxfp4", "int4": "int4_wo", "int8": "int8_wo"}
"""What the tables call a format of stored weights."""
FASTER = {"w4a16_mxfp4": ("w4a8_mxfp4_mxfp8",)}
"""Kernels of the same weights that round activations to eight bits, where a kind of device has them."""
EXPERT_COLUMNS = (
    *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
    *("moe_tp_size", "moe_ep_size", "distribution", "latency"),
)
LATENT_COLUMNS = ("num_heads", "kv_cache_dtype", "gemm_type", "batch_size", "isl", "step", "latency")
TABLE_RANKS = (512, 1536, 64, 128, 192)
"""Of the only latent attention that was measured, DeepSeek-V3's: K/V's rank, the query's, and widths of a head's
rotated part, its value and its query."""


class ExpertTable:
    """Grouped products of a model's experts on the busiest device of a group, routing included.

    Args:
        tables: of the kind of device and framework.
        dtype: what the tables call the products' type.
    """

    def __init__(self, tables: Tables, spec: ModelSpec, dtype: str) -> None:
        assert spec.experts is not None
        self._tables, self._hidden, self._experts, self._dtype = tables, spec.hidden_size, spec.experts, dtype
        self._distribution: str | None = None

    @cached_property
    def rows(self) -> Rows | None:
        """Of these experts in this type, from the newest version that has any; None: no version has."""
        tables, of = self._tables, self._experts
        wanted = (("hidden_size", self._hidden), ("inter_size", of.ffn_size), ("topk", of.active))
        for path in tables.paths("moe", "moe"):
            rows = tables.read(path, EXPERT_COLUMNS)
            kernels = (self._dtype, *FASTER.get(self._dtype, ()))
            chosen = np.isin(rows["moe_dtype"].astype(str), kernels) & (rows["num_experts"] == of.number)
            for name, value in wanted:
                chosen &= rows[name] == value
            self._distribution = _distribution(of, set(rows["distribution"][chosen].tolist()))
            chosen &= rows["distribution"] == self._distribution
            if chosen.any():
                tables.note("moe", path)
                return {name: column[chosen] for name, column in rows.items()}
        return None

    @property
    def groups(self) -> set[tuple[int, int]]:
        """Pairs of the devices of a group and the parts into which they divide the experts."""
        if self.rows is None:
            return set()
        slices, parts = self.rows["moe_tp_size"].tolist(), self.rows["moe_ep_size"].tolist()
        return {(a * b, b) for a, b in zip(slices, parts, strict=True)}

    def seconds(self, tokens: Array, t: int, ep: int) -> Array:
        """Return what tokens take that choose their experts independently of each other. # [n] -> [n]

        Balanced tables deal tokens to experts in turn: that evens out devices, and meets more experts than chance does.
        """
        if self._distribution != "balanced":
            return self._at(tokens, t, ep)
        number, active = self._experts.number, self._experts.active
        busiest = tokens * Routing(self._experts, ep).unevenness(tokens)
        in_turn = np.minimum(busiest, number / active)
        met = number / active * (1 - (1 - active / number) ** busiest) if active < number else in_turn
        return self._at(busiest, t, ep) - self._at(in_turn, t, ep) + self._at(np.minimum(met, in_turn), t, ep)

    def _at(self, tokens: Array, t: int, ep: int) -> Array:
        assert self.rows is not None
        chosen = (self.rows["moe_tp_size"] == t // ep) & (self.rows["moe_ep_size"] == ep)
        points, place = np.unique(self.rows["num_tokens"][chosen], return_inverse=True)
        latency = np.full(len(points), np.inf)
        np.minimum.at(latency, place, self.rows["latency"][chosen])  # of several kernels, the fastest
        return np.exp(interpolate(np.log(tokens), np.log(points), np.log(latency))) / 1e3


def _distribution(experts: Experts, held: set[str]) -> str | None:
    """The routing that was measured and is nearest to a model's; None: there is none."""
    exponents = {name: float(name.removeprefix("power_law_")) for name in held if name.startswith("power_law_")}
    if "balanced" in held:
        exponents["balanced"] = 0.0
    return min(exponents, key=lambda name: abs(exponents[name] - experts.skew), default=None)


def latent_attention(
    tables: Tables, spec: ModelSpec, heads: int, stored: str, slower: float
) -> tuple[Surface, Surface]:
    """Return the whole of latent attention, projections included: of prompts and of decode.

    Raises:
        InputError: these ranks were not measured, or not with this number of heads.
    """
    assert spec.latent is not None
    latent = spec.latent
    ranks = (latent.kv_rank, latent.q_rank, latent.rope_head_dim, latent.value_head_dim, spec.head_dim)
    if ranks != TABLE_RANKS:
        raise InputError("model.latent", spec.name, "the tables hold DeepSeek-V3's latent attention alone")
    found = []
    for phase, factor in (("context", slower), ("generation", 1.0)):
        path = tables.paths("mla", f"mla_{phase}_module")[0]
        rows = tables.read(path, LATENT_COLUMNS)
        chosen = (rows["num_heads"] == heads) & (rows["gemm_type"] == stored)
        chosen &= rows["kv_cache_dtype"] == tables.kv_dtype
        if not chosen.any():
            held = sorted(set(zip(rows["gemm_type"].tolist(), rows["kv_cache_dtype"].tolist(), strict=True)))
            known = ", ".join(f"{weights} with K/V in {kv}" for weights, kv in held)
            raise InputError(
                "dtype", f"{stored} with K/V in {tables.kv_dtype}", f"latent attention is there in {known}"
            )
        tables.note(f"mla_{phase}_module", path)
        length = (rows["isl"] + rows["step"])[chosen]
        found.append(surface_of(rows["batch_size"][chosen], length, rows["latency"][chosen] * factor / 1e3))
    return found[0], found[1]


def stored_as(quantization: Quantization | None, dtype: str) -> str:
    """Return what the tables call the type of products with these weights."""
    return dtype if quantization is None else STORED[quantization.kind]


def within_window(surface: Surface, spec: ModelSpec, *, prompts: bool) -> Surface:
    """Return the mean over a model's layers, of which some see the last tokens alone, from times of those that see all.

    Beyond the window a decode costs no more; a prompt's tokens cost what those at the window's end do.
    """
    if (window := spec.sliding_window) is None:
        return surface
    full = len(spec.full_attention_layers) / spec.num_layers
    lengths = np.asarray(surface.lengths, float)

    def of_batch(row: tuple[float, ...]) -> tuple[float, ...]:
        seconds = np.asarray(row)
        at_window = np.interp(window, lengths, seconds)
        beyond = at_window * (1 + 2 * (lengths - window) / window) if prompts else np.full_like(lengths, at_window)
        inside = np.where(lengths <= window, seconds, np.minimum(beyond, seconds))
        return tuple((full * seconds + (1 - full) * inside).tolist())

    return surface.model_copy(update={"seconds": tuple(map(of_batch, surface.seconds))})
