"""Find the plan that serves the most sessions a second within the bounds, and prove how many no plan serves.

*Search.* How much of its prompt a turn finds depends on the plan and on the rate, and the rate on what turns find. So
for each number of replicas and several divisions of their memory, plans are ranked in closed form at the rate at which
both agree. The best are simulated with their sessions (`xsimulator.session_rate`), as are their neighbours.

*Ceiling.* A turn finds K/V only if it stayed in memory through the pause before the turn. By Little's law, sessions
that begin at rate r keep `r E[sum of found tokens x pause]` tokens on average, which is at most the memory M. So what
any rule of eviction saves is at most what the best fractional choice saves: turns in the order of the prefill time that
a kept token saves for each second that it is kept, up to M / r token-seconds a session. With these tokens found,
and memory for nothing but outputs, r times the turns of a session is at most a bound on the throughput at saturation,
as for requests (`xscheduler.arrival_bounds`). The highest rate at which both hold is found by bisection. It assumes
that the bounded quantile of a session's waiting is not below its mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.progress import Progress
from xgpt.core.schema import AdmissionOrder, Ceiling, Constraint, Pinned, PlanDraft, SearchMethod
from xgpt.core.schema.constraint import Objective
from xgpt.core.schema.policy import POLICY_GROUPS, PolicyChoice
from xgpt.core.sessions import sample_of, turns_of
from xgpt.core.turns import FIRST, Floats, Ints
from xgpt.core.workload import TraceLengths
from xscheduler.arrival_bounds import LEAST_QUANTILE, loosened
from xscheduler.arrival_rate import closed_rate, one_step_from
from xscheduler.found import Found
from xscheduler.objectives.arrivals import Arrivals
from xscheduler.objectives.base import simulating
from xscheduler.objectives.capacities import in_sessions
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler, scheduler
from xscheduler.space import run_by
from xsimulator.forecast import CHOICES
from xsimulator.lengths import Lengths, Reused, reused_of
from xsimulator.session_rate import PRECISION, SessionTrial

KINDS = tuple(kind for kind in CHOICES if kind in POLICY_GROUPS["auto"] and CHOICES[kind].stations.admits_each_step)
KEPT = (0.1, 0.4, 0.7)
"""Shares of each replica's K/V memory kept between turns, at which plans are ranked."""
AGREEING = 3
"""Steps in which a ranking's rate and what turns find at this rate come to agree."""
MOST_RANKED, MOST_MOVES = 2, 12
"""Plans of each ranking that are simulated, and moves to better neighbours."""
HALVINGS = 7
BOUND = "the throughput, by Little's law over sessions, if memory kept what saves most prefill"


def found_in_sessions(
    problem: Problem,
    policy: PolicyChoice = "auto",
    search: SearchMethod = "branch-and-bound",
    order: AdmissionOrder | None = None,
    progress: Progress | None = None,
) -> dict[str, Found]:
    """Return each policy's best schedule for sessions, the best of all first. Rates are in turns a second."""
    return _SessionSearch(problem, _kinds(problem, policy, order), search, progress).found(policy)


def _kinds(problem: Problem, policy: PolicyChoice, order: AdmissionOrder | None) -> tuple[str, ...]:
    if policy not in ("auto", *KINDS):
        says = f"sessions are planned under {' or '.join(KINDS)}: give one of them, or auto"
        raise InputError("policy", policy, says)
    if order not in (None, "fcfs"):
        raise InputError("order", order, "turns of sessions enter in order of arrival: leave it out")
    if not problem.constraint.maximises_arrivals:
        says = "sessions need a bound: give `ttft_s`, `tpot_s`, `latency_bound_s`, `session_wait_s` or `session_time_s`"
        raise InputError("workload", problem.workload.name, says)
    if problem.model.is_encoder_decoder or any(kind.recurrent is not None for kind in problem.model.kinds):
        says = f"engines keep no K/V of prompts for {problem.model.name}: plan its requests with another workload"
        raise InputError("workload", problem.workload.name, says)
    return run_by(problem.engine, problem.speculation, KINDS if policy == "auto" else (policy,), policy)


@dataclass(frozen=True)
class _KeptTurns:
    trace: TraceLengths
    shared: Ints
    own: Ints
    order: Ints
    token_s: Floats

    @classmethod
    def of(cls, problem: Problem) -> _KeptTurns:
        law = problem.workload.sessions
        assert law is not None
        trace = sample_of(law)
        sessions = trace.turns
        most = np.minimum(sessions.common, trace.input - 1)
        shared = np.minimum(most, law.shared_prefix)
        own = np.where(sessions.after == FIRST, 0, most - shared)
        token_s = own * sessions.pause_s
        saved = _prefill_s(problem, most) - _prefill_s(problem, shared)
        return cls(trace, shared, own, np.argsort(-saved / np.maximum(token_s, 1e-9), kind="stable"), token_s)

    @property
    def num_sessions(self) -> int:
        return self.trace.turns.num_sessions

    def found(self, token_s: float) -> Ints:
        left = min(token_s, 1e18) * self.num_sessions - np.cumsum(self.token_s[self.order]) + self.token_s[self.order]
        part = np.clip(left / np.maximum(self.token_s[self.order], 1e-9), 0.0, 1.0)
        found = self.shared.copy()
        found[self.order] += np.floor(part * self.own[self.order]).astype(int)
        return found

    def kept_longest(self, token_s: float) -> Ints:
        """Return what turns find if all that is kept stays equally long, as under LRU (Che's approximation), for
        `token_s` token-seconds a session.
        """
        sessions = self.trace.turns
        is_last = np.isin(np.arange(len(self.own)), sessions.after, invert=True)
        tokens = float((self.trace.input + self.trace.output - self.shared)[is_last].sum())
        kept_s = np.quantile(sessions.pause_s, np.linspace(0.0, 1.0, 200))
        needed = [tokens * each + float(self.own @ np.minimum(sessions.pause_s, each)) for each in kept_s]
        longest = np.interp(token_s * self.num_sessions, needed, kept_s)
        return self.shared + np.where(sessions.pause_s <= longest, self.own, 0)

    def reused(self, found: Ints, kept_tokens: float, *, holds_prompts: bool = True) -> Reused:
        most = float((self.shared + self.own).sum() / self.trace.input.sum())
        return reused_of(self.trace.input, found, kept_tokens, most, holds_prompts=holds_prompts)


def _prefill_s(problem: Problem, tokens: Ints) -> Floats:
    layer, sizes = problem.profile.layers[0], np.maximum(tokens, 1).astype(float)
    rest, attention = layer.rest, layer.encode_attention
    each = rest.seconds[-1] / rest.points[-1]
    lengths, seconds = np.asarray(attention.lengths, float), np.asarray(attention.seconds[0])
    beyond = np.maximum(sizes / lengths[-1], 1.0) ** 2
    found: Floats = each * sizes + np.interp(sizes, lengths, seconds) * beyond
    return found


def of_turns(problem: Problem) -> Constraint:
    """Return the bounds on single turns that take the place of bounds on sessions, in closed forms."""
    constraint, lengths, law = problem.constraint, Lengths(problem.workload), problem.workload.sessions
    assert law is not None
    found, turns = dict[str, float](), turns_of(law)
    if constraint.session_wait_s is not None:
        found["ttft_s"] = constraint.session_wait_s / turns
    if constraint.session_time_s is not None and lengths.mean_decodes > 0:
        found["tpot_s"] = constraint.session_time_s / turns / lengths.mean_decodes
    if constraint.quantile < LEAST_QUANTILE:
        found = {}
    means = {name: min(value, getattr(constraint, name) or np.inf) for name, value in found.items()}
    return constraint.but(session_wait_s=None, session_time_s=None, arrival_rate_per_s=None, **means)


class _SessionSearch:
    def __init__(self, problem: Problem, kinds: Sequence[str], search: SearchMethod, progress: Progress | None) -> None:
        law = problem.workload.sessions
        assert law is not None
        self._problem, self._kinds, self._search, self._progress = problem, kinds, search, progress
        self._num_turns, self._turns = turns_of(law), _KeptTurns.of(problem)
        self._of_turns = of_turns(scheduler(problem, search).problem)
        self._best: dict[str, tuple[SessionTrial, float]] = {}
        self._bounds: dict[bytes, float] = {}
        self._tried: set[object] = set()
        self._num_tried = 0

    def found(self, policy: PolicyChoice) -> dict[str, Found]:
        started = time.perf_counter()
        ceiling = self.ceiling()
        for kind, draft, rate in self._ranked():
            self._try(kind, draft, rate)
        for kind in self._kinds:
            self._climb(kind)
        kept = {kind: best for kind, best in self._best.items() if best[1] > 0}
        if not kept:
            raise self._never_kept()
        pinned = Pinned(policy=policy, fixed=dict(self._problem.fixed))
        ordered = sorted(kept.items(), key=lambda item: -item[1][1])
        asked = self._problem.constraint.arrival_rate_per_s
        if asked is not None and ordered[0][1][1] < asked / self._num_turns:
            raise InfeasibleError(
                f"arrival_rate_per_s: {asked / self._num_turns:.4g} sessions/s asked, but the best schedule found "
                f"keeps the bounds up to {ordered[0][1][1]:.4g}",
                binding="arrival_rate_per_s",
            )
        if ceiling.most is not None:  # more sessions may begin than end
            piled_up = max(trial.length.piled_up for trial, _ in kept.values())
            ceiling = Ceiling((1 + piled_up) * ceiling.most, ceiling.bound)
        effort = {"simulations": self._num_tried, "seconds": round(time.perf_counter() - started, 4)}
        drafts = {kind: in_sessions(trial, rate, decides=not i) for i, (kind, (trial, rate)) in enumerate(ordered)}
        return {
            kind: Found(draft.but(pinned=pinned, search=draft.search.but(**effort)), ceiling)
            for kind, draft in drafts.items()
        }

    def _ranked(self) -> Iterator[tuple[str, PlanDraft, float]]:
        for replicas, memory in self._memories.items():
            for share in KEPT:
                cached, rate, best = self._turns.found(np.inf), 0.0, dict[str, list[tuple[PlanDraft, float]]]()
                for _ in range(AGREEING):
                    reused = self._turns.reused(cached, share * memory / replicas)
                    problem = replace(self._at(reused, "arrivals"), replicas=replicas)
                    by = Arrivals(scheduler(problem, self._search))
                    ranked = {kind: by.of_kind(kind, MOST_RANKED) for kind in self._kinds}
                    highest = max((each[0][1] for each in ranked.values() if each), default=0.0)
                    if not highest:
                        break
                    best, rate = ranked, (rate * highest) ** 0.5 or highest
                    cached = self._turns.kept_longest(share * memory * self._num_turns / rate)
                yield from (
                    (kind, draft, rate / self._num_turns) for kind, each in best.items() for draft, rate in each
                )

    def _at(self, reused: Reused, objective: Objective) -> Problem:
        constraint = self._of_turns
        if objective == "saturated":
            constraint = loosened(constraint, Lengths(self._problem.workload, reused))
        return replace(self._problem, reused=reused, constraint=constraint.but(objective=objective))

    @cached_property
    def _by(self) -> Scheduler:
        return scheduler(replace(self._problem, constraint=self._of_turns), self._search)

    @cached_property
    def _memories(self) -> dict[int, float]:
        """K/V memory in tokens of all replicas together, at most, for each number of replicas."""
        found = dict[int, float]()
        for space in (space for kind in self._kinds for space in self._by.candidates.spaces(kind)):
            replicas, limits = space.placement.replicas, space.limits
            tokens = replicas * limits.block_size * float(limits.memory.blocks_beside(1.0)[0])
            found[replicas] = max(tokens, found.get(replicas, 0.0))
        return found

    @property
    def memory(self) -> float:
        return max(self._memories.values(), default=0.0)

    def ceiling(self) -> Ceiling:
        low, high = 0.0, self._bound(np.inf)
        if not np.isfinite(high):
            return Ceiling(None, "none: the throughput of single turns is not proven")
        rate = high
        for _ in range(HALVINGS):  # the first step tries whether memory limits the rate at all
            if self._bound(self.memory * self._num_turns / max(rate, 1e-9)) >= rate:
                low = rate
            else:
                high = rate
            if high <= (1 + PRECISION) * low:
                break
            rate = (low * high) ** 0.5 if low else high / 4
        return Ceiling(high, BOUND)

    def _bound(self, token_s: float) -> float:
        found = self._turns.found(token_s)
        if (key := found.tobytes()) not in self._bounds:
            self._bounds[key] = self._bound_if(found)
        return self._bounds[key]

    def _bound_if(self, cached: Ints) -> float:
        reused = self._turns.reused(cached, 0.0, holds_prompts=False)
        by = scheduler(self._at(reused, "saturated"), self._search)
        try:
            found = by.found(self._kinds)
        except InfeasibleError:
            return 0.0
        each = [by.ceiling_of(one, kind).most for kind, one in found.items()]
        return np.inf if None in each else max(one for one in each if one is not None)

    def _try(self, kind: str, draft: PlanDraft, guess: float) -> bool:
        key = draft.policy, draft.stages, draft.replicas
        if key in self._tried:
            return False
        self._tried.add(key)
        self._num_tried += 1
        if self._progress is not None:
            self._progress(min(self._num_tried, 40), 41, simulating("sessions"))
        effort = draft.search.but(space_size=self._by.candidates.num_points(kind))
        draft = draft.but(constraint=self._own(draft), search=effort)
        trial, best = SessionTrial(draft, self._problem.profile), self._best.get(kind)
        if best is not None and best[1] > 0 and not trial.keeps((1 + PRECISION) * best[1]):
            return False
        first = (1 + PRECISION) * best[1] if best is not None and best[1] > 0 else max(guess, 1e-9)
        rate = trial.highest(first)
        self._best[kind] = trial, rate
        return rate > 0

    def _own(self, draft: PlanDraft) -> Constraint:
        return self._problem.constraint.but(headroom=draft.constraint.headroom)

    def _climb(self, kind: str) -> None:
        reused = self._turns.reused(self._turns.found(np.inf), 0.0)
        by = scheduler(self._at(reused, "arrivals"))
        for _ in range(MOST_MOVES):
            if kind not in self._best:
                return
            trial, rate = self._best[kind]
            draft = trial.plan
            space = by.candidates.space(kind, Placement.of(draft))
            near = [by.draft_at(space, settings, draft.search) for settings in one_step_from(space, draft.policy)]
            ranked = sorted((one for one in near if one is not None), key=lambda one: -closed_rate(space, one.policy))
            better = [self._try(kind, one, rate) for one in ranked]
            if not any(better):
                return

    def _never_kept(self) -> InfeasibleError:
        constraint = self._problem.constraint
        given = {**constraint.bounds.given, "session_wait_s": constraint.session_wait_s}
        given["session_time_s"] = constraint.session_time_s
        binding = next((name for name, bound in reversed(given.items()) if bound is not None), "memory")
        where = f"on {self._problem.cluster.name}, waiting included"
        drafts = [trial.plan for trial, _ in self._best.values()]
        if not drafts:
            loose = self._of_turns.but(latency_bound_s=None, ttft_s=None, tpot_s=None, objective="saturated")
            by = scheduler(replace(self._problem, constraint=loose), self._search)
            drafts = [found.draft.but(constraint=self._own(found.draft)) for found in by.found(self._kinds).values()]
        lowest = min(self._at_rest(draft) for draft in drafts)
        kinds = ", ".join(self._kinds)
        says = f"{binding}: no schedule of {kinds} keeps the bounds {where}, even for one session at a time"
        nearest = lowest * (given[binding] or 0.0)
        return InfeasibleError(
            f"{says}; bounds {lowest:.3g} times as long can be kept", nearest_bound_s=nearest, binding=binding
        )

    def _at_rest(self, draft: PlanDraft) -> float:
        return SessionTrial(draft, self._problem.profile).at(1e-4).excess * (1 + draft.constraint.headroom)
