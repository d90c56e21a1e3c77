"""Closed forms of the single-lane policies on a lane's stages, at saturation, vectorised over candidates.

Assumptions: requests always wait; input and output lengths are independent; step costs are charged at the mean
composition of each iteration; the steps of a micro-batch follow each other through the stages as in
xsimulator.analytic.pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from xgpt.policies.rule import ADJUSTMENT
from xgpt.schema import SingleLaneSettings
from xsimulator.analytic.pipeline import Pipeline, expected_max_deviate
from xsimulator.cost import Array, CostModel
from xsimulator.lane import LaneCost, Table
from xsimulator.lengths import Lengths
from xsimulator.placement import whole

Steps = tuple[Array, Array]
"""Seconds on each kind of stage, and of the hop to it. # [kinds, n] each"""

SQRT_2_PI = np.sqrt(2 * np.pi)

MOST_SEGMENTS, MOST_STATIC_SEGMENTS = 12, 24
"""Stretches into which a phase's, and a static batch's, iterations are put at most: within one, costs are linear."""


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


def _excess(mean: Array, sd: Array) -> Array:
    """E[max(X, 0)] of a normal X."""
    z = mean / np.maximum(sd, 1e-12)
    density, tail = np.exp(-z * z / 2) / SQRT_2_PI, ndtr(-np.abs(z))
    return np.maximum(mean, 0.0) + np.maximum(sd, 1e-12) * (density - np.abs(z) * tail)


def _upper_deviate(share: Array) -> Array:
    """Standard normal deviate of the 99th percentile of all gaps within the longest `share` of them, at most 2.33."""
    return ndtri(np.clip(1 - 0.01 / np.maximum(share, 1e-9), 0.02, 0.99))


class OneLaneModel:
    """Predicts rra, orca, chunked and static for one lane of stages and one workload.

    Args:
        cost: of a lane's stages, or of one device.
        quantile: of the output length, for which latency is reported.
    """

    def __init__(self, cost: CostModel | LaneCost, lengths: Lengths, quantile: float = 0.99) -> None:
        if isinstance(cost, CostModel):
            cost = LaneCost(cost.spec, cost.profile, whole(cost.spec, cost.tp_degree))
        self.lane = cost
        self.lengths = lengths
        self.pipeline = Pipeline(self.lane)
        self.quantile_decodes = lengths.decodes_at(quantile)
        self._self_context = 0.0 if self.lane.has_encoder else lengths.mean_input
        """Tokens that self-attention meets before the first output token."""
        self._phases: dict[int, _Phase] = {}

    @cached_property
    def cost(self) -> CostModel:
        """The whole model on one group of the first stage's degree."""
        return CostModel(self.lane.spec, self.lane.profile, self.lane.stages[0].tp)

    def evaluate(self, kind: str, **columns: npt.ArrayLike) -> Performance:
        """Predict candidates of one policy; `columns` are its control variables, one entry a candidate.

        Micro-batches not named are 1.
        """
        values = {name: np.atleast_1d(np.asarray(column, float)) for name, column in columns.items()}
        size = len(next(iter(values.values())))
        ones = np.ones(size)
        if kind == "static":
            encode, decode = (values.get(f"{part}_microbatches", ones) for part in ("encode", "decode"))
            return self._static(values["batch"], encode, decode)
        microbatches = values.get("microbatches", ones)
        if kind == "rra":
            return self._rra(values["encode_batch"], values["decode_iterations"].astype(int), microbatches)
        unlimited = np.full(size, np.inf)
        return self._mixed(values["max_batch"], values.get("token_budget", unlimited), microbatches)

    def estimate(self, settings: SingleLaneSettings) -> dict[str, float]:
        """Predict one plan's settings."""
        columns = {variable.name: getattr(settings, variable.name) for variable in settings.variables}
        for name in ("microbatches", "encode_microbatches", "decode_microbatches"):
            if hasattr(settings, name):
                columns[name] = getattr(settings, name)
        return self.evaluate(settings.kind, **columns).at(0)

    # Steps ---------------------------------------------------------------------------------------------------

    @cached_property
    def _encode(self) -> Table:
        """A step that encodes whole prompts and nothing else, against their number."""
        return self.lane.encode(self.lengths)

    def _contexts(self, ages: Array) -> Array:
        return self._self_context + ages

    def _hops(self, tokens: Array) -> Array:
        return self.lane.hop(tokens)

    def _most_tokens(self, requests: Array) -> Array:
        """Prompt tokens of so many requests at once, hardly ever exceeded (four standard deviations)."""
        lengths = self.lengths
        variance = lengths.mean_square_input - lengths.mean_input**2
        return np.minimum(
            requests * lengths.mean_input + 4 * np.sqrt(requests * variance), requests * lengths.max_input
        )

    # Policies ------------------------------------------------------------------------------------------------

    def _rra(self, encode_batch: Array, decode_iterations: npt.NDArray[np.int_], microbatches: Array) -> Performance:
        parts = []
        for iterations in np.unique(decode_iterations):
            where = np.flatnonzero(decode_iterations == iterations)
            parts.append((where, self._rra_at(encode_batch[where], int(iterations), microbatches[where])))
        return parts[0][1] if len(parts) == 1 else _stack(len(encode_batch), parts)

    def _phase(self, iterations: int) -> _Phase:
        if iterations not in self._phases:
            self._phases[iterations] = _Phase(self, iterations)
        return self._phases[iterations]

    def _rra_at(self, encode_batch: Array, n: int, microbatches: Array) -> Performance:
        """One N_D: the cohorts of k phases ago decode together.

        The time of a cycle is the longest of the ways through it (for equal stages this is exact): one stage's work;
        a micro-batch's own steps; decode rounds, then from stage x on the encode round.

        Source: ExeGPT sec. 6 with the exact steady state; MODEL's (2), its form for unequal stages.
        """
        lengths, pipeline, phase = self.lengths, self.pipeline, self._phase(n)
        share, weights = phase.share, phase.weights
        each = encode_batch / microbatches  # requests that a micro-batch encodes
        tokens = each * lengths.mean_input
        te = self._encode(each)  # [kinds, n]
        te_hop = self._hops(tokens)

        # A phase ends early where nobody is left in decode: P(somebody is), and the batch given that, at most its peak.
        running = np.maximum(-np.expm1(each[:, None] * phase.nobody), share / max(share[0], 1e-300))
        batch = each[:, None] * share / np.maximum(running, 1e-300)  # [n, segments]
        td = phase.table.each(batch)  # [kinds, n, segments]
        td_hop = self._hops(batch)
        m = microbatches[:, None]
        slowest = td.max(axis=0)
        own_way = np.tensordot(pipeline.counts, td + td_hop, axes=1)
        # Phases begin together: a round takes place where anybody is left, with those micro-batches that are.
        anywhere = -np.expm1(m * np.log1p(-np.minimum(running, 1 - 1e-12)))
        anywhere = np.where(m == 1, running, anywhere)
        active = m * running / np.maximum(anywhere, 1e-300)
        rounds = np.maximum(active * slowest, own_way)  # [n, segments]
        times = anywhere * weights
        decoding = (rounds * times).sum(axis=1)

        # Micro-batches of unequal length: the longest of them holds the others up at every stage but the slowest.
        sd_tokens = self._sd_phase_tokens(each, share[0])
        longest = 1 + expected_max_deviate(microbatches) * sd_tokens / tokens
        first_round, last_round = rounds[:, 0] * anywhere[:, 0], rounds[:, -1] * anywhere[:, -1]
        change = pipeline.change(td[..., -1], td_hop[..., -1], te, te_hop, microbatches)
        change = change + (longest - 1) * (pipeline.after @ te - pipeline.slowest_from(te))
        stage_s = active * td * times  # [kinds, n, segments]
        one_stage = (microbatches * te + stage_s.sum(axis=2)).max(axis=0)
        own_cycle = pipeline.through(te, te_hop) + (own_way * times).sum(axis=1)
        until = pipeline.slowest_until(active * td) * times  # [ends, n, segments]
        up_to = until.sum(axis=2) - until[..., -1] / weights[-1] + change
        cycle = np.maximum(np.maximum(one_stage, own_cycle), up_to.max(axis=0))
        if n >= 2:
            around = own_way[:, 0] * anywhere[:, 0] + decoding - first_round - last_round
            cycle = np.maximum(cycle, around + change.max(axis=0))

        # A request of the quantile's length: whole cycles, less the rounds of its last phase that it does not need.
        decodes = self.quantile_decodes
        num_phases = -(-decodes // n)
        unneeded = (rounds * anywhere * phase.unneeded).sum(axis=1)
        spacing = np.maximum(slowest[:, -1], own_way[:, -1] / microbatches)
        queue = (microbatches - 1) / 2 * np.maximum(te.max(axis=0) - spacing, 0.0)
        own = pipeline.through(te, te_hop)

        # The rule carries up to half a prompt from phase to phase, so a phase's tokens vary around their mean; a
        # request meets a large phase more often than a small one.
        met = sd_tokens**2 / tokens**2
        ttft = own * (1 + met) + queue
        latency = num_phases * cycle - unneeded + met * own if decodes else ttft

        # Gaps that span an encode phase: one for each phase after a request's first.
        boundary = np.full_like(cycle, phase.boundary)
        pause = cycle - (decoding - first_round)
        long = np.maximum(_upper_deviate(boundary) * sd_tokens / tokens, 0.0)
        return Performance(
            throughput=encode_batch / cycle,
            latency=latency,
            ttft=ttft,
            tpot=(latency - ttft) / max(decodes, 1),
            itl_p99=np.where(boundary > 0.01, pause + long * own, rounds.max(axis=1)),
            encode_batch=encode_batch,
            encode_tokens=encode_batch * lengths.mean_input,
            decode_batch=encode_batch * share[0],
            peak_requests=encode_batch * max(share[0], 1.0),
            peak_tokens=1.1 * tokens + lengths.max_input,
            cycle=cycle,
        )

    def _sd_phase_tokens(self, each: Array, per_request: float) -> Array:
        """Standard deviation of the prompt tokens of a micro-batch's phase.

        Up to half a prompt moves from phase to phase, and where the decode batch strays the target follows it.
        """
        tokens = each * self.lengths.mean_input
        carried = self.lengths.mean_square_input / 6
        batch = np.maximum(each * per_request, 1e-9)
        stray = 2 * ndtr(-ADJUSTMENT * np.sqrt(batch))
        return np.sqrt(carried + stray * (ADJUSTMENT * tokens) ** 2)

    def _static(self, batch: Array, encode_parts: Array, decode_parts: Array) -> Performance:
        """A batch is encoded, then decodes at full size until its longest member ends.

        Source: ExeGPT sec. 2 (FasterTransformer: no early termination; DeepSpeed Inference: more micro-batches in
        encode than in decode).
        """
        lengths, pipeline = self.lengths, self.pipeline
        survival = lengths.survival
        each = batch / encode_parts
        te, te_hop = self._encode(each), self._hops(each * lengths.mean_input)
        sd = np.sqrt(np.maximum(lengths.mean_square_input - lengths.mean_input**2, 0.0) / each) / lengths.mean_input
        own = pipeline.through(te, te_hop)
        slowest = te.max(axis=0)
        ragged = expected_max_deviate(encode_parts) * sd * np.maximum(own - slowest, 0.0)
        encoding = own + (encode_parts - 1) * slowest + ragged

        table, starts, weights = self._static_rounds
        together = batch / decode_parts
        td = table.each(np.repeat(together[:, None], len(starts), axis=1))  # [kinds, n, segments]
        hop = self._hops(together)[..., None]
        with np.errstate(divide="ignore"):
            nobody = np.log1p(-np.minimum(survival, 1.0))
        some = _means(-np.expm1(batch[:, None] * nobody), starts, weights)
        active = decode_parts[:, None] * _means(-np.expm1(together[:, None] * nobody), starts, weights)
        active = active / np.maximum(some, 1e-300)
        own_way = np.tensordot(pipeline.counts, td + hop, axes=1)
        rounds = np.maximum(active * td.max(axis=0), own_way)
        # The first round overlaps with the others' encoding: its last micro-batch just passes through.
        saved = np.maximum(rounds[:, 0] - own_way[:, 0], 0.0) * some[:, 0]
        cycle = encoding + (rounds * some * weights).sum(axis=1) - saved
        decodes = self.quantile_decodes
        met = np.clip(decodes - starts, 0, weights)
        decoding = (rounds * met).sum(axis=1) - saved * bool(decodes)
        return Performance(
            throughput=batch / cycle,
            latency=encoding + decoding,
            ttft=own + (encode_parts - 1) / 2 * slowest,
            tpot=decoding / max(decodes, 1),
            itl_p99=rounds.max(axis=1),
            encode_batch=batch,
            encode_tokens=batch * lengths.mean_input,
            decode_batch=batch,
            peak_requests=batch,
            peak_tokens=self._most_tokens(each),
            cycle=cycle,
        )

    @cached_property
    def _static_rounds(self) -> tuple[Table, npt.NDArray[np.int_], npt.NDArray[np.int_]]:
        """Decode steps of a static batch: a table for each stretch of iterations, where it starts, how many it has."""
        length = len(self.lengths.survival)
        edges = _segments(length, {self.quantile_decodes}, MOST_STATIC_SEGMENTS)
        weights = np.diff(edges)
        middles = edges[:-1] + (weights + 1) / 2
        return self.lane.decode(self._contexts(middles), self.lengths.mean_input), edges[:-1], weights

    def _mixed(self, max_batch: Array, budget: Array, microbatches: Array) -> Performance:
        """Steps that decode everything and encode into free slots: orca (no budget) and chunked.

        The slots of a micro-batch form a closed queueing network: a slot decodes D steps, then its next prompt passes
        a station that takes budget - b tokens a step. With x prompts a step, b = x E[D] and load rho = x E[I]/(budget -
        b),

            max_batch = x (E[D] + W(rho)),   W = 1 / (1 - exp(-1/y)),   y = (E[I] + wait) / (budget - b),

        where W rounds a stay of mean y up to whole steps and the wait is Pollaczek-Khinchine's. The left side
        rises with x, so bisection finds the one root; without a budget it is x = max_batch / (E[D] + 1).
        """
        lengths = self.lengths
        mean_decodes, mean_input = lengths.mean_decodes, lengths.mean_input
        m = microbatches
        budget = np.maximum(np.where(np.isfinite(budget), np.floor(budget / m), budget), 1.0)
        max_batch = np.maximum(max_batch / m, 1e-9)
        others = np.maximum((max_batch - 1) / max_batch, 0.0)

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
        busy = np.maximum(1 - np.maximum(1 - rate / max_batch, 0.0) ** max_batch, load)
        requests, tokens = rate / busy, rate * mean_input / busy
        idle_batch = np.minimum(max_batch, budget)
        idle_batch = np.minimum(idle_batch, decode_batch / np.maximum(1 - busy, 1e-9))
        busy_batch = np.maximum(decode_batch - (1 - busy) * idle_batch, 0.0) / busy
        none = np.zeros_like(rate)
        idle = self._mixed_step(idle_batch, none, none)
        full = self._mixed_step(busy_batch, requests, tokens)

        # Tokens of a busy step: a compound Poisson sum, given that it is not empty. Of several micro-batches that
        # encode at once, the one with the most tokens is what the others wait for.
        square = rate * lengths.mean_square_input + (rate * mean_input) ** 2
        sd_tokens = np.sqrt(np.maximum(square / busy - tokens**2, 0.0))
        deviate = expected_max_deviate(np.maximum(m * busy, 1.0))
        most = self._mixed_busy(busy_batch, requests, tokens, np.minimum(tokens + deviate * sd_tokens, room))
        others_busy = np.where(load < 0.99, busy * others, busy)
        step_s = self._mixed_round(full, most, idle, busy, busy, m)
        decode_s = self._mixed_round(full, most, idle, others_busy, busy, m)

        own_tokens = np.minimum(room, mean_input * (1 + rate * others))
        own = self._mixed_step(decode_batch * others, 1 + rate * others, own_tokens)
        own_s = self._mixed_round(full, (np.maximum(own[0], most[0]), own[1]), idle, np.ones_like(busy), busy, m)
        own_s = np.where(m > 1, own_s, self.pipeline.through(*own))
        whole_steps = lengths.inputs / room[:, None]
        spans = np.maximum(np.ceil(whole_steps), 1) + load[:, None] * np.minimum(0.5, whole_steps)
        ttft = own_s * (spans @ lengths.input_probabilities)

        long_tokens = np.clip(tokens + _upper_deviate(others_busy) * sd_tokens, 0.0, room)
        long = self._mixed_busy(busy_batch, requests, tokens, long_tokens)
        long_s = self._mixed_round(full, long, idle, np.ones_like(busy), busy, m)
        idle_s = self.pipeline.round(*idle, m)
        return Performance(
            throughput=m * rate / step_s,
            latency=ttft + self.quantile_decodes * decode_s,
            ttft=ttft,
            tpot=decode_s,
            itl_p99=np.where(others_busy > 0.01, long_s, idle_s),
            encode_batch=m * requests,
            encode_tokens=m * tokens,
            decode_batch=m * decode_batch,
            peak_requests=m * max_batch,
            peak_tokens=np.minimum(budget, self._most_tokens(max_batch)),
            cycle=step_s / busy,
        )

    @cached_property
    def _mixed_tables(self) -> tuple[Table, Table]:
        lengths = self.lengths
        context = self._contexts(np.asarray(lengths.mean_decode_context - lengths.mean_input))
        return self.lane.decode_attention(float(context), lengths.mean_input), self.lane.prompts(lengths)

    def _mixed_step(self, batch: Array, requests: Array, tokens: Array) -> Steps:
        lane = self.lane
        attention, prompts = self._mixed_tables
        sampled = batch + requests
        through_decoder = sampled if lane.has_encoder else batch + tokens
        seconds = lane.tokens(through_decoder) + attention(batch) + prompts(requests)
        return seconds + lane.samples(sampled) + lane.overhead(sampled), self._hops(batch + tokens)

    def _mixed_busy(self, batch: Array, requests: Array, tokens: Array, actual: Array) -> Steps:
        """A step that encodes `actual` tokens where the mean is `tokens` of `requests`."""
        return self._mixed_step(batch, requests * actual / tokens, actual)

    def _mixed_round(
        self, busy: Steps, most: Steps, idle: Steps, own: Array, others: Array, microbatches: Array
    ) -> Array:
        """Seconds of a round in which a micro-batch's own step is busy with one probability, each other with another.

        Steps keep their order, so whoever follows a busy one waits for it: a round takes as long as its slowest step
        does through all stages, or as the slowest stage's work. That each round pays for a busy step of its own is
        too much, as those of neighbouring rounds overlap; that the M steps from a busy one on pay just once is too
        little, as one of them may be busy again later. The mean of the two is within 4% of the recursion, even where
        busy steps take ten times as long.
        """
        pipeline, m = self.pipeline, microbatches
        quiet = pipeline.round(*idle, m)
        none = (1 - own) * (1 - others) ** (m - 1)  # nobody is busy
        each = 1 - none ** (1 / m)
        slow = pipeline.through(*most)
        mean = each * busy[0] + (1 - each) * idle[0]
        stage = np.argmax(mean, axis=0)
        rows = np.arange(len(stage))
        busy_s, idle_s = busy[0][stage, rows], idle[0][stage, rows]
        some = np.maximum(1 - none, 1e-12)
        work = m * (idle_s + each / some * (busy_s - idle_s))  # given that somebody is busy
        sd = np.sqrt(m * each * (1 - each)) * np.abs(busy_s - idle_s)
        held = slow + _excess(work - slow, sd)
        gap = (1 - each) / np.maximum(each, 1e-12)
        once = m * (held + gap * quiet / m) / (m + gap)
        always = none * quiet + (1 - none) * held
        return np.where(m == 1, none * quiet + (1 - none) * pipeline.through(*busy), (once + always) / 2)


class _Phase:
    """What rra's closed form needs of one N_D: its iterations in a few stretches, and their decode tables."""

    def __init__(self, model: OneLaneModel, n: int) -> None:
        lengths = model.lengths
        survival = lengths.survival
        num_cohorts = -(-len(survival) // n)
        padded = np.zeros(num_cohorts * n)
        padded[: len(survival)] = survival
        cohorts = padded.reshape(num_cohorts, n)  # [cohort, iteration of the phase]
        ages = np.arange(1, num_cohorts * n + 1).reshape(num_cohorts, n)
        decodes = model.quantile_decodes
        rest = decodes - (-(-decodes // n) - 1) * n  # iterations of the quantile's last phase
        edges = _segments(n, {rest} if decodes else set(), MOST_SEGMENTS)
        starts = edges[:-1]
        self.weights = np.diff(edges)
        """Iterations of each stretch."""
        self.unneeded = np.where(starts >= rest, self.weights, 0)
        per_iteration = cohorts.sum(axis=0)
        self.share = np.add.reduceat(per_iteration, starts) / self.weights
        """Requests in decode, for each request encoded a phase."""
        age = np.add.reduceat((cohorts * ages).sum(axis=0), starts) / np.maximum(self.share * self.weights, 1e-300)
        with np.errstate(divide="ignore"):
            self.nobody = np.log1p(-np.minimum(cohorts, 1.0)).sum(axis=0)[starts]
        """Log of the probability that nobody is in decode, for each request encoded a phase."""
        self.boundary = cohorts[1:, 0].sum() / max(lengths.mean_decodes, 1e-300)
        """Share of the gaps between tokens that span an encode phase."""
        self.table = model.lane.decode(model._contexts(age), lengths.mean_input)


def _means(values: Array, starts: npt.NDArray[np.int_], counts: npt.NDArray[np.int_]) -> Array:
    """Means of stretches of the last axis."""
    return np.add.reduceat(values, starts, axis=-1) / counts


def _segments(length: int, edges: set[int], most: int) -> npt.NDArray[np.int_]:
    """Edges of stretches of 0 .. length: single ones first, then ever longer ones, with these edges among them."""
    if length <= most:
        return np.arange(length + 1)
    spaced = np.unique(np.round(np.linspace(0, 1, most) ** 1.5 * (length - 1)).astype(int) + 1)
    inner = {edge for edge in (*spaced.tolist(), *edges) if 0 < edge < length}
    return np.asarray([0, *sorted(inner), length])
