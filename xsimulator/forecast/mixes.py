"""Predict steps that decode all running requests and encode prompts for free slots: orca (no token budget) and chunked.

The max_batch slots of a micro-batch form a closed queueing network. A slot decodes for D steps, and then its next
prompt goes through a station that encodes budget - b tokens a step. If x prompts begin per step, b = x E[D] requests
decode, the station's load is rho = x E[I] / (budget - b), and

    max_batch = x (E[D] + W(rho)),   W = 1 / (1 - exp(-1/y)),   y = (E[I] + wait) / (budget - b),

where W is the mean time at the station (y steps, rounded up to whole steps). The wait is Pollaczek-Khinchine's, for the
load of the other slots (Schweitzer, 1979). The right side rises with x, so there is at most one root. Without a root,
the station is never idle. Without a budget, x = max_batch / (E[D] + 1).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from xgpt.core.schema import ChunkedSettings, OrcaSettings
from xsimulator.costs.curves import Array, Table
from xsimulator.forecast.base import (
    Columns,
    Forecast,
    Ints,
    Performance,
    PlacementLimits,
    Stations,
    column,
    upper_deviate,
)
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.pipeline import RandomSteps
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.lengths import Lengths, parts_of

ROOT_STEPS = np.linspace(0.0, 1.0, 33)
ROOT_LEVELS = 2
"""Number of grids on which the root is searched."""
PROMPTS = np.asarray([0.35, 0.3, 0.2, 0.1, 0.05])
"""Shares of all prompts, sorted from the shortest to the longest. The mean length of each share represents the prompts
in it.
"""
PROMPT_EDGES = np.concatenate([[0.0], np.cumsum(PROMPTS)])
DEVIATES = np.asarray([[-2.334414], [-0.741964], [0.741964], [2.334414]])
WEIGHTS = np.asarray([0.045876, 0.454124, 0.454124, 0.045876])
ROUNDING = 1.05
"""Factor that allows for the error of a root that is found on a grid."""
MOST_UNUSED = 0.75
"""Largest share of a step's tokens that stays unused because the next whole prompt does not fit."""
NUM_BUSY = len(PROMPTS) + len(WEIGHTS)
"""Number of values that represent busy steps, that is, steps that encode. Values for steps with one prompt come first,
then values for steps with several.
"""


class _Slots(NamedTuple):
    """The steady state of a micro-batch's slots. # [n] each"""

    rate: Array
    room: Array
    """Number of prompt tokens that a step can take."""
    load: Array
    slots: Array
    """Number of slots that are used at this rate."""


class _Mix(NamedTuple):
    """The numbers of requests and tokens in the steps of a micro-batch. # [n] each, unless stated"""

    rate: Array
    max_batch: Array
    decode_batch: Array
    """Mean number of requests that a step decodes."""
    busy: Array
    """Share of steps that encode."""
    others_busy: Array
    """Share of steps that encode while a given request decodes. This request's slot then supplies no prompt."""
    requests: Array
    tokens: Array
    """Mean number of prompts (`requests`) and of prompt tokens in a busy step."""
    counts: Array
    shares: Array
    """For each value that represents busy steps, its number of prompts (`counts`) and its probability. # [values, n]
    each
    """
    columns: Array
    """Counts of three kinds of steps: one that only decodes, one for each value that represents busy steps, and the
    longest step. The first axis is decode batch, number of prompts and number of prompt tokens. # [3, 2 + values, n]
    """
    spans: Array | None
    """Mean number of steps for which a prompt waits or is encoded. None means one."""
    room: Array | None
    load: Array | None
    """Number of prompt tokens that a step can take (`room`), and the used share of this number. None means no limit."""
    largest: Array
    """Number of tokens in the largest step."""


class Mixes:
    """Computes the numbers of prompts, prompt tokens and decodes in steps under one workload.

    The result does not depend on devices, so a profile's tables and its lower tables can share it.

    Args:
        ahead: whether the engine schedules each step while the previous step runs.
        apart: whether prompts are encoded in separate steps.
        whole: whether a step encodes only whole prompts.
    """

    def __init__(self, lengths: Lengths, *, ahead: bool, apart: bool, whole: bool) -> None:
        self._lengths, self._apart = lengths, apart
        # Mean number of a step's tokens that are unused because the next prompt does not fit as a whole.
        self._unused = lengths.mean_square_input / (2 * lengths.mean_input) if whole else 0.0
        # If steps are scheduled ahead, a slot is reused one step later. In that step, the finished request is still
        # computed, unless it has reached its maximum output.
        self._held = lengths.mean_decodes + ahead
        self._rows = lengths.mean_decodes + ahead * (1 - float(lengths.output_probabilities[-1]))
        self._input_variance = max(lengths.mean_square_input - lengths.mean_input**2, 0.0)
        self.prompt: Array = parts_of(lengths.inputs, lengths.input_probabilities, PROMPT_EDGES)[0][:, None]
        self._last: tuple[tuple[bytes | None, ...], _Mix] | None = None

    def __call__(self, max_batch: Array, budget: Array | None, microbatches: Array) -> _Mix:
        asked = tuple(None if values is None else values.tobytes() for values in (max_batch, budget, microbatches))
        last = self._last
        if last is None or last[0] != asked:
            last = self._last = asked, self._made(max_batch, budget, microbatches)
        return last[1]

    def _made(self, max_batch: Array, budget: Array | None, m: Array) -> _Mix:
        lengths, mean_input = self._lengths, self._lengths.mean_input
        max_batch = np.maximum(max_batch / m, 1e-9)
        others = np.maximum((max_batch - 1) / max_batch, 0.0)
        if self._apart:  # all waiting prompts are encoded before the decode step, if necessary in several steps
            rate, room, load, budget = max_batch / self._held, None, None, None
        elif budget is None:
            rate = max_batch / (self._held + 1)
            room = load = None
        else:
            budget = np.maximum(np.floor(budget / m), 1.0)
            rate, room, load, _ = self._steady(max_batch, budget, others)
        decode_batch = rate * self._rows

        # A busy step encodes prompts for free slots, up to `room`. A step is busy if any prompt is not encoded yet, so
        # in a step that is not busy, every slot decodes.
        quiet = np.maximum(1 - rate / max_batch, 0.0)
        busy = 1 - quiet**max_batch
        idle_batch = max_batch
        others_busy = busy * others
        if budget is not None and load is not None:
            busy, idle_batch = np.maximum(busy, load), np.minimum(max_batch, budget)
            others_busy = busy * self._share_of_others(rate, max_batch, budget)
        requests, tokens = rate / busy, rate * mean_input / busy
        idle_batch = np.minimum(idle_batch, decode_batch / np.maximum(1 - busy, 1e-9))
        busy_batch = np.maximum(decode_batch - (1 - busy) * idle_batch, 0.0) / busy

        # The columns are a step that only decodes, the values of busy steps, and a long step.
        alone = np.minimum(rate * quiet ** np.maximum(max_batch - 1, 0.0) / busy, 1.0)
        found, counts, shares, sd_tokens = self._busy(requests, tokens, alone, room, rate, busy)
        long_tokens = np.maximum(tokens + upper_deviate(others_busy) * sd_tokens, 0.0)
        if room is not None:
            long_tokens = np.minimum(long_tokens, room)
        columns = np.zeros((3, 2 + NUM_BUSY, len(m)))
        columns[0], columns[0, 0] = busy_batch, idle_batch
        columns[1:, 1:-1] = counts, found
        columns[1:, -1] = requests / tokens * long_tokens, long_tokens
        largest = np.minimum(
            max_batch * mean_input + 4 * np.sqrt(max_batch * self._input_variance), max_batch * lengths.max_input
        )
        spans = None
        if budget is not None and room is not None and load is not None:
            spans = _spans(lengths.inputs, room, load) @ lengths.input_probabilities
            largest = np.minimum(budget, largest)
        return _Mix(
            rate,
            max_batch,
            decode_batch,
            busy,
            others_busy,
            requests,
            tokens,
            counts,
            shares,
            columns,
            spans,
            room,
            load,
            largest,
        )

    def _busy(
        self, requests: Array, tokens: Array, alone: Array, room: Array | None, rate: Array, busy: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return a few values that represent the prompt tokens of busy steps. Values for steps with one prompt come
        first, then values for steps with several.

        For any `room`, the values have the same mean tokens and mean prompts as a busy step. So a cost that is linear
        in tokens and prompts is exact, and only the curvature of tables causes errors. Tokens that do not fit in one
        value move to another one together with their prompts.

        Returns:
            Tokens, requests and probability of each value. # [values, n] each
            Standard deviation of the tokens. # [n]
        """
        lengths = self._lengths
        # The tokens are a compound Poisson sum, under the condition that it is not empty.
        square = (rate * lengths.mean_square_input + (rate * lengths.mean_input) ** 2) / busy
        several = np.maximum(1 - alone, 1e-9)
        count = np.maximum((requests - alone) / several, 1.0)
        mean = np.maximum((tokens - alone * lengths.mean_input) / several, lengths.mean_input)
        variance = (square - alone * lengths.mean_square_input) / several - mean * mean
        sigma = np.sqrt(np.log1p(np.maximum(variance, 0.0) / (mean * mean)))
        spread = np.exp(DEVIATES * sigma)
        spread *= mean / (WEIGHTS @ spread)
        values, each, shares = np.empty((3, NUM_BUSY, len(mean)))
        values[: len(PROMPTS)], values[len(PROMPTS) :] = self.prompt, spread
        each[: len(PROMPTS)], each[len(PROMPTS) :] = 1 / self.prompt, count / mean
        shares[: len(PROMPTS)], shares[len(PROMPTS) :] = alone * PROMPTS[:, None], several * WEIGHTS[:, None]
        counts = each * (values if room is None else np.minimum(values, room))
        # Tokens that do not fit into one step are moved to other steps, together with their requests.
        if room is not None:
            values = np.minimum(values, room)
            short, left = tokens - (values * shares).sum(axis=0), room - values
            added = left * np.minimum(np.maximum(short / np.maximum((left * shares).sum(axis=0), 1e-9), 0.0), 1.0)
            values += added
            fitting = (counts * shares).sum(axis=0)
            counts *= np.minimum(requests / fitting, 1.0)
            counts += added * np.maximum(requests - fitting, 0.0) / np.maximum((added * shares).sum(axis=0), 1e-9)
        return values, counts, shares, np.sqrt(np.maximum(square - tokens * tokens, 0.0))

    def _steady(self, max_batch: Array, budget: Array, others: Array) -> _Slots:
        lengths = self._lengths
        unused = np.minimum(self._unused, MOST_UNUSED * budget)
        highest = np.minimum(max_batch / (self._held + 1), (budget - unused) / (lengths.mean_input + self._rows))
        low, width = np.zeros_like(highest), highest
        rows = np.arange(len(highest))
        for level in range(ROOT_LEVELS):
            grid = low[:, None] + width[:, None] * ROOT_STEPS
            slots = self._at(grid, budget[:, None], others[:, None]).slots
            # Find the last grid point with fewer than `max_batch` used slots. The highest rate always uses enough
            # slots.
            index = (slots[:, 1:-1] < max_batch[:, None]).sum(axis=1)
            low, width = grid[rows, index], width / (len(ROOT_STEPS) - 1)
            if level == ROOT_LEVELS - 1:
                before, after = slots[rows, index], slots[rows, index + 1]
                share = (max_batch - before) / np.maximum(after - before, 1e-300)
        return self._at(low + width * np.minimum(np.maximum(share, 0.0), 1.0), budget, others)

    def _share_of_others(self, rate: Array, max_batch: Array, budget: Array) -> Array:
        """Return the rate of prompts with one slot fewer, divided by the rate with all slots. The lower rate applies
        while a given request decodes, since its slot supplies no prompt.

        Two secant steps suffice, since the number of slots is a convex function of the rate.
        """
        fewer = np.maximum(max_batch - 1, 1e-9)
        others = np.maximum((fewer - 1) / fewer, 0.0)
        least = low = rate * fewer / max_batch
        most = self._at(rate, budget, others).slots
        for _ in range(2):
            slots = self._at(low, budget, others).slots
            share = (fewer - slots) / np.maximum(most - slots, 1e-9)
            low = low + (rate - low) * np.minimum(np.maximum(share, 0.0), 1.0)
        return np.maximum(low, least) / rate

    def _at(self, rate: Array, budget: Array, others: Array) -> _Slots:
        lengths = self._lengths
        room = budget - np.minimum(self._unused, MOST_UNUSED * budget) - rate * self._rows
        load = rate * lengths.mean_input / room
        residual = lengths.mean_square_input / (2 * lengths.mean_input)
        # A prompt waits for the prompts of other slots that are waiting or being encoded when it arrives.
        met = others * load
        y = (lengths.mean_input + residual * met / np.maximum(1 - met, 1e-9)) / room
        slots = rate * (self._held - 1 / np.expm1(-1 / np.maximum(y, 1e-9)))
        return _Slots(rate, room, load, slots)


def most_displaced(lengths: Lengths) -> float:
    """Return an upper bound on (1 - busy) (b0 - b). Here b is the mean number of requests that steps decode, and b0 is
    this number for steps that only decode.

    A busy step then decodes at least b - bound / busy requests. A micro-batch has x (E[D] + W) slots (one more for each
    prompt if steps are scheduled ahead), and W <= y + 1. The bound has two parts. First, prompts occupy slots for whole
    steps. Since 1 - busy <= e^-x, this part is 2 x e^-x <= 2 / e. Second, prompts occupy slots in proportion to their
    tokens. Since 1 - busy <= 1 - rho, with rho = x E[I] / (budget - b), this part is rho (1 - rho) + rho^2 E[I^2] / (2
    E[I]^2), which rises with rho.
    """
    of_tokens = lengths.mean_square_input / (2 * lengths.mean_input**2)
    return ROUNDING * (2 / np.e + of_tokens)


@lru_cache(maxsize=8)
def mixes_of(lengths: Lengths, *, ahead: bool = False, apart: bool = False, whole: bool = False) -> Mixes:
    return Mixes(lengths, ahead=ahead, apart=apart, whole=whole)


class MixedSteps:
    """Predicts orca and chunked on one lane of stages under one workload.

    Attributes:
        apart, whole: how steps mix and cut prompts (see `Mixes`). None means as the engine does.
    """

    apart: ClassVar[bool | None] = None
    whole: ClassVar[bool | None] = None

    def __init__(self, model: OneLaneModel) -> None:
        lane, lengths = model.lane, model.lengths
        self._is_apart = lane.apart if self.apart is None else self.apart
        whole = lane.whole_prompts if self.whole is None else self.whole
        self._lane, self._pipeline, self._of_all = lane, model.pipeline, model.of_all
        self._mixes = mixes_of(lengths, ahead=lane.ahead, apart=self._is_apart, whole=whole)
        self._quantile_decodes = model.quantile_decodes
        context = model.self_context + lengths.mean_decode_context - lengths.mean_whole_input
        self._attention = lane.decode_attention(context, lengths.mean_input)
        self._prompts = lane.prompts(lengths)
        hop = lane.hop
        self._hops = Table(hop.points, lane.counts @ hop.values)
        self._passing = lane.tokens.beside(Table(hop.points, (lane.counts @ hop.values)[None]))
        self._sampled = lane.samples + lane.overhead

    def evaluate(self, max_batch: Array, budget: Array | None, microbatches: Array) -> Performance:
        """Return predictions. `budget` is the largest number of tokens in a step. None means no limit. # [n] each"""
        mix, m, size = self._mixes(max_batch, budget, microbatches), microbatches, len(microbatches)
        busy, others_busy, shares = mix.busy, mix.others_busy, mix.shares
        share: Array | float = 1.0
        if self._is_apart:
            cost, hops, share = self._apart(mix.columns, budget)
        else:
            cost, hops = self._steps(*mix.columns.reshape(3, -1))
        cost = cost.reshape(-1, 2 + NUM_BUSY, size)  # [kinds, steps, n]
        if self._lane.mixing and not self._is_apart:
            # Mixing slows decodes by a share of the time that they take in a step without prompts. With lower tables, a
            # larger batch must not take longer per request, so only one decode is counted.
            none, batch = np.zeros(size), mix.columns[0, 1]
            alone = self._steps(np.minimum(batch, 1.0) if self._lane.is_floor else batch, none, none)[0]
            cost[:, 1:] += (self._lane.mixing * np.minimum(mix.decode_batch, 1.0) * alone)[:, None]
        through = self._pipeline.all_stages(cost) + hops.reshape(-1, size)  # [steps, n]
        slowest = cost[0]
        if len(cost) > 1:
            stage = ((1 - busy) * cost[:, 0] + busy * (cost[:, 1:-1] * shares).sum(axis=1)).argmax(axis=0)
            slowest = cost[stage, :, np.arange(size)].T  # [steps, n]

        # Probabilities among all steps, and among the steps of a decoding request, in which its own slot has no prompt.
        probability = np.empty((2, 1 + NUM_BUSY, size))
        probability[0, 0], probability[1, 0] = busy, ((m - 1) * busy + others_busy) / m
        probability[:, 1:] = probability[:, :1] * shares
        probability[:, 0] = 1 - probability[:, 0]
        rounds = RandomSteps(through[:-1], slowest[:-1], probability, m)
        step_s, decode_s = rounds.round()
        with_busy = rounds.round_with(through[1:], slowest[1:])  # [busy steps and the long one, n]
        long_s = np.maximum(with_busy[-1], rounds.long_round(0.01))
        met = shares * mix.counts  # a step with more prompts has a greater weight
        first = with_busy[:-1]
        if self._is_apart:  # the first token comes at the end of one of the encode steps, before the decode step
            first = (first - through[:1]) * share
        ttft = (met * first).sum(axis=0) / met.sum(axis=0)
        met = met / met.sum(axis=0)
        if mix.spans is not None and mix.room is not None and mix.load is not None:
            first = ttft * _spans(self._mixes.prompt[:, 0], mix.room, mix.load).T
            met = np.repeat(PROMPTS[:, None], size, axis=1)
            ttft = ttft * mix.spans
        # If steps are scheduled ahead, an admitted prompt first waits for the running step.
        ahead_s = step_s if self._lane.ahead else 0.0
        ttft = ttft + ahead_s
        if self._of_all is None:
            latency = ttft + self._quantile_decodes * decode_s
        else:
            latency = ahead_s + self._of_all.latency(first, met, decode_s, np.sqrt(m * rounds.variance[1]))
        return Performance(
            throughput=m * mix.rate / step_s,
            latency=latency,
            ttft=ttft,
            tpot=decode_s,
            itl_p99=np.where(others_busy > 0.01, long_s, np.maximum(m * slowest[0], through[0])),
            encode_batch=m * mix.requests,
            encode_tokens=m * mix.tokens,
            decode_batch=m * mix.decode_batch,
            peak_requests=m * mix.max_batch,
            peak_variance=np.zeros_like(step_s),
            peak_tokens=mix.largest,
            cycle=step_s / busy,
            gate=decode_s,
            prompt_s=np.maximum(ttft - decode_s, 0.0),
            bubble=self._pipeline.bubble(m * (cost[:, :-1] * probability[0]).sum(axis=1), step_s),
            filling=np.zeros_like(step_s),
        )

    def _apart(self, columns: Array, budget: Array | None) -> tuple[Array, Array, Array]:
        """Return the times of steps for an engine that encodes prompts in separate steps before each decode step.

        Returns:
            The seconds on each kind of stage, the seconds of hops, and the mean share of these encode steps that a
            prompt needs until it ends. # [kinds, steps n], [steps n], [steps - 2, n]
        """
        batch, requests, tokens = columns  # [steps, n] each
        none = np.zeros(batch.size)
        decode_s, hops = self._steps(batch.ravel(), none, none)
        count = np.ones_like(tokens) if budget is None else np.maximum(tokens / budget, 1.0)
        encode_s, encode_hops = self._steps(none, (requests / count).ravel(), (tokens / count).ravel())
        times = (count * (tokens > 0)).ravel()
        # The k-th of r prompts ends in the step in which k / r of the tokens are encoded.
        prompts = np.maximum(requests, 1.0)
        share = np.minimum((prompts + 1) / (2 * prompts) + 0.5 / count, 1.0)[1:-1]
        return decode_s + times * (encode_s - self._attention(none)), hops + times * encode_hops, share

    def _steps(self, batch: Array, requests: Array, tokens: Array) -> tuple[Array, Array]:
        sampled, together = batch + requests, batch + tokens
        seconds = self._attention(batch) + self._prompts(requests) + self._sampled(sampled)
        if self._lane.has_encoder:
            return seconds + self._lane.tokens(sampled), self._hops(together)
        passing = self._passing(together)
        seconds += passing[:-1]
        return seconds, passing[-1]


def _spans(prompts: Array, room: Array, load: Array) -> Array:
    """Return the number of steps that prompts take, waiting included. # [prompts], [n], [n] -> [n, prompts]"""
    waiting = prompts / room[:, None]  # computed in place, since this is the largest array here
    steps = np.ceil(waiting)
    np.minimum(waiting, 0.5, out=waiting)
    waiting *= load[:, None]
    steps += waiting
    return steps


TOKEN_BUDGETS = tuple(sorted({round(2 ** (e / 4) / 8) * 8 for e in range(4 * 5, 4 * 13 + 1)}))
"""Token budgets to try: multiples of 8 from 32 to 8192, about four for each doubling."""


class Mixed(Forecast[OneLaneModel]):
    """A policy in which every step may both encode and decode.

    Attributes:
        steps: predicts the steps. A policy that mixes prompts and decodes in its own way overrides it.
    """

    steps: ClassVar[type[MixedSteps]] = MixedSteps
    model = OneLaneModel
    line = load = "max_batch"
    stations = Stations(admits_each_step=True, frees_together=False)
    swaps_between_steps = True

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        microbatches, most = column(columns, "microbatches"), model.lane.token_budget
        budget = columns.get("token_budget")
        if budget is None and most is not None:
            budget = most * microbatches
        return model.part(self.steps).evaluate(columns["max_batch"], budget, microbatches)

    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        # Steps with prompts decode only slightly fewer requests than the mean step, and a request takes no longer in a
        # larger batch.
        least = np.maximum(1 - most_displaced(steps.iterations.lengths) / steps.iterations.batches, 0.0)
        steady = [steps.each * steps.steady * least, steps.steady_passing * least]
        working = [steps.each * steps.mixed, steps.passing, *steady]
        return BoundTerms(working, [steps.each * steps.met, steps.passing, *steady])


def _budgets(room: PlacementLimits) -> list[int]:
    """Return the token budgets to try.

    If the engine cuts no prompts, a budget must suffice for the longest prompt and all decodes.
    """
    longest, engine = room.lengths.max_input, room.engine
    least, most = 0, 2 * room.max_batch * longest
    if engine is not None:
        most = min(most, engine.token_budget or most)
        least = 0 if engine.cuts_prompts else longest + room.max_batch
    return [budget for budget in TOKEN_BUDGETS if least <= budget <= most] or [min(most, max(least, TOKEN_BUDGETS[0]))]


class Orca(Mixed):
    settings: ClassVar[type[Any]] = OrcaSettings


class Chunked(Mixed):
    settings: ClassVar[type[Any]] = ChunkedSettings
    num_curves = 12
    cuts_prompts = True

    def values(self, name: str, room: PlacementLimits) -> Ints:
        if name == "token_budget":
            return room.microbatches * np.asarray(_budgets(room))
        return super().values(name, room)
