"""Simulate a plan's sessions, or drive sessions against a URL, and report the same figures of both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.benchmark import URL_VOCABULARY
from xgpt.client import ClientTurn, replay_sessions
from xgpt.connection import own_api_key
from xgpt.core.errors import InputError, MachineError
from xgpt.core.progress import Progress, silent
from xgpt.core.schema import Plan, PlanDraft, Profile, Workload
from xgpt.core.schema.documents import SessionsOutput
from xgpt.core.schema.workload import SessionLaw
from xgpt.core.sessions import draw_sessions
from xgpt.core.turns import Floats
from xgpt.core.workload import TraceLengths
from xgpt.requests import BenchRequest, LoadFields, SimulateRequest
from xgpt.resolve import in_sessions, load_sessions, workload_of
from xgpt.tuning.metrics import read_page
from xsimulator.measures import RequestTimes
from xsimulator.session_rate import SessionTrial, SharesKept, per_session
from xsimulator.session_rate import replay_sessions as replay_log
from xsimulator.sessions import TurnTimes, shared_tokens


@dataclass(frozen=True)
class SimulatedSessions:
    plan: PlanDraft
    output: SessionsOutput


def sessions_of(plan: Plan, workload: str | Workload | None) -> Workload | None:
    if workload is None:
        return plan.workload if plan.workload.sessions is not None else None
    found = workload_of(workload, plan.model)
    if found.sessions is None and plan.workload.sessions is not None and isinstance(workload, str):
        return in_sessions(workload)
    return found if found.sessions is not None else None


def simulate_sessions(plan: Plan, profile: Profile, workload: Workload, request: SimulateRequest) -> SimulatedSessions:
    """Simulate sessions that begin at a rate, or those of a log as they were recorded."""
    for name, unset in (("clients", None), ("since_s", 0.0), ("rule", None), ("rate", 1.0), ("outputs", 1.0)):
        if (value := getattr(request, name)) != unset:
            raise InputError(name, value, "it applies only to independent requests: leave it out")
    draft: PlanDraft = plan.but(workload=workload)
    if request.own_times:
        log = load_sessions(request.workload) if isinstance(request.workload, str) else None
        if log is None or log.sessions is None:
            raise InputError("own_times", True, "it needs a log with sessions as `workload`")
        run = replay_log(draft, profile, log)
        seconds = float(log.timestamp_s[-1]) if log.timestamp_s is not None else 0.0
        of_log = log.sessions.num_sessions / seconds if seconds else 0.0
        return SimulatedSessions(draft, sessions_output(run, run.every, of_log, draft))
    promised = None if plan.estimate.sessions is None else plan.estimate.sessions.rate_per_s
    rate = one_rate(request) or promised
    if rate is None:
        raise InputError("arrival_rate_per_s", None, "give the rate at which sessions begin")
    trial = SessionTrial(draft, profile, request.seed)
    run, _, counts = trial.at(rate)
    return SimulatedSessions(draft, sessions_output(run, counts, rate, draft))


def one_rate(request: LoadFields) -> float | None:
    rate = request.arrival_rate_per_s
    if isinstance(rate, tuple) and len(rate) == 1 and rate[0][1] is None:
        return rate[0][0]
    if isinstance(rate, tuple):
        raise InputError("arrival_rate_per_s", rate, "give one rate, of sessions that begin in a second")
    return rate


def sessions_output(run: TurnTimes, counts: np.ndarray, rate: float, plan: PlanDraft | None = None) -> SessionsOutput:
    wait, time, paused = (per_session(run, counts, values) for values in (run.ttft_s, run.whole_s, run.paused_s))
    lives = time + paused
    at_once = rate * float(lives.mean())
    if counts.all():  # a whole run, which begins and ends without sessions
        at_once = float(lives.sum() / (run.end_s.max() - run.arrived_s.min()))
    of_turns = RequestTimes(run.ttft_s[counts], run.tpot_s[counts], run.whole_s[counts])
    kept: dict[str, float] = {}
    if plan is not None:
        turns, sessions = SharesKept.of(run, counts, plan.constraint)
        kept |= {"goodput": turns} if plan.constraint.goals else {}
        kept |= {"goodput_of_sessions": sessions} if any(plan.constraint.session_bounds) else {}
    return SessionsOutput(
        sessions_per_s=rate,
        num_sessions=len(wait),
        num_turns=int(counts.sum()),
        at_once=at_once,
        reused_share=run.reused_share,
        reused_by_turn=tuple(run.reused_by_turn()),
        ttft_s=_quantiles(of_turns.ttft_s),
        tpot_s=_quantiles(of_turns.tpot_s[of_turns.tpot_s > 0]),
        wait_s=_quantiles(wait),
        time_s=_quantiles(time),
        **kept,
    )


def sessions_to_send(
    law: SessionLaw, count: int, rate: float | None, rng: np.random.Generator, pauses: float = 1.0
) -> TraceLengths:
    """Draw sessions that begin at a rate, or all at once.

    Raises:
        InputError: sessions fork.
    """
    if law.subagents is not None:
        raise InputError("workload", "subagents", "sessions that fork cannot be sent: leave `subagents` out of the law")
    trace = draw_sessions(law, count, rng)
    sessions = trace.turns
    times = np.zeros(len(trace.input))
    times[sessions.first] = 0.0 if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return trace._replace(timestamp_s=times, sessions=replace(sessions, pause_s=pauses * sessions.pause_s))


class SentSessions(NamedTuple):
    """What a client measured of the sessions that ended.

    Attributes:
        run: its `cached` is the same share of each prompt.
        reused_share: share of prompt tokens that the server found in its cache, or None if it does not say.
    """

    run: TurnTimes
    num_failed: int
    reused_share: float | None


def send_sessions(
    url: str,
    trace: TraceLengths,
    *,
    vocabulary: int = URL_VOCABULARY,
    ca_file: Path | None = None,
    progress: Progress = silent,
) -> SentSessions:
    """Drive sessions against a running endpoint, each in a loop of its own, with tokens that were not sent before.

    Raises:
        MachineError: nothing answers at the URL, or every session failed.
    """
    sessions, count = trace.turns, trace.turns.num_sessions
    assert trace.timestamp_s is not None
    rng = np.random.default_rng()  # a server keeps the K/V of earlier runs
    shared = rng.integers(3, vocabulary, shared_tokens(trace)).tolist()
    pauses = np.append(sessions.pause_s[1:], 0.0)
    turns: list[list[ClientTurn]] = [[] for _ in range(count)]
    for i, number in enumerate(sessions.session.tolist()):
        first = not turns[number]
        kept = int(sessions.common[i])
        added = rng.integers(3, vocabulary, int(trace.input[i]) - kept).tolist()
        turns[number].append(ClientTurn(shared * first + added, int(trace.output[i]), float(pauses[i]), kept))
    before = read_page(url)
    results = asyncio.run(
        replay_sessions(
            url,
            turns,
            trace.timestamp_s[sessions.first].tolist(),
            ca_file=ca_file,
            api_key=own_api_key(),
            progress=lambda ended: progress(ended, count, f"{count} sessions"),
        )
    )
    after, ended = read_page(url), [i for i, each in enumerate(results) if all(one.error is None for one in each)]
    if not ended:
        raise MachineError(f"all {count} sessions at {url} failed: {results[0][-1].error}")
    mine = trace.take(np.flatnonzero(np.isin(sessions.session, ended)))
    flat = [one for i in ended for one in results[i]]
    arrived, first_s, end = (
        np.asarray([getattr(one, name) for one in flat], float) for name in ("send_s", "first_token_s", "end_s")
    )
    seen = {} if before is None or after is None else after.since(before).counters
    share = seen.get("hits", 0.0) / seen["queries"] if seen.get("queries") else None
    run = TurnTimes(mine, arrived, first_s, end, ((share or 0.0) * mine.input).astype(int))
    return SentSessions(run, count - len(ended), share)


def bench_sessions(url: str, workload: Workload, request: BenchRequest, progress: Progress) -> SessionsOutput:
    """Drive sessions of a law against a running endpoint, and return what the client measured. `num_requests` is the
    number of sessions, and `arrival_rate_per_s` the rate at which they begin.

    Raises:
        InputError: an option has no meaning for sessions, or sessions fork.
        MachineError: nothing answers at the URL, or every session failed.
    """
    law, rate, count = workload.sessions, one_rate(request), request.num_requests or NUM_SESSIONS
    assert law is not None
    rng = np.random.default_rng(request.seed)
    trace = sessions_to_send(law, count, rate, rng, request.pauses)
    run, _, share = send_sessions(url, trace, ca_file=request.ca_file, progress=progress)
    output = sessions_output(run, run.every, rate or count / float(run.end_s.max()))
    return output.but(reused_share=share or 0.0, reused_by_turn=())


NUM_SESSIONS = 40


def _quantiles(values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    return {"mean": float(values.mean())} | {f"p{100 * q:g}": float(np.quantile(values, q)) for q in (0.5, 0.9, 0.99)}
