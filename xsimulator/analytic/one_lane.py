"""Closed forms of the single-lane policies on one device, at saturation, vectorised over candidates.

Assumptions: requests always wait; input and output lengths are independent; step costs are charged at the mean
composition of each iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from xgpt.schema import SingleLaneSettings
from xsimulator.cost import Array, CostModel
from xsimulator.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Performance:
    """Predictions for a vector of candidates, one entry each.

    Attributes:
        throughput: requests a second.
        latency: from admission to the last token of a request whose output has the quantile's length, s.
        ttft: from admission to the first token, s.
        tpot: mean gap between that request's tokens, s.
        itl_p99: 99th percentile of all gaps between tokens, s.
        encode_batch: mean requests in a step that encodes.
        encode_tokens: mean prompt tokens in a step that encodes.
        decode_batch: requests in decode (rra, static: at a phase's start).
        peak_requests: requests that hold K/V at once.
        peak_tokens: tokens of the largest step.
        cycle: from one encode step to the next, s.
    """

    throughput: Array
    latency: Array
    ttft: Array
    tpot: Array
    itl_p99: Array
    encode_batch: Array
    encode_tokens: Array
    decode_batch: Array
    peak_requests: Array
    peak_tokens: Array
    cycle: Array

    def at(self, index: int) -> dict[str, float]:
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


def _stack(size: int, parts: list[tuple[Any, Performance]]) -> Performance:
    columns = {}
    for field in fields(Performance):
        column = np.empty(size)
        for where, part in parts:
            column[where] = getattr(part, field.name)
        columns[field.name] = column
    return Performance(**columns)


def _upper_deviate(share: Array) -> Array:
    """Standard normal deviate of the 99th percentile of all gaps within the longest `share` of them, at most 2.33."""
    return ndtri(np.clip(1 - 0.01 / np.maximum(share, 1e-9), 0.02, 0.99))


class OneLaneModel:
    """Predicts rra, orca, chunked and static for one model, device and workload.

    Args:
        quantile: of the output length, for which latency is reported.
    """

    def __init__(self, cost: CostModel, lengths: Lengths, quantile: float = 0.99) -> None:
        self.cost = cost
        self.lengths = lengths
        self.quantile_decodes = lengths.decodes_at(quantile)
        self._encode_attention = cost.encode_attention(lengths.inputs, lengths.input_probabilities)

    def evaluate(self, kind: str, **columns: npt.ArrayLike) -> Performance:
        """Predict candidates of one policy; `columns` are its control variables, one entry a candidate."""
        values = {name: np.atleast_1d(np.asarray(column, float)) for name, column in columns.items()}
        if kind == "rra":
            return self._rra(values["encode_batch"], values["decode_iterations"].astype(int))
        if kind == "static":
            return self._static(values["batch"])
        unlimited = np.full_like(values["max_batch"], np.inf)
        return self._mixed(values["max_batch"], values.get("token_budget", unlimited))

    def estimate(self, settings: SingleLaneSettings) -> dict[str, float]:
        """Predict one plan's settings."""
        columns = {variable.name: getattr(settings, variable.name) for variable in settings.variables}
        return self.evaluate(settings.kind, **columns).at(0)

    # Steps ---------------------------------------------------------------------------------------------------

    def _encode_seconds(self, requests: Array, tokens: Array) -> Array:
        """A step that encodes whole prompts and nothing else."""
        cost = self.cost
        attention = requests * self._encode_attention(requests)
        return cost.tokens(tokens) + attention + cost.head(requests) + cost.overhead(requests)

    def _decode_seconds(self, batch: Array, context: npt.ArrayLike) -> Array:
        """A step that decodes and nothing else."""
        cost = self.cost
        return cost.tokens(batch) + cost.decode_attention(batch, context) + cost.head(batch) + cost.overhead(batch)

    def _most_tokens(self, requests: Array) -> Array:
        """Prompt tokens of so many requests at once, hardly ever exceeded (four standard deviations)."""
        lengths = self.lengths
        variance = lengths.mean_square_input - lengths.mean_input**2
        return np.minimum(
            requests * lengths.mean_input + 4 * np.sqrt(requests * variance), requests * lengths.max_input
        )

    # Policies ------------------------------------------------------------------------------------------------

    def _rra(self, encode_batch: Array, decode_iterations: npt.NDArray[np.int_]) -> Performance:
        parts = []
        for iterations in np.unique(decode_iterations):
            where = np.flatnonzero(decode_iterations == iterations)
            parts.append((where, self._rra_at(encode_batch[where], int(iterations))))
        return _stack(len(encode_batch), parts)

    def _rra_at(self, encode_batch: Array, n: int) -> Performance:
        """One N_D: the cohorts of k phases ago decode together; T = te + sum of the phase's iterations.

        Source: ExeGPT sec. 6 with the exact steady state; latency is exact for a steady decode batch.
        """
        survival = self.lengths.survival
        num_cohorts = -(-len(survival) // n)
        padded = np.zeros(num_cohorts * n)
        padded[: len(survival)] = survival
        cohorts = padded.reshape(num_cohorts, n)  # [cohort, iteration of the phase]
        share = cohorts.sum(axis=0)  # decode batch of each iteration, per request encoded
        ages = np.arange(1, num_cohorts * n + 1).reshape(num_cohorts, n)
        context = self.lengths.mean_input + (cohorts * ages).sum(axis=0) / np.maximum(share, 1e-300)

        tokens = encode_batch * self.lengths.mean_input
        te = self._encode_seconds(encode_batch, tokens)
        # A phase ends early where nobody is left in decode: P(somebody is), and the batch given that, at most its peak.
        with np.errstate(divide="ignore"):
            nobody = np.log1p(-np.minimum(cohorts, 1.0)).sum(axis=0)
        running = np.maximum(-np.expm1(np.outer(encode_batch, nobody)), share / max(share[0], 1e-300))
        batch = np.outer(encode_batch, share) / np.maximum(running, 1e-300)
        td = self._decode_seconds(batch, context)  # [candidate, iteration]
        cycle = te + (running * td).sum(axis=1)
        elapsed = np.cumsum(td, axis=1)

        decodes = self.quantile_decodes
        num_phases = -(-decodes // n)
        rest = decodes - (num_phases - 1) * n  # iterations in the last phase
        decoding = (num_phases - 1) * (te + elapsed[:, -1]) + elapsed[:, rest - 1] if decodes else np.zeros_like(te)

        # The rule carries up to half a prompt from phase to phase, so a phase's tokens vary by this much around
        # their mean; a request meets a large phase more often than a small one.
        sd_tokens = np.sqrt(self.lengths.mean_square_input / 6)
        met_tokens = tokens + sd_tokens**2 / tokens
        met_te = self._encode_seconds(encode_batch * met_tokens / tokens, met_tokens)

        # Gaps that span an encode phase: one for each phase after a request's first.
        boundary = np.full_like(te, cohorts[1:, 0].sum() / max(self.lengths.mean_decodes, 1e-300))
        long_tokens = tokens + _upper_deviate(boundary) * sd_tokens
        long_te = self._encode_seconds(encode_batch * long_tokens / tokens, long_tokens)
        return Performance(
            throughput=encode_batch / cycle,
            latency=met_te + decoding,
            ttft=met_te,
            tpot=decoding / max(decodes, 1),
            itl_p99=np.where(boundary > 0.01, long_te + td[:, 0], td.max(axis=1)),
            encode_batch=encode_batch,
            encode_tokens=tokens,
            decode_batch=encode_batch * share[0],
            peak_requests=encode_batch * max(share[0], 1.0),
            peak_tokens=1.1 * tokens + self.lengths.max_input,
            cycle=cycle,
        )

    def _static(self, batch: Array) -> Performance:
        """A batch is encoded, then decodes at full size until its longest member ends.

        Source: ExeGPT sec. 2 (FasterTransformer: no early termination).
        """
        survival = self.lengths.survival
        tokens = batch * self.lengths.mean_input
        te = self._encode_seconds(batch, tokens)
        times = np.arange(1, len(survival) + 1)
        td = self._decode_seconds(batch[:, None], self.lengths.mean_input + times)  # [candidate, iteration]
        still_running = 1 - (1 - survival) ** batch[:, None]
        cycle = te + (td * still_running).sum(axis=1)
        decodes = self.quantile_decodes
        decoding = td[:, :decodes].sum(axis=1)
        return Performance(
            throughput=batch / cycle,
            latency=te + decoding,
            ttft=te,
            tpot=decoding / max(decodes, 1),
            itl_p99=td.max(axis=1),
            encode_batch=batch,
            encode_tokens=tokens,
            decode_batch=batch,
            peak_requests=batch,
            peak_tokens=self._most_tokens(batch),
            cycle=cycle,
        )

    def _mixed(self, max_batch: Array, budget: Array) -> Performance:
        """Steps that decode everything and encode into free slots: orca (no budget) and chunked.

        The slots form a closed queueing network: a slot decodes D steps, then its next prompt passes a station
        that takes budget - b tokens a step. With x prompts a step, b = x E[D] and load rho = x E[I]/(budget - b),

            max_batch = x (E[D] + W(rho)),   W = 1 / (1 - exp(-1/y)),   y = (E[I] + wait) / (budget - b),

        where W rounds a stay of mean y up to whole steps and the wait is Pollaczek-Khinchine's. The left side
        rises with x, so bisection finds the one root; without a budget it is x = max_batch / (E[D] + 1).
        """
        lengths = self.lengths
        mean_decodes, mean_input = lengths.mean_decodes, lengths.mean_input
        others = (max_batch - 1) / max_batch

        low = np.zeros_like(max_batch)
        high = np.minimum(max_batch / (mean_decodes + 1), budget / (mean_input + mean_decodes))
        for _ in range(50):
            rate = (low + high) / 2
            room = budget - rate * mean_decodes
            load = rate * mean_input / room
            residual = lengths.mean_square_input / (2 * mean_input)
            y = (mean_input + others * residual * load / np.maximum(1 - load, 1e-9)) / room
            slots = rate * (mean_decodes - 1 / np.expm1(-1 / np.maximum(y, 1e-9)))
            low, high = np.where(slots < max_batch, rate, low), np.where(slots < max_batch, high, rate)
        decode_batch = rate * mean_decodes

        # A busy step encodes what the slots freed, up to its room. Whoever is still in encode makes a step busy, so in
        # a step that only decodes every slot does.
        busy = np.maximum(1 - (1 - rate / max_batch) ** max_batch, load)
        requests, tokens = rate / busy, rate * mean_input / busy
        idle_batch = np.minimum(max_batch, budget)
        idle_batch = np.minimum(idle_batch, decode_batch / np.maximum(1 - busy, 1e-9))
        busy_batch = np.maximum(decode_batch - (1 - busy) * idle_batch, 0.0) / busy
        context = lengths.mean_decode_context
        idle_s = self._mixed_seconds(idle_batch, context, np.zeros_like(rate), np.zeros_like(rate))
        busy_s = self._mixed_seconds(busy_batch, context, requests, tokens)
        step_s = busy * busy_s + (1 - busy) * idle_s

        # The step that encodes the request itself, and the steps in which only others are encoded.
        own_tokens = np.minimum(room, mean_input * (1 + rate * others))
        own_s = self._mixed_seconds(decode_batch * others, context, 1 + rate * others, own_tokens)
        others_busy = np.where(load < 0.99, busy * others, busy)
        decode_s = others_busy * busy_s + (1 - others_busy) * idle_s
        whole_steps = lengths.inputs / room[:, None]
        spans = np.maximum(np.ceil(whole_steps), 1) + load[:, None] * np.minimum(0.5, whole_steps)
        ttft = own_s * (spans @ lengths.input_probabilities)

        # Tokens of a busy step: a compound Poisson sum, given that it is not empty.
        square = rate * lengths.mean_square_input + (rate * mean_input) ** 2
        sd_tokens = np.sqrt(np.maximum(square / busy - tokens**2, 0.0))
        long_tokens = np.clip(tokens + _upper_deviate(others_busy) * sd_tokens, 0.0, room)
        long_s = self._mixed_seconds(busy_batch, context, requests * long_tokens / tokens, long_tokens)
        return Performance(
            throughput=rate / step_s,
            latency=ttft + self.quantile_decodes * decode_s,
            ttft=ttft,
            tpot=decode_s,
            itl_p99=np.where(others_busy > 0.01, long_s, idle_s),
            encode_batch=requests,
            encode_tokens=tokens,
            decode_batch=decode_batch,
            peak_requests=max_batch,
            peak_tokens=np.minimum(budget, self._most_tokens(max_batch)),
            cycle=step_s / busy,
        )

    def _mixed_seconds(self, batch: Array, context: float, requests: Array, tokens: Array) -> Array:
        cost = self.cost
        return (
            cost.tokens(batch + tokens)
            + cost.decode_attention(batch, context)
            + requests * self._encode_attention(requests)
            + cost.head(batch + requests)
            + cost.overhead(batch + requests)
        )
