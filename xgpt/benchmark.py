"""Send a workload's requests to a served plan, and compare predicted with measured figures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.client import ClientRequest, ClientResult, busy_of_workers, replay
from xgpt.connection import own_api_key
from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import dump_json, read_step_log
from xgpt.core.policies import Rule
from xgpt.core.processes import end, end_with_parent, run_module
from xgpt.core.progress import Progress, silent
from xgpt.core.schema import (
    Batching,
    BenchReport,
    Comparison,
    CoreWaits,
    EngineKind,
    Plan,
    Profile,
    UrlReport,
    Workload,
)
from xgpt.core.schema.documents import SessionsOutput
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import ArrivalProcess, Floats, Ints, TraceLengths, sample
from xgpt.observation.paces import record, usual
from xgpt.resolve import load_workload
from xgpt.rules import name_of
from xprofiler.others import differences, gflops
from xprofiler.store import profile_of
from xsimulator.calibrate import calibrate as fit
from xsimulator.executed import Paces, paces, paces_of_workers
from xsimulator.measures import Measured, RequestTimes, steps_of_first, window_of, without_core_waits
from xsimulator.run import (
    check_fits,
    outstanding_requests,
    read_log,
    requests_to_end,
    run_replica,
    times_of,
    warm_up_of,
)
from xsimulator.shares import share_of_replica

Server = Callable[["Plan", Path, Path], AbstractContextManager[str]]

FIGURES = ("throughput_rps", "latency_s", "ttft_s", "itl_p99_s")
"""Figures that are computed from a step log. Latencies count from admission."""
NOTABLE_WAIT = 0.1
"""A step counts as waiting for a core if the wait is at least this share of the step's time."""
MARGIN = 0.01
"""Share by which the figures of two equal runs may differ. Requests are sent, and windows end, at slightly different
times.
"""
URL_VOCABULARY = 1000
"""Only token ids below this number are sent to an endpoint with an unknown vocabulary. Any vocabulary is larger."""


@dataclass(frozen=True)
class Load:
    """The requests with which a plan or an endpoint is measured.

    Attributes:
        workload: lengths of the requests. None means the plan's lengths or, for an endpoint, those of the workload
            named summarization.
        arrivals: the arrival process. None means a closed loop.
        stream: whether responses are streamed. A plan's figures come from the engine's log either way. On a machine
            with two cores, a client that reads token by token lengthens decode steps by a tenth.
        ca_file: PEM file with the certificate authorities for an https endpoint. None means the system's.
    """

    num_requests: int = 300
    workload: Workload | None = None
    arrivals: ArrivalProcess | None = None
    stream: bool = False
    concurrency: int = 32
    ca_file: Path | None = None
    rule: Rule | None = None


@dataclass(frozen=True)
class Benched:
    report: BenchReport | UrlReport | SessionsOutput
    steps: tuple[StepRecord, ...] = ()
    profile: Profile | None = None


def bench(
    target: Plan | str,
    load: Load,
    seed: int = 0,
    *,
    engine: EngineKind = "xgpt",
    batching: Batching = "flat",
    profile: Profile | None = None,
    calibrate: bool = False,
    saturated: bool = False,
    progress: Progress = silent,
) -> Benched:
    """Measure a plan, or the endpoint at a URL. A separate process on this machine serves the plan.

    A plan made for arrivals is measured at its predicted arrival rate, with three exceptions: the load states a rate,
    `saturated` is set, or the profile is not on this machine.

    Args:
        profile: the plan's profile. None means the copy on this machine.
        saturated: whether to keep requests always waiting, even if the plan was made for arrivals.

    Raises:
        MachineError: the server does not start or dies, or the endpoint does not answer.
        InputError: the requests do not fit into the plan's memory, or too few steps were measured to fit a profile.
    """
    rng = np.random.default_rng(seed)
    if isinstance(target, str):
        workload = load.workload or load_workload("summarization")
        return Benched(bench_url(target, replace(load, workload=workload), rng, progress))
    options: tuple[str, ...] = () if batching == "flat" else ("--batching", batching)
    options += () if load.rule is None else ("--rule", name_of(load.rule))
    server = partial(served, engine=engine, options=options) if options else None
    if profile is None:
        try:
            profile = profile_of(target)
        except InputError:  # at saturation the plan contains the prediction
            if calibrate or load.arrivals is not None or load.workload is not None:
                raise
    promised = target.estimate.capacity
    if target.constraint.maximises_arrivals and promised is not None and profile is not None and not saturated:
        load = replace(load, arrivals=load.arrivals or ArrivalProcess.at(promised.rate_per_s))
    report, steps = bench_plan(target, load, rng, engine=engine, profile=profile, server=server, progress=progress)
    if not calibrate:
        return Benched(report, tuple(steps))
    assert profile is not None
    fitted, calibration = fit(target, profile, steps)
    return Benched(report.but(calibration=calibration), tuple(steps), fitted)


def bench_plan(
    plan: Plan,
    load: Load,
    rng: np.random.Generator,
    *,
    profile: Profile | None,
    engine: EngineKind = "xgpt",
    server: Server | None = None,
    progress: Progress = silent,
) -> tuple[BenchReport, list[StepRecord]]:
    """Serve the plan in a separate process, send it sampled requests over HTTP, and read the engine's step log.

    Without arrivals, enough requests are outstanding to keep the engine saturated, and the prediction is the plan's
    estimate. With arrivals, or if the workload is not the plan's, the prediction comes from a simulation of the same
    requests.

    Args:
        profile: the plan's profile, or None if it is not on this machine. The plan's own workload at saturation needs
            no profile.

    Raises:
        MachineError: the server does not start, or dies.
        InputError: the plan cannot hold the workload's requests.
    """
    load = replace(load, workload=load.workload or plan.workload)
    rates, differs = [gflops()], None if profile is None else differences(profile)
    drawn, results, busy_s, log = replayed(plan, load, rng, engine=engine, server=server, progress=progress)
    rates.append(gflops())
    report = _report(plan, profile, load, drawn, log, results, busy_s)
    return report.but(calibration_gflops=tuple(rates), differences=differs), log


def _tell(progress: Progress, load: Load, takes: str, ended: int) -> None:
    arrivals, what = load.arrivals, f"serving {load.num_requests} requests"
    if arrivals is not None:
        what += f" at {arrivals.mean_rate(load.num_requests):.3g} a second, which takes {takes}"
    progress(min(ended, load.num_requests), load.num_requests, what)


class Drawn(NamedTuple):
    """The lengths and arrival times of a load's requests. `arrivals_s` is zero in a closed loop. # each [requests]"""

    inputs: Ints
    outputs: Ints
    arrivals_s: Floats
    max_output: int


class Replayed(NamedTuple):
    """The result of `replayed`: the requests, the client's results, how many seconds each worker was busy, and the
    executed steps. Busy times are known only for pipelines of xgpt's engine.
    """

    drawn: Drawn
    results: list[ClientResult]
    busy_s: Mapping[str, float]
    log: list[StepRecord]


def replayed(
    plan: Plan,
    load: Load,
    rng: np.random.Generator,
    drawn: Drawn | None = None,
    *,
    engine: EngineKind = "xgpt",
    server: Server | None = None,
    progress: Progress = silent,
) -> Replayed:
    """Serve the plan in a separate process, and send it the requests of a load over HTTP."""
    drawn = drawn or draw(plan, load, rng)
    requests = _requests(plan, drawn, rng, closed=load.arrivals is None)
    takes = f"about {drawn.arrivals_s[-1] + plan.estimate.latency_s:.0f} s"  # until the last arrival's answer
    tell = partial(_tell, progress, load, takes)
    with tempfile.TemporaryDirectory() as directory:
        step_log = Path(directory) / "steps.jsonl"
        start = server or partial(served, engine=engine)
        with start(plan, Path(directory), step_log) as url:
            tell(0)
            results = asyncio.run(
                replay(
                    url,
                    requests,
                    concurrency=plan.replicas * outstanding_requests(plan) if load.arrivals is None else None,
                    enough=requests_to_end(plan, load.num_requests),
                    stream=load.stream,
                    progress=tell,
                )
            )
            pipelined = engine == "xgpt" and len(plan.stages) > len({stage.lane for stage in plan.stages})
            busy_s = busy_of_workers(url) if pipelined else {}
        log = read_step_log(step_log)
    if all(result.error is not None for result in results):
        raise MachineError(f"all {len(results)} requests failed: {results[0].error}")
    return Replayed(drawn, results, busy_s, log)


def draw(plan: Plan, load: Load, rng: np.random.Generator) -> Drawn:
    """Draw a load's requests at random, and further ones that keep the load steady."""
    workload, arrivals = load.workload or plan.workload, load.arrivals
    check_fits(plan, workload)
    counted = requests_to_end(plan, load.num_requests) if arrivals is None else load.num_requests
    # When the measured requests end, as many requests as before must be outstanding.
    total = counted + plan.replicas * outstanding_requests(plan)
    inputs, outputs = sample(workload, total, rng)
    times = np.zeros(total) if arrivals is None else arrivals.times(total, rng)
    return Drawn(inputs, outputs, times, workload.output.lengths[-1])


def _requests(plan: Plan, drawn: Drawn, rng: np.random.Generator, *, closed: bool) -> list[ClientRequest]:
    return [
        ClientRequest(
            prompt_ids=rng.integers(0, plan.model.vocab_size, int(length)).tolist(),
            output_length=int(output),
            max_tokens=drawn.max_output,
            send_at_s=None if closed else float(arrival),
        )
        for length, output, arrival in zip(drawn.inputs, drawn.outputs, drawn.arrivals_s, strict=True)
    ]


def _report(
    plan: Plan,
    profile: Profile | None,
    load: Load,
    drawn: Drawn,
    log: list[StepRecord],
    results: Sequence[ClientResult],
    busy_s: Mapping[str, float],
) -> BenchReport:
    workload, arrivals = load.workload or plan.workload, load.arrivals
    measured = read_log(plan, workload, log, load.num_requests, saturated=arrivals is None)
    times = None if arrivals is None else times_of(plan, log, load.num_requests)
    # Steps before and after the window do not count, since their pace may have differed.
    if arrivals is None:
        within = window_of(log, warm_up_of(plan, log), load.num_requests)
    else:
        within = steps_of_first(log, load.num_requests)
    steps = None
    if profile is not None:
        # Steps of a pipeline wait for each other, so the pace is computed from the busy times that workers report for
        # the whole run.
        steps = paces_of_workers(plan, profile, log, busy_s) if busy_s else paces(plan, profile, log, within, load.rule)
    pace = None if steps is None else steps.ratio
    predicted = _claimed(plan, load) or _simulated(plan, profile, load, drawn, 1.0)
    at_pace = {} if pace is None else _simulated(plan, profile, load, drawn, pace)
    usual_paces = () if profile is None or not profile.is_served else usual(profile.device, profile.engine)
    usually = [_simulated(plan, profile, load, drawn, pace) for pace in usual_paces]
    ranges = [predicted, *usually] if usually else []
    if pace is not None:
        record(plan, pace * plan.profile.slowdown)
    seen = _figures(measured, times)
    constraint, bound = plan.constraint, plan.constraint.latency_bound_s
    kept: bool | None = None
    share: float | None = None
    if times is not None and constraint.maximises_arrivals:
        kept, share = times.keeps(constraint), times.goodput(constraint)
    elif bound is not None and not constraint.maximises_arrivals:
        kept = (measured.latency_s if constraint.sla == "length" else measured.request_latency_s) <= bound
        share = measured.share_within(bound)
    whole_s = [result.end_s - result.send_s for result in results]
    return BenchReport(
        plan_sha256=plan.digest,
        policy=plan.policy.kind,
        workload=workload.name,
        arrival_rate_per_s=None if arrivals is None else arrivals.mean_rate(load.num_requests),
        num_requests=measured.num_requests if times is None else len(times.whole_s),
        num_failed=sum(result.error is not None for result in results),
        window_s=measured.window_s,
        figures=tuple(
            Comparison(
                metric=name,
                predicted=predicted[name],
                measured=seen[name],
                at_pace=at_pace.get(name),
                low=min(each[name] for each in ranges) * (1 - MARGIN) if ranges else None,
                high=max(each[name] for each in ranges) * (1 + MARGIN) if ranges else None,
            )
            for name in seen
            if name in predicted
        ),
        pace=pace,
        paces={} if steps is None else steps.by_lane,
        core_waits=None if steps is None else _core_waits(plan, profile, load, drawn, log, within, steps),
        headroom=constraint.headroom,
        latency_bound_s=bound,
        bound_kept=kept,
        share_within_bound=share,
        quantile=constraint.quantile,
        counts_waiting=constraint.maximises_arrivals,
        end_to_end_p99_s=_quantile(whole_s, 0.99),
        failures=tuple(sorted({result.error for result in results if result.error is not None}))[:5],
    )


def _core_waits(
    plan: Plan,
    profile: Profile | None,
    load: Load,
    drawn: Drawn,
    log: list[StepRecord],
    within: Sequence[StepRecord],
    steps: Paces,
) -> CoreWaits | None:
    if any(record.core_wait_ns is None for record in within):
        return None
    waited_ns = [record.core_wait_ns or 0 for record in within]
    shares = [ns / (record.end_ns - record.start_ns) for ns, record in zip(waited_ns, within, strict=True)]
    seconds = sum(waited_ns) / 1e9
    pace = steps.ratio * (1 - seconds / float(steps.measured_s.sum()))
    workload, closed = load.workload or plan.workload, load.arrivals is None
    measured = read_log(plan, workload, without_core_waits(log), load.num_requests, saturated=closed)
    predicted, at_pace = (_simulated(plan, profile, load, drawn, each)["itl_p99_s"] for each in (1.0, pace))
    gaps = Comparison(metric="itl_p99_s", predicted=predicted, measured=measured.itl_p99_s, at_pace=at_pace)
    share = sum(each >= NOTABLE_WAIT for each in shares) / len(shares)
    return CoreWaits(seconds=seconds, share_of_steps=share, pace=pace, gaps=gaps)


def _claimed(plan: Plan, load: Load) -> dict[str, float]:
    if load.arrivals is not None or load.workload != plan.workload or load.rule is not None:
        return {}
    return {name: getattr(plan.estimate, name) for name in FIGURES}


def _simulated(plan: Plan, profile: Profile | None, load: Load, drawn: Drawn, pace: float) -> dict[str, float]:
    assert profile is not None and load.workload is not None
    closed = load.arrivals is None
    slower = plan.profile.but(slowdown=pace * plan.profile.slowdown)
    replica_trace = share_of_replica(
        TraceLengths(drawn.inputs, drawn.outputs, None if closed else drawn.arrivals_s), plan
    )
    count = max(1, load.num_requests // plan.replicas)
    measured, log = run_replica(plan.but(profile=slower), profile, load.workload, replica_trace, count, rule=load.rule)
    return _figures(measured, None if closed else times_of(plan, log, count))


def _figures(measured: Measured, times: RequestTimes | None) -> dict[str, float]:
    found = {name: float(getattr(measured, name)) for name in FIGURES}
    if times is not None:
        del found["ttft_s"]
        found |= times.figures
    return found


def bench_url(url: str, load: Load, rng: np.random.Generator, progress: Progress = silent) -> UrlReport:
    """Send sampled requests to any running endpoint, and return what the client measured.

    Requests arrive at the load's rate. If the load has no rate, `concurrency` requests are always outstanding.

    Raises:
        InputError: the load's `ca_file` contains no certificate, or XGPT_API_KEY is not a valid key.
        MachineError: nothing answers at the URL, or every request failed.
    """
    workload, num_requests = load.workload, load.num_requests
    assert workload is not None
    inputs, outputs = sample(workload, num_requests, rng)
    times = [None] * num_requests if load.arrivals is None else load.arrivals.times(num_requests, rng).tolist()
    requests = [
        ClientRequest(rng.integers(0, URL_VOCABULARY, int(i)).tolist(), int(o), workload.output.lengths[-1], at_s)
        for i, o, at_s in zip(inputs, outputs, times, strict=True)
    ]
    concurrency = load.concurrency if load.arrivals is None else None
    results = asyncio.run(
        replay(
            url,
            requests,
            concurrency=concurrency,
            ca_file=load.ca_file,
            api_key=own_api_key(),
            progress=partial(_tell, progress, load, f"at least {times[-1] or 0:.0f} s"),
        )
    )
    done = [result for result in results if result.error is None]
    if not done:
        raise MachineError(f"all {len(results)} requests to {url} failed: {results[0].error}")
    seconds = max(result.end_s for result in done)
    gaps = [b - a for result in done for a, b in pairwise(result.token_s)]
    sources = {result.tokens_from for result in done}
    return UrlReport(
        url=url,
        workload=workload.name,
        num_requests=len(done),
        num_failed=len(results) - len(done),
        throughput_rps=len(done) / seconds,
        output_tokens_per_s=sum(result.num_tokens for result in done) / seconds,
        end_to_end_p50_s=_quantile([r.end_s - r.send_s for r in done], 0.5),
        end_to_end_p99_s=_quantile([r.end_s - r.send_s for r in done], 0.99),
        ttft_p50_s=_quantile([r.token_s[0] - r.send_s for r in done], 0.5),
        ttft_p99_s=_quantile([r.token_s[0] - r.send_s for r in done], 0.99),
        itl_p99_s=_quantile(gaps, 0.99) if gaps else 0.0,
        tokens_from=next(each for each in ("chunks", "usage", "token_ids") if each in sources),
    )


@contextmanager
def served(
    plan: Plan,
    directory: Path,
    step_log: Path | None = None,
    *,
    engine: EngineKind = "xgpt",
    replan: bool = False,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Run `xgpt serve` in a separate process, on a free port, and yield its URL. The process ends with the `with`
    block.
    """
    plan_path = directory / "plan.json"
    plan_path.write_text(dump_json(plan))
    command = [*run_module("xgpt"), "serve", str(plan_path), "--port", "0", "--engine", engine]
    command += [*([] if replan else ["--no-replan"]), *([] if step_log is None else ["--step-log", str(step_log)])]
    # The server logs only errors: nobody reads its log, and a full pipe would stop the server.
    command += [*options, "--log-level", "error"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # also if this process is killed
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line.strip())
            if "listening on " in line:
                break
        else:
            says = f"the server did not start: {lines[-1].removeprefix('xgpt: ') if lines else 'it printed no message'}"
            raise MachineError(says)
        yield line.rpartition("listening on ")[2].strip()
        if process.poll() is not None:
            raise MachineError(f"the server died with exit code {process.returncode}")
    finally:
        process.terminate()
        end(process, within_s=30)
        process.stderr.close()


def _quantile(values: list[float], q: float) -> float:
    return float(np.quantile(values, q))
