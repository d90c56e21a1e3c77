"""Compare a running server with its prediction by a short load, and say whether to keep its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from xgpt.calibrating import MeasuredLoad
from xgpt.client import served_model
from xgpt.comparing.current import is_model
from xgpt.connection import own_api_key, within
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import Constraint, Plan, Workload
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.tuning import CheckOutput, DrivenLoad
from xgpt.tuning.advice import advise, rate_of_candidate
from xgpt.tuning.driving import drive
from xgpt.tuning.metrics import read_page
from xgpt.tuning.problem import EngineProblem
from xscheduler.tuning.model import EngineModel, MeasuredTimes
from xscheduler.tuning.tuner import Tuner
from xsimulator.capacity import Trial
from xsimulator.measures import RequestTimes

SHARES = (0.5, 0.9)
"""Shares of the rate at which loads are sent: one without waiting shows the steps, one with waiting the queue."""
LEAST_REQUESTS, MOST_REQUESTS, LOAD_S = 40, 300, 30.0
ANSWER_S = 10.0


@dataclass(frozen=True)
class LoadToSend:
    url: str
    loads: tuple[tuple[float, int], ...]
    workload: Workload
    serving: float | None

    @property
    def text(self) -> str:
        parts = [f"{count} requests at {rate:.3g} a second ({count / rate:.0f} s)" for rate, count in self.loads]
        means = self.workload.input.mean, self.workload.output.mean
        lengths = "of about {:.0f} prompt and {:.0f} output tokens".format(*means)
        return f"sends {' and '.join(parts)} {lengths} to {self.url}"


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
        InputError: the settings are not known, or the server serves another model.
        MachineError: nothing that answers is at the URL, the server is lost meanwhile, or nothing may be sent.
    """
    if asked.now is None or not asked.settings_now:
        kind = None if asked.now is None else asked.now.policy.kind
        raise InputError("plan", kind, "give the plan of an engine's own scheduler (policy chunked), or `current`")
    sending = None
    if isinstance(target, str):
        served = _check_served(target, served_by(target) if served is None else served, asked.now)
        sending = _sending(target, asked.problem.workload, rate_per_s or rate_of(asked.now))
        if not may_send(sending):
            raise MachineError("nothing was sent")
    model = EngineModel(asked.problem, asked.prior, asked.settings_now)
    tuner, now = Tuner(model, seed), model.nearest(asked.settings_now[0])
    before = rate_of_candidate(tuner.belief.draws, now)
    if sending is not None:
        constraint, vocabulary = model.problem.constraint, model.problem.model.vocab_size
        loads = tuple(
            drive(sending.url, sending.workload, constraint, rate, vocabulary=vocabulary, seed=seed + i, most=count)
            for i, (rate, count) in enumerate(sending.loads)
        )
    else:
        assert not isinstance(target, str)
        loads = tuple(_of_benchmark(load, model.problem.constraint) for load in target)
    predicted = tuple(_predicted(model, now, load) for load in loads)
    for load in loads:
        tuner.tell_times(MeasuredTimes(now, load.rate_per_s, load.ttft_mean_s, load.tpot_mean_s))
    return CheckOutput(
        model=served or model.problem.model.name,
        loads=loads,
        predicted=predicted,
        fit=tuner.fit._asdict(),
        rate_before=before,
        rate_after=rate_of_candidate(tuner.belief.draws, now),
        recommendation=advise(tuner, now, lambda index: asked.command_of(model.plan(index), is_now=index == now)),
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


def _sending(url: str, workload: Workload, rate_per_s: float) -> LoadToSend:
    page = read_page(url)
    loads = []
    for share in SHARES:
        rate = max(share * rate_per_s, 0.05)
        loads.append((rate, min(MOST_REQUESTS, max(LEAST_REQUESTS, ceil(LOAD_S * rate)))))
    serving = None if page is None else page.outstanding
    return LoadToSend(url, tuple(loads), workload, serving)


def _of_benchmark(load: MeasuredLoad, constraint: Constraint) -> DrivenLoad:
    if load.rate_per_s is None:
        accepted = "it is a closed loop: give a result at an arrival rate (`vllm bench serve --request-rate`)"
        raise InputError("target", load.source, accepted)
    means = {"ttft_mean_s": load.ttft_s, "tpot_mean_s": load.tpot_s}
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
