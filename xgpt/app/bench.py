"""Replay a workload against a served plan, and compare what was predicted with what is measured."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.app.profiles import profile_of
from xgpt.app.simulating import (
    ArrivalProcess,
    check_fits,
    outstanding_requests,
    read_log,
    requests_to_send,
    simulate,
    warm_up_requests,
)
from xgpt.errors import InputError, MachineError
from xgpt.schema import BenchReport, Comparison, EngineKind, Estimate, Plan, Profile, UrlReport, Workload

if TYPE_CHECKING:
    import numpy as np

    from xgpt.client import ClientRequest, ClientResult
    from xgpt.policies.tcb import Batching
    from xgpt.schema.step_log import StepRecord
    from xsimulator.measure import Measured

Server = Callable[["Plan", Path, Path], AbstractContextManager[str]]

URL_VOCABULARY = 1000
"""Token ids sent to an endpoint whose vocabulary is not known: any has as many."""


@dataclass(frozen=True)
class Load:
    """The requests that something is measured with.

    Attributes:
        num_requests: requests that are measured; more are sent, so that they are measured in a steady state.
        workload: their lengths; None: the plan's own, of an endpoint summarisation's.
        arrival_rate_per_s: of Poisson arrivals; None: the loop is closed.
        stream: have answers streamed. All figures of a plan come from the engine's log in any case; but the client
            shares the machine with the engine, and reading every token by itself makes decode steps on two cores a
            tenth longer.
        concurrency: outstanding requests of the closed loop against an endpoint.
    """

    num_requests: int = 300
    workload: Workload | None = None
    arrival_rate_per_s: float | None = None
    stream: bool = False
    concurrency: int = 32


@dataclass(frozen=True)
class Benched:
    """What a bench has measured.

    Attributes:
        report: predictions and measurements of a plan; what the client saw of an endpoint.
        steps: those that a plan's engine executed.
        profile: the plan's, fitted to these steps; None: that was not asked for.
    """

    report: BenchReport | UrlReport
    steps: tuple[StepRecord, ...] = ()
    profile: Profile | None = None


def bench(
    target: Plan | str,
    load: Load,
    seed: int = 0,
    *,
    engine: EngineKind = "native",
    batching: Batching = "flat",
    profile: Profile | None = None,
    ca_file: Path | None = None,
) -> Benched:
    """Measure a plan, served here by a process of its own, or the endpoint behind a URL.

    Args:
        seed: of the requests.
        batching: how a whole batch is laid out.
        profile: the plan's, to be fitted to the measured steps; None: nothing is fitted.
        ca_file: the authorities that may vouch for an https endpoint; None: the system's.

    Raises:
        MachineError: the server does not start or dies, or the endpoint does not answer.
        InputError: the plan cannot hold the requests, or too few steps were measured to fit a profile.
    """
    import numpy as np

    from xgpt.resolve import load_workload
    from xsimulator.calibrate import calibrate as fit

    rng = np.random.default_rng(seed)
    if isinstance(target, str):
        if load.arrival_rate_per_s is not None:
            accepted = "a URL is measured in a closed loop; give `concurrency`"
            raise InputError("arrival_rate_per_s", load.arrival_rate_per_s, accepted)
        workload = load.workload or load_workload("summarization")
        return Benched(bench_url(target, replace(load, workload=workload), rng, ca_file))
    server = None if batching == "flat" else partial(served, engine=engine, options=("--batching", batching))
    report, steps = bench_plan(target, load, rng, engine=engine, server=server)
    if profile is None:
        return Benched(report, tuple(steps))
    fitted, calibration = fit(target, profile, steps)
    return Benched(report.model_copy(update={"calibration": calibration}), tuple(steps), fitted)


def bench_plan(
    plan: Plan,
    load: Load,
    rng: np.random.Generator,
    *,
    engine: EngineKind = "native",
    server: Server | None = None,
) -> tuple[BenchReport, list[StepRecord]]:
    """Serve the plan in a process of its own, replay sampled requests over HTTP, and read the engine's step log.

    Without an arrival rate the loop is closed: as many requests are outstanding as keep the engine saturated, the
    prediction is the plan's estimate. With it, arrivals are Poisson. At a rate, and for another workload than the
    plan's, the prediction is the simulated engine's.

    Raises:
        MachineError: the server does not start, or dies.
        InputError: the plan cannot hold the workload's requests.
    """
    from xgpt.client import replay
    from xgpt.io import read_step_log

    load = replace(load, workload=load.workload or plan.workload)
    requests = _requests(plan, load, rng)
    calibration = [calibrate()]
    with tempfile.TemporaryDirectory() as directory:
        step_log = Path(directory) / "steps.jsonl"
        start = server or partial(served, engine=engine)
        with start(plan, Path(directory), step_log) as url:
            results = asyncio.run(
                replay(
                    url,
                    requests,
                    concurrency=outstanding_requests(plan) if load.arrival_rate_per_s is None else None,
                    enough=load.num_requests + warm_up_requests(plan) + round(2 * plan.estimate.encode_batch) + 2,
                    stream=load.stream,
                )
            )
        log = read_step_log(step_log)
    calibration.append(calibrate())
    if all(result.error is not None for result in results):
        raise MachineError(f"all {len(results)} requests failed: {results[0].error}")
    return _report(plan, load, rng, log, results).model_copy(update={"calibration_gflops": tuple(calibration)}), log


def _requests(plan: Plan, load: Load, rng: np.random.Generator) -> list[ClientRequest]:
    """Requests of the load's lengths, with prompts of random tokens.

    Raises:
        InputError: the plan cannot hold them.
    """
    from xgpt.client import ClientRequest
    from xgpt.workload import poisson_arrivals, sample

    workload, rate = load.workload or plan.workload, load.arrival_rate_per_s
    check_fits(plan, workload)
    total = requests_to_send(plan, load.num_requests, saturated=rate is None)
    inputs, outputs = sample(workload, total, rng)
    times = None if rate is None else poisson_arrivals(rate, total, rng)
    return [
        ClientRequest(
            prompt_ids=rng.integers(0, plan.model.vocab_size, int(inputs[i])).tolist(),
            output_length=int(outputs[i]),
            max_tokens=workload.output.lengths[-1],
            send_at_s=None if times is None else float(times[i]),
        )
        for i in range(total)
    ]


def _report(
    plan: Plan, load: Load, rng: np.random.Generator, log: list[StepRecord], results: Sequence[ClientResult]
) -> BenchReport:
    """Return the measurements with the predictions of them."""
    from xgpt.io import sha256

    workload, rate = load.workload or plan.workload, load.arrival_rate_per_s
    closed = rate is None
    measured = read_log(plan, workload, log, load.num_requests, saturated=closed)
    predicted: Estimate | Measured = plan.estimate
    if not closed or workload != plan.workload:
        arrivals = None if rate is None else ArrivalProcess(rate)
        predicted, _ = simulate(plan, profile_of(plan), workload, load.num_requests, rng, arrivals)
    constraint, bound = plan.constraint, plan.constraint.latency_bound_s
    whole_s = [result.end_s - result.send_s for result in results if result.error is None]
    kept: bool | None = None
    share: float | None = None
    if bound is not None and not constraint.maximises_arrivals:
        kept = (measured.latency_s if constraint.sla == "length" else measured.request_latency_s) <= bound
        share = measured.share_within(bound)
    elif bound is not None and not closed:
        share = sum(seconds <= bound for seconds in whole_s) / len(results)
        kept = share >= constraint.quantile
    return BenchReport(
        plan_sha256=sha256(plan),
        policy=plan.policy.kind,
        workload=workload.name,
        arrival_rate_per_s=rate,
        num_requests=measured.num_requests,
        num_failed=sum(result.error is not None for result in results),
        window_s=measured.window_s,
        figures=tuple(
            Comparison(metric=name, predicted=getattr(predicted, name), measured=getattr(measured, name))
            for name in ("throughput_rps", "latency_s", "ttft_s", "itl_p99_s")
        ),
        latency_bound_s=bound,
        bound_kept=kept,
        share_within_bound=share,
        quantile=constraint.quantile,
        counts_waiting=constraint.maximises_arrivals,
        end_to_end_p99_s=_quantile([result.end_s - result.send_s for result in results], 0.99),
        failures=tuple(sorted({result.error for result in results if result.error is not None}))[:5],
    )


def bench_url(url: str, load: Load, rng: np.random.Generator, ca_file: Path | None = None) -> UrlReport:
    """Replay sampled requests against any running endpoint; what a client sees is all that is known.

    Args:
        ca_file: the authorities that may vouch for an https server; None: the system's.

    Raises:
        InputError: the file holds no certificate, or XGPT_API_KEY no key.
        MachineError: nothing answers there, or every request failed.
    """
    from xgpt.client import ClientRequest, replay
    from xgpt.connection import own_api_key
    from xgpt.workload import sample

    workload, num_requests = load.workload, load.num_requests
    assert workload is not None
    inputs, outputs = sample(workload, num_requests, rng)
    requests = [
        ClientRequest(rng.integers(0, URL_VOCABULARY, int(i)).tolist(), int(o), workload.output.lengths[-1])
        for i, o in zip(inputs, outputs, strict=True)
    ]
    results = asyncio.run(replay(url, requests, concurrency=load.concurrency, ca_file=ca_file, api_key=own_api_key()))
    done = [result for result in results if result.error is None]
    if not done:
        raise MachineError(f"all {num_requests} requests to {url} failed: {results[0].error}")
    seconds = max(result.end_s for result in done)
    gaps = [b - a for result in done for a, b in pairwise(result.token_s)]
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
    )


@contextmanager
def served(
    plan: Plan,
    directory: Path,
    step_log: Path | None = None,
    *,
    engine: EngineKind = "native",
    replan: bool = False,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """`xgpt serve` as users run it, on a free port. Yields its URL.

    Args:
        directory: where the plan is written.
        replan: let the server go over to other plans.
        options: further ones of `xgpt serve`.
    """
    from xgpt.io import dump_json

    plan_path = directory / "plan.json"
    plan_path.write_text(dump_json(plan))
    command = [sys.executable, "-m", "xgpt", "serve", str(plan_path), "--port", "0", "--engine", engine]
    command += [*([] if replan else ["--no-replan"]), *([] if step_log is None else ["--step-log", str(step_log)])]
    command += [*options, "--log-level", "error"]  # its log is not read, and a full pipe would stop it
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line.strip())
            if "listening on " in line:
                break
        else:
            raise MachineError(f"the server did not start: {lines[-1] if lines else 'no message'}")
        yield line.rpartition("listening on ")[2].strip()
        if process.poll() is not None:
            raise MachineError(f"the server died with exit code {process.returncode}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def calibrate() -> float:
    """GFLOP/s of a fixed matrix product: tells in which state the machine's clock is."""
    import numpy as np

    a = np.ones((1024, 1024), np.float32)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return round(2 * 1024**3 / best / 1e9, 1)


def _quantile(values: list[float], q: float) -> float:
    import numpy as np

    return float(np.quantile(values, q))
