"""Compute the expected load of experts, and read their times from other projects' tables.

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
    """Return the probability that a token is routed to each expert, in falling order. The sum is `active`. # [experts]

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
    """Computes the load of a group's busiest device. Each device has `number / ep_degree` whole experts or slices.

    Experts are assigned to devices in turn, the likeliest first. Chance makes the loads still less equal. If there are
    r pairs of a token and its expert, the busiest of t devices has about sqrt(2 r (t - 1) ln t) / t more pairs than the
    mean. These pairs count as further tokens.
    """

    def __init__(self, experts: Experts, ep_degree: int = 1) -> None:
        self._of_token = float(experts.active)
        self._ep_degree = ep_degree
        self._chances = chances(experts)[::ep_degree]

    def unevenness(self, tokens: npt.ArrayLike) -> Array:
        """Return the factor by which chance gives the busiest device more work than the mean. # [n] -> [n]"""
        ep = self._ep_degree
        spread = np.sqrt(2 * (ep - 1) * np.log(ep) / (self._of_token * np.asarray(tokens, float)))
        return np.minimum(1 + spread, ep)

    def expected(self, tokens: float) -> tuple[Array, Array]:
        """Return, for each of the device's experts, the expected number of tokens and the probability of at least one
        token. # [experts] each
        """
        tokens = tokens * float(self.unevenness(tokens))
        missed = (1 - np.minimum(self._chances, 1 - 1e-12)) ** tokens
        return tokens * self._chances, 1 - missed


Rows = dict[str, npt.NDArray[Any]]
Curves = dict[tuple[int, int], tuple[str, Array, Array]]
"""Routing, and logarithms of tokens and of seconds, for each group of devices."""

STORED = {"fp8": "fp8", "fp8_block": "fp8_block", "mxfp4": "w4a16_mxfp4", "int4": "int4_wo", "int8": "int8_wo"}
STORED |= {"nvfp4": "nvfp4", "mxfp8": "fp8_block"}
"""The tables' name for each format of stored weights."""
DIVIDED = 0.9
"""Divided among devices, the experts must take at most this share of their time on one device, for the largest batch.
"""
FASTER = {"w4a16_mxfp4": ("w4a8_mxfp4_mxfp8",)}
"""Kernels for the same weights that round activations to eight bits, on devices that support this."""
SHARED_FROM = "trtllm"
"""A framework whose kernels other frameworks use through FlashInfer. Only its own tables contain them."""
EXPERT_COLUMNS = (
    *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
    *("moe_tp_size", "moe_ep_size", "distribution", "latency"),
)


class ExpertTable:
    """Computes the times of a model's experts on the busiest device of a group, including routing.

    Args:
        tables: tables of the kind of device and framework.
        width_in: width of the experts' input.
        dtype: the tables' name for the type of the products.
        rounds: whether activations are rounded to eight bits if the tables have kernels that do so.
    """

    def __init__(self, tables: Tables, width_in: int, experts: Experts, dtype: str, *, rounds: bool = False) -> None:
        self._tables, self._hidden, self._experts, self._dtype = tables, width_in, experts, dtype
        self._rounds = rounds

    @cached_property
    def _held(self) -> Curves:
        """The curves of each group: routing, and logarithms of tokens and of seconds. They are from the table of the
        nearest version that contains the experts.
        """
        faster = FASTER.get(self._dtype, ()) if self._rounds else ()
        found = self._of(self._tables.paths("moe", "moe"), faster) if faster else {}
        if faster and not found:
            found = self._of(self._tables.paths("moe", "moe", SHARED_FROM), faster)
        return self._of(self._tables.paths("moe", "moe"), (self._dtype,)) | found

    def _of(self, paths: Sequence[Path], kernels: Sequence[str]) -> Curves:
        """Return routing, tokens and seconds of each group for these kernels, from the first table that contains the
        kernels."""
        experts = self._experts
        wanted = (("hidden_size", self._hidden), ("inter_size", experts.ffn_size), ("topk", experts.active))
        found: Curves = {}
        for path in paths:
            rows = self._tables.read(path, EXPERT_COLUMNS)
            chosen = np.isin(rows["moe_dtype"].astype(str), kernels) & (rows["num_experts"] == experts.number)
            for name, value in wanted:
                chosen &= rows[name] == value
            routing = _distribution(experts, set(rows["distribution"][chosen].tolist()))
            if routing is None:
                continue
            chosen &= rows["distribution"] == routing
            curves = _of_groups({name: column[chosen] for name, column in rows.items()})
            if curves.keys() - found.keys():
                self._tables.note("moe", path)
            found = {group: (routing, *curve) for group, curve in curves.items()} | found
        return found

    @property
    def groups(self) -> set[tuple[int, int]]:
        """Pairs of a group's number of devices and the number of parts into which they divide the experts."""
        return set(self._held)

    def most_tokens(self, t: int, ep: int) -> float:
        """Return the largest number of tokens that was measured on a group of `t` devices."""
        return float(np.exp(self._held[t, ep][1][-1]))

    def seconds(self, tokens: Array, t: int, ep: int) -> Array:
        """Return the seconds in which numbers of tokens are processed, if each token chooses its experts independently.
        # [n] -> [n]

        In tables with balanced routing, tokens were assigned to experts in turn. The devices then had equal loads, and
        more experts were used than with random choices.
        """
        routing, points, seconds = self._held[t, ep]

        def at(n: Array) -> Array:
            return np.exp(interpolate(np.log(n), points, seconds))

        if routing != "balanced":
            return at(tokens)
        number, active = self._experts.number, self._experts.active
        busiest = tokens * Routing(self._experts, ep).unevenness(tokens)
        in_turn = np.minimum(busiest, number / active)
        met = number / active * (1 - (1 - active / number) ** busiest) if active < number else in_turn
        return at(busiest) - at(in_turn) + at(np.minimum(met, in_turn))


def _of_groups(rows: Rows) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Return logarithms of tokens and of seconds for each group. Only the fastest measured kernel counts.

    Two kinds of groups are left out: groups with only a few points, and groups with impossible times. A time is
    impossible if divided experts took as long as all experts on one device, or if narrower slices took longer than
    wider ones.
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
    """Return the measured distribution of tokens that is nearest to the model's, or None if there is none."""
    exponents = {name: float(name.removeprefix("power_law_")) for name in kinds if name.startswith("power_law_")}
    if "balanced" in kinds:
        exponents["balanced"] = 0.0
    return min(exponents, key=lambda name: abs(exponents[name] - experts.skew), default=None)


def stored_as(quantization: Quantization | None, dtype: str) -> str:
    """Return the tables' name for the type of products with these weights."""
    return dtype if quantization is None else STORED[quantization.kind]
