"""Find by simulation the highest arrival rate at which a plan keeps its bounds, waiting included.

Every rate is simulated with the same lengths and with the same gaps, scaled to the rate (common random numbers). One
replica is simulated with its share of the arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property, lru_cache
from math import ceil, floor, inf, log, log2
from typing import Any, NamedTuple

import numpy as np

from xgpt.core import policies
from xgpt.core.schema import Capacity, Goal, PlanDraft, Profile, Speculation, StageLane, Workload
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import Ints, gamma_arrivals, sample
from xsimulator.clock import LaneClock, TwoLaneClock
from xsimulator.costs.step_cost import LaneCost, lanes_of
from xsimulator.counts.arrivals import Array, GoalNs, KeptBounds, Run, Stream
from xsimulator.counts.counted_run import counted_run, is_counted
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.lengths import decoded
from xsimulator.measures import RequestTimes, quantile_of
from xsimulator.session_rate import PRECISION, SEED, SessionTrial, session_capacity

LEAST_REQUESTS = 2000
LASTING_REQUESTS = 8 * LEAST_REQUESTS
"""The rate that a plan states is kept by so many requests, where counts simulate them. Near saturation, a queue grows
over more than `LEAST_REQUESTS`, which suffice to compare plans.
"""
LEAST_WARM_UP = 128
LIFETIMES = 4
"""At saturation, requests are measured for at least this number of spans, after a warm-up of one span. A span is the
latency bound or, if shorter, a request's time just below saturation, waiting included. If the bound is longer than this
time, the rate equals saturated throughput to within `PRECISION`.
"""
EDGE = 0.05
"""Bounds are tightened and loosened by this share, to show the rate's sensitivity to them."""
KNOWN_BEYOND = 1.02
"""A simulated run ends early once the quantile of its times exceeds the bounds by this factor."""
LEAST_SHARE = 0.1


class _Drawn(NamedTuple):
    """Requests that arrive at one replica, one a second on average. # [requests] each

    Attributes:
        decoded: `outputs` or, with a draft, the lengths with which outputs are simulated
            (`xsimulator.lengths.decoded`).
    """

    inputs: Ints
    outputs: Ints
    decoded: Ints
    arrivals_s: Array


@lru_cache(maxsize=4)
def _drawn(
    workload: Workload, speculation: Speculation | None, burstiness: float, num_requests: int, seed: int
) -> _Drawn:
    rng = np.random.default_rng(seed)
    inputs, outputs = sample(workload, num_requests, rng)
    steps = decoded(outputs, speculation, rng)
    # Gaps are scaled to the exact mean rate, since a random deviation of the rate would be an error of the result.
    arrivals_s = gamma_arrivals(1.0, num_requests, burstiness, rng)
    return _Drawn(inputs, outputs, steps, arrivals_s * (num_requests / arrivals_s[-1]))


class Trial:
    """Simulates the requests that arrive at one replica of a plan, at any rate."""

    def __init__(
        self,
        plan: PlanDraft,
        profile: Profile,
        seed: int = SEED,
        *,
        by_request: bool = False,
        least_requests: int = LEAST_REQUESTS,
    ) -> None:
        self.plan, self.constraint = plan, plan.constraint
        self._by_request = by_request
        self.lanes = lanes_of(plan, profile)
        share = plan.estimate.throughput_rps / plan.replicas
        longest_s = plan.estimate.latency_s + _wait_s(plan, share)
        bound_s = plan.constraint.latency_bound_s or plan.estimate.latency_s
        span_s = min(bound_s, longest_s)
        self.is_far = bound_s > longest_s
        """Whether the latency bound is so loose that the highest rate equals saturated throughput."""
        # A power of two, so that plans with about the same throughput are simulated with the same requests.
        self.num_warm_up = 2 ** ceil(log2(max(share * span_s, LEAST_WARM_UP)))
        self.num_requests = max(least_requests, LIFETIMES * self.num_warm_up)
        self._seed = seed

    @classmethod
    def of_rate(cls, plan: PlanDraft, profile: Profile) -> Trial:
        """Return a trial with the requests by which the plan's rate was found."""
        found = plan.estimate.capacity
        return cls(plan, profile, least_requests=LEAST_REQUESTS if found is None else found.num_requests)

    @cached_property
    def _drawn(self) -> _Drawn:
        total = self.num_requests + 2 * self.num_warm_up  # further requests must follow the last measured ones
        plan = self.plan
        return _drawn(plan.workload, plan.speculation, plan.constraint.burstiness, total, self._seed)

    @cached_property
    def _longest(self) -> Ints:
        return np.maximum(self._drawn.decoded, self.plan.workload.output.lengths[-1])

    @cached_property
    def _cached(self) -> Ints:
        inputs, reuse = self._drawn.inputs, self.plan.estimate.reuse
        share = 0.0 if reuse is None else reuse.share
        return np.minimum(share * inputs, inputs - 1).astype(int) if share else np.zeros(0, int)

    def at(self, rate: float, slack: float | None = None) -> RequestTimes | None:
        """Return the times of the measured requests if `rate` requests a second arrive at all replicas together.

        Args:
            slack: return None once the quantile of a goal's times exceeds this multiple of its bounds. None means that
                the run never ends early.
        """
        stream = self.stream(rate)
        keeps, run = self.run(stream, slack)
        if not keeps:
            return None
        counted = slice(self.num_warm_up, self.num_warm_up + self.num_requests)
        arrived, first, end = (
            np.asarray(values[counted], float) for values in (stream.arrivals_ns, run.first_ns, run.end_ns)
        )
        return RequestTimes.of_ns(arrived, first, end, self._drawn.outputs[counted]).later(self.plan.request_path_s)

    def run(self, stream: Stream, slack: float | None, lenient: float = 1.0) -> tuple[bool, Run | EngineRun]:
        """Run a stream, and return whether at most `lenient` times the allowed share of requests broke a bound."""
        plan, most = self.plan, lenient * self.num_requests
        goals = () if not slack else tuple(_in_ns(g, slack, plan.request_path_s, most) for g in self.constraint.goals)
        run = run_of(plan, self.lanes, stream, by_request=self._by_request)
        return run.run(KeptBounds(goals, self.num_warm_up, self.num_warm_up + self.num_requests)), run

    def of(self, plan: PlanDraft) -> Trial:
        """Return a trial of a plan with other settings on the same devices, with the same requests."""
        other = copy(self)
        other.plan = plan
        return other

    def on(self, plan: PlanDraft, profile: Profile) -> Trial:
        """Return a trial of a plan on other devices, with the same requests."""
        other = self.of(plan)
        other.lanes = lanes_of(plan, profile)
        return other

    def stream(self, rate: float) -> Stream:
        drawn = self._drawn
        arrivals_ns = (drawn.arrivals_s * (1e9 * self.plan.replicas / rate)).astype(int)
        return Stream(drawn.inputs, drawn.decoded, self._longest, arrivals_ns, self._cached, drawn.outputs)

    def saturated(self) -> float:
        """Return throughput at saturation of all replicas, in requests a second, with admission in order of arrival."""
        # The same requests follow once more, since an engine that runs empty serves fewer requests a second.
        inputs, outputs, longest, cached = (
            np.tile(values, 2) for values in (self._drawn.inputs, self._drawn.decoded, self._longest, self._cached)
        )
        stream = Stream(inputs, outputs, longest, np.zeros_like(inputs), cached)
        run = run_of(in_order_of_arrival(self.plan), self.lanes, stream, by_request=self._by_request)
        count = self.num_warm_up + self.num_requests
        run.run(KeptBounds((), 0, count))
        ends = np.asarray(run.end_ns)
        ended, span_ns = endings(np.sort(ends[ends >= 0]), self.num_warm_up, count - 1)
        if not span_ns:  # no rate can be measured if all requests end in one step
            return self.plan.estimate.throughput_rps
        return float(self.plan.replicas * ended / span_ns * 1e9)


def endings(ends: Array, first: int, last: int) -> tuple[int, float]:
    """Return two values for the sorted times `ends`: the number of times after `ends[first]` up to `ends[last]`, and
    the difference between these two. Many requests may end at the same time.
    """
    begin, end = ends[first], ends[last]
    return int(np.searchsorted(ends, end, "right") - np.searchsorted(ends, begin, "right")), float(end - begin)


def in_order_of_arrival(plan: PlanDraft) -> PlanDraft:
    """Return the plan with admission in order of arrival. Other orders would admit mostly short requests."""
    return plan.but(admission=plan.admission.but(order="fcfs", row_tokens=None))


def run_of(
    plan: PlanDraft, lanes: Mapping[StageLane, LaneCost], stream: Stream, *, by_request: bool = False
) -> Run | EngineRun:
    """Return a run that simulates one replica's stream, by counts if possible, otherwise on the simulated engine."""
    run = None if by_request else counted_run(plan, lanes, stream)
    return EngineRun(policies.build(plan), lanes, stream) if run is None else run


class CapacitySearch:
    """Searches for the highest arrival rate at which a plan keeps its bounds.

    Args:
        most: a rate at which the bounds are broken. None means the plan's simulated throughput at saturation.
        least_share: a plan that breaks its bounds at this share of its saturated throughput has no capacity.

    Attributes:
        precision: relative precision. At a rate that exceeds the result by this share, the bounds are broken.
    """

    def __init__(
        self,
        plan: PlanDraft,
        profile: Profile,
        predicted: float | None = None,
        *,
        seed: int = SEED,
        most: float | None = None,
        least_requests: int = LEAST_REQUESTS,
        least_share: float = LEAST_SHARE,
    ) -> None:
        self.plan, self._profile, self._least_share = plan, profile, least_share
        self.precision = PRECISION
        self.predicted, self._seed = predicted, seed
        self._trial, self._slack = Trial(plan, profile, seed, least_requests=least_requests), _slack(plan)
        self._given = most
        self._promised = plan.estimate.throughput_rps if most is None else most
        self._seen: dict[float, tuple[float, float]] = {0.0: (0.0, 0.0)}
        """For rates that keep the bounds: the quantile of the time from arrival to the last token, and the share of
        requests within the bounds.
        """

    @property
    def rate(self) -> float:
        """The highest rate at which the bounds are kept. It is 0 if broken at `least_share` of saturated throughput."""
        return self._highest(self._slack, max(self.precision, PRECISION) if self._trial.is_far else self.precision)

    def keeps(self, rate: float) -> bool:
        return 0 < rate < self._promised and rate < self._most and self._excess_at(rate, self._slack) <= self._slack

    def excess_over(self, rate: float, far: float) -> float:
        """Return the excess at a rate, headroom included, or infinite if it exceeds `far`."""
        return self._excess_at(rate, far * self._slack) / self._slack

    @cached_property
    def lasting(self) -> CapacitySearch:
        """A search for the rate that `LASTING_REQUESTS` keep. It is this search if its rate is to be coarse or counts
        do not simulate the plan.
        """
        has_enough = self.precision > PRECISION or self._trial.num_requests >= LASTING_REQUESTS
        if has_enough or not self.rate or not is_counted(self.plan):
            return self
        search = CapacitySearch(
            self.plan,
            self._profile,
            self.rate,
            seed=self._seed,
            most=self._given,
            least_requests=LASTING_REQUESTS,
            least_share=self._least_share,
        )
        search.precision = self.precision
        return search

    def found(self, *, edges: bool = True) -> Capacity:
        """Return the highest rate. `closed_form_per_s` is the rate with which the search began."""
        return self.lasting._found(self.predicted, edges=edges and not _follows_bounds(self.plan))

    def _found(self, predicted: float | None, *, edges: bool) -> Capacity:
        rate = self.rate
        whole_s, share_kept = self._seen[rate]
        tighter, looser = (self._under(1 + edge) if edges else None for edge in (-EDGE, EDGE))
        return Capacity(
            rate_per_s=rate,
            rate_under_tighter_per_s=None if tighter is None else min(tighter, rate),
            rate_under_looser_per_s=None if looser is None else max(looser, rate),
            whole_s=whole_s,
            share_kept=share_kept,
            closed_form_per_s=predicted,
            num_requests=self._trial.num_requests,
            warm_up_requests=self._trial.num_warm_up,
            seed=self._seed,
        )

    def _under(self, factor: float) -> float:
        """Return the highest rate under all bounds times `factor`."""
        ends = self._most, self._saturation
        # Of a run that ended early only the bounds that it broke are known, not whether it keeps looser ones.
        self._excess = {rate: excess for rate, excess in self._excess.items() if excess < inf or rate in ends}
        return self._highest(factor * self._slack, max(self.precision, EDGE / 5))

    @cached_property
    def _most(self) -> float:
        if self._trial.is_far:  # a growing queue would break so loose a bound only after a very long run
            return min(self._promised, self._trial.saturated())
        return self._promised

    @cached_property
    def _excess(self) -> dict[float, float]:
        """For each simulated rate, the largest quantile of time / bound over all goals."""
        return {self._most: inf}

    @cached_property
    def _saturation(self) -> float:
        """The rate above which the queue grows. Bounds that a run keeps there would be broken in a longer run."""
        return inf if self._trial.is_far or self._given is not None else self._trial.saturated()

    def _excess_at(self, rate: float, slack: float) -> float:
        known = self._excess.get(rate)
        if known is None:
            constraint, times = self.plan.constraint, self._trial.at(rate, slack)
            known = inf
            if times is not None and rate >= self._saturation:
                self._excess[self._saturation] = inf
            elif times is not None:
                known = max(quantile_of(times.excess(goal), goal.quantile) for goal in constraint.goals)
                self._seen[rate] = quantile_of(times.whole_s, constraint.quantile), times.goodput(constraint)
            self._excess[rate] = known
        return known

    def _highest(self, slack: float, precision: float) -> float:
        """Return the highest simulated rate with an excess of at most `slack`. A rate at most `precision` higher has a
        larger excess.
        """
        num_tried, step, first = 0, 2 * precision, self.predicted or 0.8 * self._most
        while True:
            high = min(rate for rate, excess in self._excess.items() if excess > slack)
            low = max((rate for rate, excess in self._excess.items() if excess <= slack and rate < high), default=0.0)
            if high <= (1 + precision) * low or high < self._least_share * self._most:
                return low
            if len(self._excess) == 1:
                top = 1 / (1 + precision) if self._trial.is_far else 0.97
                rate = min(inf if self._trial.is_far else max(first, LEAST_SHARE * self._most), top * self._most)
            else:
                rate = self._between(low, high, slack, step, precision, bisect=num_tried % 3 == 2)
                step *= 2
            num_tried += 1
            self._excess_at(rate, KNOWN_BEYOND * slack)

    def _between(self, low: float, high: float, slack: float, step: float, precision: float, *, bisect: bool) -> float:
        if not low:
            return max(high / (1 + 2 * step), high / 2)
        if high == self._most or not np.isfinite(self._excess[high]) or bisect:
            return min(low * (1 + step), (low * high) ** 0.5 if high < 4 * low else 2 * low)
        # Interpolate the rate at which the excess equals the slack. If this rate is too close to `low` or `high`, move
        # it away, but only so far that this step may end the search.
        at_low, at_high = self._excess[low], self._excess[high]
        rate = low + (high - low) * (slack - at_low) / (at_high - at_low)
        margin = 0.95 * precision * low
        if rate - low < margin:
            return low + min(margin, (high - low) / 2)
        return high - min(margin, (high - low) / 2) if high - rate < margin else rate


def rates_of_draws(
    plan: PlanDraft, profile: Profile, predicted: float, seeds: Iterable[int], precision: float, **how: Any
) -> Array:
    """Return the highest arrival rate with the requests that each seed draws. # [seeds]"""
    rates = []
    for seed in seeds:
        search = CapacitySearch(plan, profile, predicted, seed=seed, **how)
        search.precision = precision
        rates.append(search.lasting.rate)
    return np.array(rates)


def capacity(
    plan: PlanDraft,
    profile: Profile,
    predicted: float | None = None,
    *,
    edges: bool = True,
    least_share: float = LEAST_SHARE,
    precision: float = PRECISION,
) -> Capacity | None:
    """Return the highest arrival rate at which a plan keeps its bounds in simulation (see `CapacitySearch`)."""
    if not plan.constraint.bounds_latency:
        return None
    if plan.workload.sessions is not None:
        trial = SessionTrial(plan, profile)
        return session_capacity(trial, trial.highest(predicted and predicted / trial.turns))[0]
    search = CapacitySearch(plan, profile, predicted, least_share=least_share)
    search.precision = precision
    return search.found(edges=edges)


def sustains(plan: PlanDraft, profile: Profile, rate: float) -> bool:
    """Return whether a plan's capacity is at least a rate of requests, by simulating this rate alone."""
    least = LASTING_REQUESTS if is_counted(plan) else LEAST_REQUESTS
    return CapacitySearch(plan, profile, least_requests=least).keeps(rate)


def _wait_s(plan: PlanDraft, throughput: float) -> float:
    """Return the quantile of requests' waiting times, in s, at a rate `PRECISION` below saturation.

    In heavy traffic, P(wait > t) = exp(-2 (1 - load) X t / (1 + s^2)), where X is the throughput and s the coefficient
    of variation of output lengths.
    """
    lengths, shares = np.asarray(plan.workload.output.lengths, float), np.asarray(plan.workload.output.probabilities)
    variation = float(shares @ lengths**2 / (shares @ lengths) ** 2) - 1
    return -log(1 - plan.constraint.quantile) / PRECISION * (1 + variation) / 2 / throughput


def _follows_bounds(plan: PlanDraft) -> bool:
    return getattr(plan.policy, "slack", None) is not None


def _slack(plan: PlanDraft) -> float:
    return 1 / (1 + plan.constraint.headroom)


def _in_ns(goal: Goal, slack: float, path_s: float, num_requests: float) -> GoalNs:
    """A request spends a further `path_s` outside the engine."""
    bounds = ((goal.latency_bound_s, path_s), (goal.ttft_s, path_s), (goal.tpot_s, 0.0))
    whole, ttft, gap = (inf if bound is None else 1e9 * (slack * bound - outside) for bound, outside in bounds)
    return GoalNs(whole, ttft, gap, floor((1 - goal.quantile) * num_requests + 1e-9))


class EngineRun:
    """A run of the simulated engine, for plans that `xsimulator.counts` cannot simulate."""

    def __init__(self, schedule: policies.Schedule, lanes: Mapping[StageLane, LaneCost], stream: Stream) -> None:
        clock = (
            LaneClock(lanes["both"], schedule)
            if "both" in lanes
            else TwoLaneClock(lanes["encode"], lanes["decode"], schedule)
        )
        columns = np.broadcast_arrays(stream.inputs, stream.max_output, stream.outputs, stream.arrivals_ns)
        lengths = zip(*(column.tolist() for column in columns), strict=True)
        self._requests = [SimulatedRequest(i, *values) for i, values in enumerate(lengths)]
        self._tokens = np.asarray(stream.tokens if len(stream.tokens) else stream.outputs).tolist()
        self._engine = SimulatedEngine(schedule, clock, self._requests)
        self._emits = schedule.pool.encode_emits
        self.first_ns, self.end_ns = ([-1] * len(self._requests) for _ in range(2))

    def run(self, limits: KeptBounds | None = None) -> bool:
        goals, first, last = limits or ((), 0, len(self._requests))
        broken, left = [0] * len(goals), last - first
        while left and (record := self._engine.step()) is not None:
            self._note_first_tokens(record)
            for id_ in record.finished:
                self.end_ns[id_] = record.end_ns
                if not first <= id_ < last:
                    continue
                left -= 1
                for i, goal in enumerate(goals):
                    broken[i] += self._breaks(id_, goal)
                    if broken[i] > goal.most_broken:
                        return False
        return True

    def _note_first_tokens(self, record: StepRecord) -> None:
        requests = self._requests
        ends = [i for i, start, length in record.encode if start + length == requests[i].input_length]
        for id_ in ends if self._emits else reversed(record.decode):
            if self.first_ns[id_] < 0:
                self.first_ns[id_] = record.end_ns
            elif not self._emits:
                break  # requests that have just joined are at the end

    def _breaks(self, id_: int, goal: GoalNs) -> bool:
        request, first_ns, end_ns = self._requests[id_], self.first_ns[id_], self.end_ns[id_]
        gaps = goal.gap_ns * max(1, self._tokens[id_] - 1)  # an output of one token has no gap
        whole_ns, waited_ns = end_ns - request.arrival_ns, first_ns - request.arrival_ns
        return whole_ns > goal.whole_ns or waited_ns > goal.first_ns or end_ns - first_ns > gaps
