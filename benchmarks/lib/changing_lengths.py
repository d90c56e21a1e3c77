"""Run requests whose lengths change during a run with re-planning, on the simulated clock or on a real server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import httpx

from xgpt.benchmark import served
from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.core import policies
from xgpt.core.io import read_step_log
from xgpt.core.schema import Decision, Histogram, ModelSpec, Plan, Profile, Workload
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import quantile, sample
from xgpt.observation.observer import Observer
from xgpt.observation.windows import Seen
from xscheduler.replanning.replanner import propose
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.measures import Measured, measure
from xsimulator.run import clock_of, outstanding_requests

PLANNING_S = 1.0
"""Simulated time from an observation to the new plan, as long as planning takes beside a busy engine."""


TIE = 1e-3
"""If two tokens' log probabilities differ by at most this, either may be the likelier one in another batch."""


class Phase(NamedTuple):
    workload: Workload
    num_requests: int


@dataclass
class Run:
    """The results of a run.

    Attributes:
        changes: (number of ended requests, decision) for each time that the plan was judged.
        num_lost: number of requests without an answer, or with another output length than requested.
        num_wrong: number of requests with a token that differs from the expected one and is less probable.
        slowdown: measured time of the steps divided by the profile's, at the end of the run.
    """

    log: list[StepRecord]
    changes: list[tuple[int, Decision]] = field(default_factory=list)
    num_lost: int = 0
    longest_look_s: float = 0.0
    slowdown: float = 1.0
    tokens: list[list[int]] = field(default_factory=list)
    num_wrong: int = 0

    def tail(self, plan: Plan, workload: Workload, skip: int, count: int) -> Measured:
        q = plan.constraint.quantile
        return measure(
            self.log,
            quantile=q,
            quantile_output=quantile(workload.output, q),
            skip_requests=skip,
            num_requests=count,
        )


def requests_of(phases: Sequence[Phase], rng: np.random.Generator) -> Iterator[SimulatedRequest]:
    """Yield the requests of all phases in order. The maximum output of a request is the longest output of its phase."""
    id_ = 0
    for workload, count in phases:
        for input_, output in zip(*sample(workload, count, rng, stratified=False), strict=True):
            yield SimulatedRequest(id_, int(input_), workload.output.lengths[-1], int(output))
            id_ += 1


class _SimulatedWatch:
    """Does on the simulated clock what `xrunner.server.observe.watch` does in a server.

    Args:
        slowdown: ratio of the simulated machine's step times to the profile's.
    """

    def __init__(self, plan: Plan, profile: Profile, slowdown: float) -> None:
        self.decided: list[tuple[int, Decision]] = []
        self._observer = Observer(plan)
        self._profile = profile
        self._slowdown = slowdown
        self._seen: dict[int, Seen] = {}
        self._num_ended = 0
        self._due: tuple[float, Plan | None] | None = None

    def note(self, record: StepRecord, engine: SimulatedEngine) -> None:
        observer = self._observer
        for arrival in record.arrivals:
            self._seen[arrival.id] = observer.window.arrive(
                arrival.arrival_ns / 1e9, arrival.input_length, arrival.max_output
            )
        ended = [id_ for id_, start, n in record.encode if start + n == self._seen[id_].input_length]
        for id_ in (*ended, *record.decode):
            self._seen[id_].generated += 1
        now_s = record.end_ns / 1e9
        step_s = (record.end_ns - record.start_ns) / 1e9
        if observer.pace.wants_step(step_s):
            observer.pace.note(now_s, step_s, step_s / self._slowdown * observer.plan.profile.slowdown)
        if self._due is not None and now_s >= self._due[0]:
            plan, self._due = self._due[1], None
            if plan is not None:
                assert engine.schedule.apply(policies.build(plan)), "only swaps can be simulated"
                observer.go_over_to(plan)
        for id_ in record.finished:
            observer.end(self._seen.pop(id_))
            self._num_ended += 1
        if self._due is None and observer.is_due(now_s):
            now = observer.snapshot()
            if now is not None and (observation := observer.look(now)) is not None:
                decision, plan = propose(observer.plan, self._profile, observation)
                self.decided.append((self._num_ended, decision))
                self._due = now_s + PLANNING_S, plan


def simulated(
    plan: Plan,
    profile: Profile,
    phases: Sequence[Phase],
    rng: np.random.Generator,
    *,
    replan: bool = True,
    slowdown: float = 1.0,
) -> Run:
    """Run a closed loop that keeps the engine saturated, on the simulated clock."""
    schedule = policies.build(plan)
    requests = requests_of(phases, rng)
    engine = SimulatedEngine(schedule, clock_of(plan, profile.slowed(slowdown), schedule), [])
    for request in islice(requests, outstanding_requests(plan)):
        engine.submit(request)
    watch = _SimulatedWatch(plan, profile, slowdown) if replan else None
    log = []
    while (record := engine.step()) is not None:
        log.append(record)
        for _ in record.finished:
            if (further := next(requests, None)) is not None:
                engine.submit(further._replace(arrival_ns=record.end_ns))
        if watch is not None:
            watch.note(record, engine)
    ended = {id_ for record in log for id_ in record.finished}
    num_lost = sum(phase.num_requests for phase in phases) - len(ended)
    return Run(log, [] if watch is None else watch.decided, num_lost, slowdown=slowdown)


def real(
    plan: Plan,
    phases: Sequence[Phase],
    rng: np.random.Generator,
    *,
    replan: bool = True,
    expected: Sequence[Sequence[int]] | None = None,
) -> Run:
    """Run the same loop through `xgpt serve` in a separate process.

    Args:
        expected: tokens of each request in another run. None means that tokens are not compared.
    """
    import httpx

    requests = [
        ClientRequest(rng.integers(3, plan.model.vocab_size, r.input_length).tolist(), r.output_length, r.max_output)
        for r in requests_of(phases, rng)
    ]
    with tempfile.TemporaryDirectory() as directory:
        step_log = Path(directory) / "steps.jsonl"
        with served(plan, Path(directory), step_log, replan=replan) as url, httpx.Client(trust_env=False) as client:
            loop = replay(url, requests, concurrency=outstanding_requests(plan), stream=False)
            results = asyncio.run(loop)
            history = client.get(f"{url}/plan/history").json()
            observed = client.get(f"{url}/plan").json()["observed"]
            metrics = client.get(f"{url}/metrics").text
            others = zip(requests, results, expected or (), strict=False)
            wrong = sum(_is_wrong(client, url, request, result.token_ids, want) for request, result, want in others)
        log = read_step_log(step_log)
    look = [float(line.split()[1]) for line in metrics.splitlines() if line.startswith("xgpt_look_seconds_max")]
    lost = sum(is_lost(result, request) for result, request in zip(results, requests, strict=True))
    changes = [(0, Decision.model_validate(entry)) for entry in history if entry["action"] != "failed"]
    tokens = [result.token_ids for result in results]
    return Run(log, changes, lost, max(look, default=0.0), observed["slowdown"] or 1.0, tokens, wrong)


def _is_wrong(
    client: httpx.Client, url: str, request: ClientRequest, tokens: Sequence[int], expected: Sequence[int]
) -> bool:
    """Return whether tokens differ from the expected ones, and the first different token is clearly less probable."""
    at = next((i for i, (one, other) in enumerate(zip(tokens, expected, strict=True)) if one != other), None)
    if at is None:
        return False
    body = {"prompt": list(request.prompt_ids), "max_tokens": at + 1, "logprobs": 2, "ignore_eos": True}
    [choice] = client.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"]
    first, second = sorted(choice["logprobs"]["top_logprobs"][at].values(), reverse=True)[:2]
    return bool(first - second > TIE)


def is_lost(result: ClientResult, request: ClientRequest) -> bool:
    return result.error is not None or result.num_tokens != request.output_length


def scaled(workload: Workload, factor: float, spec: ModelSpec) -> Workload:
    parts = {}
    for name in ("input", "output"):
        histogram: Histogram = getattr(workload, name)
        lengths = np.maximum(1, np.round(np.asarray(histogram.lengths) * factor)).astype(int)
        unique, index = np.unique(lengths, return_inverse=True)
        mass = np.bincount(index, histogram.probabilities)
        parts[name] = Histogram(lengths=tuple(unique.tolist()), probabilities=tuple((mass / mass.sum()).tolist()))
    scaled = Workload(name=f"{workload.name} x {factor:.3g}", **parts)
    assert scaled.input.lengths[-1] + scaled.output.lengths[-1] <= spec.max_context
    return scaled


def shifted(workload: Workload, *, mean: float = 1.0, sd: float = 1.0, skew: float = 0.0) -> Workload:
    """Return ExeGPT's shifts of output lengths: another mean, another spread, or another skewness with the same mean
    and spread.

    No length exceeds the workload's longest length. Source: ExeGPT sec. 7.6, Figure 11.
    """
    from scipy.stats import skewnorm

    lengths = np.asarray(workload.output.lengths, float)
    mass = np.asarray(workload.output.probabilities)
    centre = float(lengths @ mass)
    spread = float(np.sqrt(mass @ (lengths - centre) ** 2))
    unscaled = skewnorm(skew)
    scale = sd * spread / float(unscaled.std())
    location = mean * centre - scale * float(unscaled.mean())
    grid = np.arange(1, workload.output.lengths[-1] + 1)
    edges = np.concatenate([grid - 0.5, [grid[-1] + 0.5]])
    share = np.diff(skewnorm(skew, location, scale).cdf(edges))
    output = Histogram(lengths=tuple(grid.tolist()), probabilities=tuple((share / share.sum()).tolist()))
    parts = {f"mean x{mean:g}": mean != 1, f"sd x{sd:g}": sd != 1, f"skew {skew:+g}": skew != 0}
    name = ", ".join(part for part, differs in parts.items() if differs) or "normal"
    return Workload(name=name, input=workload.input, output=output)
