"""Compare a running server with its prediction by a short load, and say whether to keep its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from xgpt.calibrating import MeasuredLoad
from xgpt.client import served_model
from xgpt.comparing.current import is_model
from xgpt.connection import own_api_key, within
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import Constraint, Plan, Workload
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.tuning import CheckOutput, DrivenLoad
from xgpt.core.sessions import sample_of, turns_of
from xgpt.core.workload import TraceLengths
from xgpt.sessions import send_sessions, sessions_to_send
from xgpt.tuning.advice import advise, rate_of_candidate
from xgpt.tuning.driving import drive
from xgpt.tuning.metrics import read_page
from xgpt.tuning.problem import EngineProblem
from xscheduler.tuning.model import EngineModel, MeasuredTimes
from xscheduler.tuning.sessions import SessionModel
from xscheduler.tuning.tuner import Tuner
from xsimulator.capacity import Trial
from xsimulator.measures import RequestTimes
from xsimulator.session_rate import SharesKept, per_session, replay_sessions
from xsimulator.sessions import TurnTimes

SHARES = (0.5, 0.9)
"""Shares of the rate at which loads are sent: one without waiting shows the steps, one with waiting the queue."""
LEAST_REQUESTS, MOST_REQUESTS, LOAD_S = 40, 300, 30.0
"""Least and largest number of requests, or of sessions, of a load, and the seconds in which it arrives. Sessions arrive
over at least the time that one of them takes.
"""
ANSWER_S = 10.0


@dataclass(frozen=True)
class LoadToSend:
    """The loads that will be sent: for each rate, a number of requests, or of the sessions in `traces`."""

    url: str
    loads: tuple[tuple[float, int], ...]
    workload: Workload
    serving: float | None
    traces: tuple[TraceLengths, ...] = ()

    @property
    def text(self) -> str:
        what, turn = ("sessions", " a turn") if self.traces else ("requests", "")
        takes = [f"at least {_seconds(each):.0f} s" for each in self.traces]
        takes = takes or [f"{count / rate:.0f} s" for rate, count in self.loads]
        parts = [
            f"{count} {what} at {rate:.3g} a second ({seconds})"
            for (rate, count), seconds in zip(self.loads, takes, strict=True)
        ]
        prompt, output = self.workload.input.mean, self.workload.output.mean
        lengths = f"of about {prompt:.0f} prompt and {output:.0f} output tokens{turn}"
        return f"sends {' and '.join(parts)} {lengths} to {self.url}"


def _seconds(trace: TraceLengths) -> float:
    assert trace.timestamp_s is not None
    return float(np.bincount(trace.turns.session, trace.timestamp_s + trace.turns.pause_s).max())


def check(
    asked: EngineProblem,
    target: str | Sequence[MeasuredLoad],
    rate_per_s: float | None = None,
    *,
    may_send: Callable[[LoadToSend], bool] = lambda sending: True,
    served: str | None = None,
    seed: int = 0,
) -> CheckOutput:
    """Measure a server, or read what a benchmark measured, and return whether to keep the server's settings.

    Args:
        target: the server's URL, or loads that a benchmark measured at arrival rates.
        rate_per_s: the users' own rate. None means that at which the bounds are predicted to be kept.
        may_send: called before anything is sent. Nothing is sent if it returns False.
        served: name of the server's model (`served_by`). None means that the server is asked.

    Raises:
        InputError: the settings are not known, the server serves another model, or sessions fork.
        MachineError: nothing that answers is at the URL, the server is lost meanwhile, or nothing may be sent.
    """
    if asked.now is None or not asked.settings_now:
        kind = None if asked.now is None else asked.now.policy.kind
        raise InputError("plan", kind, "give the plan of an engine's own scheduler (policy chunked), or `current`")
    law, constraint, sending = asked.problem.workload.sessions, asked.problem.constraint, None
    if isinstance(target, str):
        served = _check_served(target, served_by(target) if served is None else served, asked.now)
        own = rate_per_s or rate_of(asked.now) / (1.0 if law is None else turns_of(law))
        if law is not None and own <= 0:
            raise InputError("arrival_rate_per_s", None, "the bounds are kept at no rate: give that of your sessions")
        sending = _sending(target, asked.problem.workload, own, seed)
        if not may_send(sending):
            raise MachineError("nothing was sent")
    elif law is not None:
        raise InputError("target", target[0].source, "it states no sessions: give the server's URL")
    sent = dict(zip((rate for rate, _ in sending.loads), sending.traces, strict=False)) if sending else {}
    model = (
        EngineModel(asked.problem, asked.prior, asked.settings_now)
        if law is None
        else SessionModel(asked.now, asked.problem.profile, asked.prior, sent)
    )
    tuner, now = Tuner(model, seed), model.nearest(asked.settings_now[0])
    before = rate_of_candidate(tuner.belief.draws, now)
    if sending is None:
        assert not isinstance(target, str)
        loads = tuple(_of_benchmark(load, constraint) for load in target)
    else:
        vocabulary = asked.problem.model.vocab_size
        loads = tuple(
            _driven(sending.url, sent[rate], constraint, rate, vocabulary)
            if sent
            else drive(
                sending.url, sending.workload, constraint, rate, vocabulary=vocabulary, seed=seed + i, most=count
            )
            for i, (rate, count) in enumerate(sending.loads)
        )
    predicted = tuple(
        _of_sessions(replay_sessions(asked.now, asked.problem.profile, sent[load.rate_per_s]), constraint)
        if sent
        else _predicted(model, now, load)
        for load in loads
    )
    for load in loads:
        tuner.tell_times(MeasuredTimes(now, load.rate_per_s, load.ttft_mean_s, load.tpot_mean_s))
    what = "requests/s" if law is None else "sessions/s"
    return CheckOutput(
        model=served or model.problem.model.name,
        loads=loads,
        predicted=predicted,
        bounds={name: value for name, value in _bounds(constraint).items() if value is not None},
        fit=tuner.fit._asdict(),
        rate_before=before,
        rate_after=rate_of_candidate(tuner.belief.draws, now),
        recommendation=advise(tuner, now, lambda index: asked.command_of(model.plan(index), is_now=index == now), what),
    )


def served_by(url: str) -> str:
    """Return the name of the model that the server at a URL serves."""

    async def ask() -> str:
        try:
            return await within(ANSWER_S, served_model(url, own_api_key()), f"{url} does not answer")
        except TimeoutError as error:
            raise MachineError(f"{error}; start the server, or correct the URL") from None

    return asyncio.run(ask())


def _check_served(url: str, name: str, now: Plan) -> str:
    known = {now.model.name, *(part for part in (now.checkpoint or "").rsplit("/", 1)[-1:] if part)}
    is_path = name == now.checkpoint
    if not is_path and not any(is_model(name, each) for each in known):
        raise InputError("target", name, f"the server at {url} serves it, but the plan is for {now.model.name}")
    return name


def _sending(url: str, workload: Workload, rate_per_s: float, seed: int) -> LoadToSend:
    page, law = read_page(url), workload.sessions
    least_s = LOAD_S
    if law is not None:
        sample = sample_of(law).turns
        least_s = max(LOAD_S, float(sample.pause_s.sum()) / sample.num_sessions)
    rates = [max(share * rate_per_s, 0.05) if law is None else share * rate_per_s for share in SHARES]
    loads = [(rate, min(MOST_REQUESTS, max(LEAST_REQUESTS, ceil(least_s * rate)))) for rate in rates]
    traces = tuple(
        sessions_to_send(law, count, rate, np.random.default_rng(seed + i))
        for i, (rate, count) in enumerate(loads)
        if law is not None
    )
    serving = None if page is None else page.outstanding
    return LoadToSend(url, tuple(loads), workload, serving, traces)


def _driven(url: str, trace: TraceLengths, constraint: Constraint, rate_per_s: float, vocabulary: int) -> DrivenLoad:
    run, num_failed, share = send_sessions(url, trace, vocabulary=vocabulary)
    figures: dict[str, Any] = {**_of_sessions(run, constraint), "reused_share": share}
    ended = run.trace.turns.num_sessions
    figures["share_kept"] *= ended / (ended + num_failed)
    return DrivenLoad(
        rate_per_s=rate_per_s,
        num_sessions=ended,
        num_requests=len(run.end_s),
        num_failed=num_failed,
        kept=figures["share_kept"] >= constraint.quantile,
        seconds=float(run.end_s.max()),
        **figures,
    )


def _of_sessions(run: TurnTimes, constraint: Constraint) -> dict[str, float]:
    turns = RequestTimes(run.ttft_s, run.tpot_s, run.whole_s)
    wait, time = (
        float(np.quantile(per_session(run, run.every, values), constraint.quantile))
        for values in (run.ttft_s, run.whole_s)
    )
    return _figures(turns, constraint) | {
        "share_kept": min(SharesKept.of(run, run.every, constraint)),
        "session_wait_quantile_s": wait,
        "session_time_quantile_s": time,
        "reused_share": run.reused_share,
    }


def _bounds(constraint: Constraint) -> dict[str, float | None]:
    return {
        "ttft_quantile_s": constraint.ttft_s,
        "tpot_quantile_s": constraint.tpot_s,
        "whole_quantile_s": constraint.latency_bound_s,
        "session_wait_quantile_s": constraint.session_wait_s,
        "session_time_quantile_s": constraint.session_time_s,
    }


def _of_benchmark(load: MeasuredLoad, constraint: Constraint) -> DrivenLoad:
    if load.rate_per_s is None:
        accepted = "it is a closed loop: give a result at an arrival rate (`vllm bench serve --request-rate`)"
        raise InputError("target", load.source, accepted)
    means: dict[str, Any] = {"ttft_mean_s": load.ttft_s, "tpot_mean_s": load.tpot_s}
    bounds = ((constraint.ttft_s, load.ttft_s), (constraint.tpot_s, load.tpot_s))
    return DrivenLoad(
        rate_per_s=load.rate_per_s,
        num_requests=len(load.inputs),
        num_failed=0,
        share_kept=0.0,
        kept=all(bound is None or mean <= bound for bound, mean in bounds),
        ttft_quantile_s=load.ttft_s,
        tpot_quantile_s=load.tpot_s,
        whole_quantile_s=0.0,
        seconds=len(load.inputs) / load.throughput_rps,
        **means,
    )


def _predicted(model: EngineModel, now: int, load: DrivenLoad) -> dict[str, float]:
    fit = model.unfitted
    plan = model.plan(now)
    trial = Trial(fit.of_plan(plan), fit.of_profile(model.problem.profile), least_requests=1000)
    times = trial.at(load.rate_per_s)
    assert times is not None
    return _figures(times, model.problem.constraint)


def _figures(times: RequestTimes, constraint: Constraint) -> dict[str, float]:
    gaps = times.tpot_s[times.tpot_s > 0]
    quantile = constraint.quantile
    return {
        "share_kept": times.goodput(constraint),
        "ttft_mean_s": float(times.ttft_s.mean()),
        "ttft_quantile_s": float(np.quantile(times.ttft_s, quantile)),
        "tpot_mean_s": float(gaps.mean()) if len(gaps) else 0.0,
        "tpot_quantile_s": float(np.quantile(gaps, quantile)) if len(gaps) else 0.0,
        "whole_quantile_s": float(np.quantile(times.whole_s, quantile)),
    }
