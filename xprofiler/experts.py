"""Compute the expected load of each expert, and read the times of experts from other projects' tables.

A step reads the weights of only those experts to which at least one token is routed. If a group's devices hold
different experts, the busiest device determines the group's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Experts, Quantization
from xprofiler.tables import Tables, interpolate

Array = npt.NDArray[np.float64]


def chances(experts: Experts) -> Array:
    """Return each expert's probability that a token is routed to it, in descending order. # [experts]

    The experts' shares are quantiles of the power law x ** -skew between 1 and the number of experts. No probability
    exceeds 1.
    """
    number, active = experts.number, experts.active
    if not experts.skew:
        return np.full(number, active / number)
    share = 1 - (np.arange(number) + 0.5) / number
    power = 1 - experts.skew
    shares = number**share if abs(power) < 1e-9 else (1 + share * (number**power - 1)) ** (1 / power)
    found = active * shares / shares.sum()
    for _ in range(number):  # probability above one is distributed among the other experts
        over = found > 1
        if not over.any():
            break
        rest = ~over & (found < 1)
        found[over] = 1
        found[rest] *= (active - (~rest).sum()) / found[rest].sum()
    return found


class Routing:
    """Computes the load of a group's busiest device. Each device has `number / ep_degree` experts, or slices of them.

    Experts are assigned to devices in turn, the likeliest first. Random choices add to the imbalance: if tokens choose
    r experts in all, the busiest of t devices gets about sqrt(2 r (t - 1) ln t) / t more of these choices than the
    mean.
    """

    def __init__(self, experts: Experts, ep_degree: int = 1) -> None:
        self._of_token = float(experts.active)
        self._ep_degree = ep_degree
        self._chances = chances(experts)[::ep_degree]

    def unevenness(self, tokens: npt.ArrayLike) -> Array:
        """Return the busiest device's expected load divided by the mean load, due to random choices. # [n] -> [n]"""
        ep = self._ep_degree
        spread = np.sqrt(2 * (ep - 1) * np.log(ep) / (self._of_token * np.asarray(tokens, float)))
        return np.minimum(1 + spread, ep)

    def expected(self, tokens: float) -> tuple[Array, Array]:
        """Return two arrays for the busiest device's experts: the expected number of tokens, and the probability of at
        least one. # [experts] each
        """
        tokens = tokens * float(self.unevenness(tokens))
        missed = (1 - np.minimum(self._chances, 1 - 1e-12)) ** tokens
        return tokens * self._chances, 1 - missed


Rows = dict[str, npt.NDArray[Any]]
Curves = dict[tuple[int, int], tuple[str, Array, Array]]
"""For each group (devices, expert-parallel degree): the distribution of tokens, and logarithms of numbers of tokens and
of seconds.
"""

STORED = {"fp8": "fp8", "fp8_block": "fp8_block", "mxfp4": "w4a16_mxfp4", "int4": "int4_wo", "int8": "int8_wo"}
STORED |= {"nvfp4": "nvfp4", "mxfp8": "fp8_block"}
DIVIDED = 0.9
"""At the largest number of tokens, experts divided among devices must take at most this share of their time on one
device.
"""
FASTER = {"w4a16_mxfp4": ("w4a8_mxfp4_mxfp8",)}
"""Kernels for the same weights that round activations to eight bits, on devices that support this."""
SHARED_FROM = "trtllm"
"""A framework whose kernels other frameworks use through FlashInfer. Only its own tables contain them."""
SHAPE = ("hidden_size", "inter_size", "topk", "num_experts")
EXPERT_COLUMNS = ("moe_dtype", "num_tokens", *SHAPE, "moe_tp_size", "moe_ep_size", "distribution", "latency")


class ExpertTable:
    """Computes the times of a model's experts, including routing, on a group's busiest device."""

    def __init__(self, tables: Tables, width_in: int, experts: Experts, dtype: str, *, rounds: bool = False) -> None:
        self._tables, self.width_in, self.experts, self._dtype = tables, width_in, experts, dtype
        self._rounds = rounds

    @cached_property
    def _held(self) -> Curves:
        faster = FASTER.get(self._dtype, ()) if self._rounds else ()
        found = self._of(self._tables.paths("moe", "moe"), faster) if faster else {}
        if faster and not found:
            found = self._of(self._tables.paths("moe", "moe", SHARED_FROM), faster)
        return self._of(self._tables.paths("moe", "moe"), (self._dtype,)) | found

    def _of(self, paths: Sequence[Path], kernels: Sequence[str]) -> Curves:
        """Return the times of the first table with each group. If a later table has the same kernel, the shorter times
        count, as within a table: whoever measured the longer ones lacked the kernel's sizes for this device.
        """
        experts = self.experts
        found, sources = Curves(), dict[tuple[int, int], tuple[str, ...]]()
        for path in paths:
            rows = self._tables.read(path, EXPERT_COLUMNS, ("kernel_source",))
            chosen = np.isin(rows["moe_dtype"].astype(str), kernels)
            for name, value in zip(SHAPE, self._shape, strict=True):
                chosen &= rows[name] == value
            routing = _distribution(experts, set(rows["distribution"][chosen].tolist()))
            if routing is None:
                continue
            chosen &= rows["distribution"] == routing
            source = routing, *sorted(set(rows.get("kernel_source", np.asarray([str(path)] * len(chosen)))[chosen]))
            for group, (points, seconds) in _of_groups({name: column[chosen] for name, column in rows.items()}).items():
                if group not in found:
                    found[group], sources[group] = (routing, points, seconds), source
                    self._tables.note("moe", path)
                elif sources[group] == source:
                    _, own, known = found[group]
                    inside = (own >= points[0]) & (own <= points[-1])
                    shorter = np.minimum(known, np.interp(own, points, seconds))
                    found[group] = routing, own, np.where(inside, shorter, known)
        return found

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.width_in, self.experts.ffn_size, self.experts.active, self.experts.number

    @property
    def groups(self) -> set[tuple[int, int]]:
        return set(self._held)

    @cached_property
    def nearest(self) -> ExpertTable:
        """This table, or if the shape was not measured, that of the shape in this type whose sizes have the nearest
        logarithms. Scaled by the ratio of rooflines, it is 8 to 15% off where the roofline alone is 27 to 51% too fast
        (medians over 1,048 groups of measured shapes of which each was left out in turn).
        """
        if self.groups:
            return self
        for shape in sorted(
            shapes_of(self._tables, self._dtype), key=lambda shape: np.abs(np.log(np.divide(shape, self._shape))).sum()
        ):
            width_in, width, active, number = shape
            experts = Experts(number=number, active=active, ffn_size=width, skew=self.experts.skew)
            table = ExpertTable(self._tables, width_in, experts, self._dtype)
            if table.groups:
                return table
        return self

    def most_tokens(self, t: int, ep: int) -> float:
        return float(np.exp(self._held[t, ep][1][-1]))

    def seconds(self, tokens: Array, t: int, ep: int) -> Array:
        """Return the seconds for numbers of tokens, each of which chooses its experts independently. # [n] -> [n]

        In tables with balanced routing, devices had equal loads, and more experts were used than with random choices.
        The result corrects for both.
        """
        routing, points, seconds = self._held[t, ep]

        def at(n: Array) -> Array:
            return np.exp(interpolate(np.log(n), points, seconds))

        if routing != "balanced":
            return at(tokens)
        number, active = self.experts.number, self.experts.active
        busiest = tokens * Routing(self.experts, ep).unevenness(tokens)
        in_turn = np.minimum(busiest, number / active)
        met = number / active * (1 - (1 - active / number) ** busiest) if active < number else in_turn
        return at(busiest) - at(in_turn) + at(np.minimum(met, in_turn))


def shapes_of(tables: Tables, dtype: str) -> set[tuple[int, ...]]:
    """Return the shapes (`SHAPE`) of experts that the tables have in a type."""
    shapes = set[tuple[int, ...]]()
    for path in tables.paths("moe", "moe"):
        rows = tables.read(path, EXPERT_COLUMNS)
        chosen = rows["moe_dtype"].astype(str) == dtype
        shapes |= set(zip(*(rows[name][chosen].tolist() for name in SHAPE), strict=True))
    return shapes


def _of_groups(rows: Rows) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Return the logarithms of tokens and seconds for each group.

    Groups with few points are left out, as are groups with impossible times: divided experts that took almost as long
    as all experts on one device, or narrower slices that took longer than wider ones.
    """
    found: dict[tuple[int, int], tuple[Array, Array]] = {}
    usual = len(np.unique(rows["num_tokens"]))
    for slices, ep in sorted(set(zip(rows["moe_tp_size"].tolist(), rows["moe_ep_size"].tolist(), strict=True))):
        chosen = (rows["moe_tp_size"] == slices) & (rows["moe_ep_size"] == ep)
        points, place = np.unique(rows["num_tokens"][chosen], return_inverse=True)
        latency = np.full(len(points), np.inf)
        np.minimum.at(latency, place, rows["latency"][chosen])
        curve = np.log(points), np.log(latency / 1e3)
        coarser = [(found.get((slices, 1)), DIVIDED)] if ep > 1 else []
        coarser += [(found.get((slices // 2 * ep, ep)), 1.0)] if slices % 2 == 0 else []
        is_divided = all(coarse is None or curve[1][-1] < coarse[1][-1] + np.log(most) for coarse, most in coarser)
        if is_divided and 2 * len(points) >= usual:
            found[slices * ep, ep] = curve
    return found


def _distribution(experts: Experts, kinds: set[str]) -> str | None:
    exponents = {name: float(name.removeprefix("power_law_")) for name in kinds if name.startswith("power_law_")}
    if "balanced" in kinds:
        exponents["balanced"] = 0.0
    return min(exponents, key=lambda name: abs(exponents[name] - experts.skew), default=None)


def stored_as(quantization: Quantization | None, dtype: str) -> str:
    return dtype if quantization is None else STORED[quantization.kind]
