"""Find by simulation the highest rate of sessions at which a plan keeps its bounds.

Every rate is simulated with the same sessions, again and again, whose starts are scaled to the rate. One replica is
simulated with its share of the sessions: all turns of a session go to the replica of its first turn.

A rate just above what is kept for ever is kept for many lives of a session, until evictions have made more of them. So
runs are long, and sessions may hardly pile up in them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema import Capacity, Constraint, PlanDraft, Profile
from xgpt.core.schema.estimate import SessionEstimate
from xgpt.core.schema.workload import SessionLaw
from xgpt.core.sessions import repeated, sample_of, turns_of
from xgpt.core.turns import FIRST, Floats, Ints
from xgpt.core.workload import TraceLengths
from xsimulator.benchmarked import times_at
from xsimulator.costs.step_cost import lanes_of
from xsimulator.measures import RequestTimes
from xsimulator.session_routes import Route, counts_routes, run_routed
from xsimulator.sessions import TurnTimes, counted_turns, run_sessions, shared_tokens


class RunLength(NamedTuple):
    """How long a run is. The first and the last quarter of its sessions do not count.

    Attributes:
        samples: it repeats the law's sample (`sample_of`) at least so many times, a multiple of four.
        lives: sessions begin over at least so many times the mean life of a session, if `most_turns` permits.
        most_turns: the largest number of turns, unless `LEAST_SAMPLES` have more.
        piled_up: the largest share of sessions that may begin and not end. In short runs, it varies by chance.
    """

    samples: int
    lives: float
    most_turns: int
    piled_up: float

    def samples_for(self, life: float, turns: int) -> int:
        """Return the number of samples of `turns` turns, if a session lives for `life` samples."""
        most = max(LEAST_SAMPLES, self.most_turns // turns // 4 * 4)
        return min(max(self.samples, 4 * ceil(self.lives * life / 4)), most)


LEAST_SAMPLES = 4
BY_COUNTS, ON_ENGINE = RunLength(16, 20.0, 240_000, 0.005), RunLength(LEAST_SAMPLES, 4.0, 60_000, 0.02)
STEADY = 2.5
"""A rate at which sessions begin over fewer lives counts as not kept, since the run never is in a steady state."""
FAR_OVER, FAR_PILED_UP = 1.5, 0.1
"""A run is made longer unless it is so many times over a bound, or this share of sessions do not end."""
PRECISION = 0.02
LEAST_SHARE = 1e-3
"""A plan that breaks its bounds at this share of its saturated throughput has no capacity."""
SEED = 0


@lru_cache(maxsize=8)
def _begun(law: SessionLaw, burstiness: float, copies: int, seed: int) -> tuple[TraceLengths, Floats]:
    """Return the sample's sessions again and again, and when they begin if one begins each second on average.
    # [sessions]
    """
    sample, rng = sample_of(law, seed), np.random.default_rng(seed)
    size = sample.turns.num_sessions
    starts_s = [size * copy + times_at(1.0, burstiness, size, rng) for copy in range(copies)]
    return repeated(sample, copies), np.concatenate(starts_s)


class SessionRun(NamedTuple):
    times: TurnTimes
    excess: float
    counts: np.ndarray


class SessionTrial:
    """Simulates the sessions that begin at one replica of a plan, at any rate.

    Args:
        route: simulate all replicas with this router instead. The plan must be one that `counts_routes`.
        keeps_nothing: whether every prompt is computed anew.
        from_host: whether turns load all K/V of their sessions from host memory (see `loads_s`). Sessions must not
            fork, and the plan must be one that can be counted.
        length: how long runs are. None: as long as they may be for what they cost.
    """

    def __init__(
        self,
        plan: PlanDraft,
        profile: Profile,
        seed: int = SEED,
        *,
        route: Route | None = None,
        keeps_nothing: bool = False,
        from_host: bool = False,
        length: RunLength | None = None,
    ) -> None:
        law = plan.workload.sessions
        assert law is not None
        self.plan, self.profile, self._law, self._seed = plan, profile, law, seed
        self._lanes = lanes_of(plan, profile)
        self._sample, self.turns = sample_of(law, seed), turns_of(law)
        self._route, self._from_host, self._keeps_nothing = route, from_host, keeps_nothing
        self.length = length or (BY_COUNTS if counts_routes(plan) else ON_ENGINE)
        self._known: dict[float, SessionRun] = {}

    def at(self, rate: float) -> SessionRun:
        """Return a run in which `rate` sessions a second begin at all replicas together."""
        if rate not in self._known:
            scale, turns = (self.plan.replicas if self._route is None else 1) / rate, len(self._sample.input)
            each_s, copies, enough = self._sample.turns.num_sessions * scale, 0, LEAST_SAMPLES
            while copies < enough:
                copies = enough
                run, counts = self._run(scale, copies)
                life_s = float(per_session(run, counts, run.whole_s + run.paused_s).mean())
                excess, piled_up = _excess(run, counts, self.plan.constraint), _pile_up(run, copies * each_s)
                if excess < FAR_OVER and piled_up < FAR_PILED_UP:
                    enough = self.length.samples_for(life_s / each_s, turns)
            if copies * each_s < STEADY * life_s or piled_up > self.length.piled_up:
                excess = np.inf
            self._known[rate] = SessionRun(run, excess, counts)
        return self._known[rate]

    def _run(self, scale: float, copies: int) -> tuple[TurnTimes, np.ndarray]:
        trace, starts_s = _begun(self._law, self.plan.constraint.burstiness, copies, self._seed)
        if self._keeps_nothing:
            none = replace(trace.turns, common=np.zeros_like(trace.turns.common))
            trace = trace._replace(sessions=none)
        sent = _turned(trace, starts_s * scale, len(starts_s) * scale)
        if self._from_host:
            run = self._loaded(sent, trace.turns.common, loads_s(self.plan, trace))
        elif self._route is None:
            run = run_sessions(self.plan, self.profile, sent, lanes=self._lanes)
        else:
            run = run_routed(self.plan, self.profile, sent, self._route, self._lanes)
        number, count = trace.turns.session, len(starts_s)
        return replace(run, trace=trace), (number >= count // 4) & (number < 3 * count // 4)

    @property
    def most_share(self) -> float:
        """Share of prompt tokens that turns would find if nothing were evicted."""
        most = np.minimum(self._sample.turns.common, self._sample.input - 1)
        return float(most.sum() / self._sample.input.sum())

    def _loaded(self, sent: TraceLengths, common: Ints, loads_s: Floats) -> TurnTimes:
        """A turn's K/V is loaded before the turn waits, and the load is part of its waiting."""
        pauses = sent.turns.pause_s + loads_s
        later = sent._replace(sessions=replace(sent.turns, pause_s=pauses, common=common))
        run = counted_turns(self.plan, self._lanes, later, from_host=True)
        assert run is not None
        return replace(run, trace=sent, arrived_s=run.arrived_s - loads_s)

    def keeps(self, rate: float) -> bool:
        return self.at(rate).excess <= 1 / (1 + self.plan.constraint.headroom)

    def highest(self, guess: float | None = None, precision: float = PRECISION) -> float:
        """Return the highest simulated rate that keeps the bounds, or 0. At a rate higher by `precision`, it does
        not.
        """
        low, high, rate = 0.0, np.inf, guess or 0.5 * self.plan.estimate.throughput_rps / self.turns
        while high > (1 + precision) * low:
            if self.keeps(rate):
                low = rate
            else:
                high = rate
            if high < LEAST_SHARE * self.plan.estimate.throughput_rps / self.turns:
                return 0.0
            rate = 1.3 * low if high == np.inf else 0.6 * high if not low else (low * high) ** 0.5
        return low


def _turned(trace: TraceLengths, starts_s: Floats, span_s: float) -> TraceLengths:
    """Return sessions that begin at these times. In a steady state, sessions that began long ago send turns, too. So a
    turn before which its session has paused for a quarter of the run, or for a further one, arrives as if an earlier
    session sent it: at its time modulo the run's, and without what is kept of the turn before it.

    Args:
        starts_s: # [sessions]
        span_s: seconds of the run.
    """
    turns, first = trace.turns, trace.turns.after == FIRST
    paused, before = turns.pause_s, turns.after
    while (before != FIRST).any():  # each step doubles the number of turns whose pauses are summed
        paused = paused + np.where(before == FIRST, 0.0, paused[before])
        before = np.where(before == FIRST, FIRST, before[before])
    quarter = np.floor(4 * paused / span_s)
    cut = ~first & (quarter != quarter[turns.after])
    begun = np.where(first | cut, (starts_s[turns.session] + np.where(cut, paused, 0.0)) % span_s, 0.0)
    after = np.where(cut, FIRST, turns.after)
    root = np.where(after == FIRST, np.arange(len(after)), after)
    while (root != root[root]).any():
        root = root[root]
    apart = (turns.like == FIRST) | (root[turns.like] != root)
    like, common = np.where(apart, FIRST, turns.like), np.where(apart, shared_tokens(trace), turns.common)
    number = (np.cumsum(after == FIRST) - 1)[root]
    sessions = replace(turns, session=number, after=after, like=like, common=common)
    return trace._replace(timestamp_s=begun, sessions=sessions)


def _excess(times: TurnTimes, counts: np.ndarray, constraint: Constraint) -> float:
    of_turns = RequestTimes(times.ttft_s[counts], times.tpot_s[counts], times.whole_s[counts])
    found = [float(np.quantile(of_turns.excess(goal), goal.quantile)) for goal in constraint.goals]
    for bound, values in zip(constraint.session_bounds, (times.ttft_s, times.whole_s), strict=True):
        if bound is not None:
            found.append(float(np.quantile(per_session(times, counts, values), constraint.quantile)) / bound)
    return max(found)


def _pile_up(times: TurnTimes, span_s: float) -> float:
    """Return the share of sessions that begin but do not end. If sessions take longer and longer, by s seconds in each
    second, 1 / (1 + s) of them end. Each session is compared with itself, a quarter of the run later.
    """
    second, third = np.split(times.of_sessions(times.whole_s), 4)[1:3]
    return float((third - second).mean()) / (span_s / 4)


def loads_s(plan: PlanDraft, trace: TraceLengths) -> Floats:
    """Return the seconds in which each turn's K/V comes from host memory, each device over its own link. Loads do not
    wait for each other, and slow no step; what is still in device memory is loaded, too. # [turns]
    """
    sessions, link = trace.turns, plan.cluster.host
    assert link is not None
    tokens = np.where(sessions.after == FIRST, 0, np.maximum(sessions.common - shared_tokens(trace), 0))
    per_token_s = plan.model.kv_bytes_per_token(plan.precision.kv) / (
        link.bandwidth_bytes_per_s * plan.devices_per_replica
    )
    return np.where(tokens > 0, link.latency_s + tokens * per_token_s, 0.0)


class SharesKept(NamedTuple):
    """The shares of turns, and of sessions, that keep all their bounds."""

    turns: float
    sessions: float

    @classmethod
    def of(cls, times: TurnTimes, counts: np.ndarray, constraint: Constraint) -> SharesKept:
        of_turns, kept = RequestTimes(times.ttft_s[counts], times.tpot_s[counts], times.whole_s[counts]), np.array(True)
        for bound, values in zip(constraint.session_bounds, (times.ttft_s, times.whole_s), strict=True):
            if bound is not None:
                kept = kept & (per_session(times, counts, values) <= bound)
        return cls(of_turns.goodput(constraint), float(np.mean(kept)))


def replay_sessions(plan: PlanDraft, profile: Profile, trace: TraceLengths) -> TurnTimes:
    """Replay sessions, in turn on each replica. First turns begin at the trace's times."""
    if trace.timestamp_s is None:
        raise InputError("own_times", True, "the log has no times: give `arrival_rate_per_s`")
    count, lanes = len(trace.input), lanes_of(plan, profile)
    arrived, first, end = (np.full(count, np.nan) for _ in range(3))
    found = TurnTimes(trace, arrived, first, end, np.full(count, -1))
    for replica in range(plan.replicas):
        here = np.flatnonzero(trace.turns.session % plan.replicas == replica)
        if not len(here):
            continue
        run = run_sessions(plan, profile, trace.take(here), lanes=lanes)
        for name in ("arrived_s", "first_s", "end_s", "cached"):
            getattr(found, name)[here] = getattr(run, name)
    return found


def per_session(times: TurnTimes, counts: np.ndarray, values: Floats) -> Floats:
    """Return the sum of a figure over the turns of each session that counts. # [sessions]"""
    sessions = times.trace.turns
    return times.of_sessions(values)[np.unique(sessions.session[counts])]


def session_capacity(trial: SessionTrial, rate: float) -> tuple[Capacity, SessionEstimate | None]:
    """Return a plan's sessions at the highest rate that keeps its bounds, or None if it is 0."""
    capacity = Capacity(rate_per_s=0.0, whole_s=0.0, share_kept=0.0, num_requests=0, warm_up_requests=0, seed=SEED)
    if not rate:
        return capacity, None
    (times, _, counts), constraint = trial.at(rate), trial.plan.constraint
    wait, whole = (per_session(times, counts, values) for values in (times.ttft_s, times.whole_s))
    share = min(SharesKept.of(times, counts, constraint))
    whole_s = float(np.quantile(times.whole_s[counts], constraint.quantile))
    capacity = capacity.but(
        rate_per_s=rate * trial.turns,
        whole_s=whole_s,
        share_kept=share,
        num_requests=int(counts.sum()),
        warm_up_requests=int((~counts).sum()) // 2,
    )
    return capacity, SessionEstimate(
        rate_per_s=rate,
        at_once=rate * float((whole + per_session(times, counts, times.paused_s)).mean()),
        turns=trial.turns,
        reused_by_turn=tuple(times.reused_by_turn()),
        wait_s=float(np.quantile(wait, constraint.quantile)),
        time_s=float(np.quantile(whole, constraint.quantile)),
        kept_tokens=rate * float(per_session(times, counts, times.kept_token_s).mean()),
        num_sessions=len(wait),
    )
