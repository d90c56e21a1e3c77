"""Compare vLLM's own scheduler, chunked and rra under one latency bound, each with its best plan, and check
predictions.

    python -m benchmarks.vllm --model DIR --profile vllm.json --latency-bound 15 [--requests 100] [--only rra]

The profile is vLLM's own (`xgpt profile --engine vllm`). "default" is vLLM's own scheduler with its default token
budget and the most requests that keep the bound, as a user would tune it without a planner. Every plan's hash is
printed before the plan is measured, with the figures of the simulated engine for the same requests and for many. They
show which part of an error comes from the sample and which from the closed form. Then the measured and predicted times
of each kind of step show which part comes from the profile. Writes results/vllm.KIND.json, and the steps to
results/vllm.KIND.jsonl. docs/results/vllm.md has the last results.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import click
import httpx
import numpy as np

from xgpt.benchmark import Load, Server, bench_plan
from xgpt.core.errors import InfeasibleError, MachineError
from xgpt.core.io import StepLogWriter, sha256, write_atomic
from xgpt.core.schema import BenchReport, ChunkedSettings, Constraint, Plan
from xgpt.core.schema.step_log import StepRecord
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xrunner.vllm.command import launch
from xrunner.vllm.process import package_path, preload, python, started
from xscheduler.objectives.best_plans import plan_each
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.run import simulate
from xsimulator.stages import whole

DEFAULT_TOKEN_BUDGET = 2048
"""Token budget of vLLM's server by default."""
MAX_BATCH = 256
"""Largest number of requests in a step of vLLM's server by default."""
KINDS = ("default", "chunked", "rra")
HOST = "127.0.0.1"
MANY = 1500
"""Number of requests of a simulation, so large that its figures no longer depend on the sample."""


@click.command()
@click.option("--model", required=True)
@click.option("--cluster", default="local", show_default=True)
@click.option("--profile", "profile_path", required=True)
@click.option("--workload", default="summarization", show_default=True)
@click.option("--latency-bound", type=float, required=True)
@click.option("--requests", "num_requests", default=100, show_default=True)
@click.option("--only", type=click.Choice(KINDS))
@click.option("--seed", default=0, show_default=True)
def main(
    model: str,
    cluster: str,
    profile_path: str,
    workload: str,
    latency_bound: float,
    num_requests: int,
    only: str | None,
    seed: int,
) -> None:
    """Make all plans, then measure each on vLLM."""
    asked = plan_request(model=model, cluster=cluster, workload=workload, profile=profile_path)
    subject = resolve(asked).under(Constraint(latency_bound_s=latency_bound))
    for kind in KINDS if only is None else (only,):
        plan = default_plan(subject) if kind == "default" else plan_each(subject, kind)[kind]  # type: ignore[arg-type]
        click.echo(f"{kind}: {settings_text(plan)}: plan {sha256(plan)}")
        simulated = {n: simulated_figures(subject, plan, n, seed) for n in (num_requests, MANY)}
        for n, (rps, latency_s) in simulated.items():
            click.echo(f"{kind}: {n} requests simulated: {rps:.3f} req/s, {latency_s:.2f} s")
        server: Server | None = vllm_as_it_is if kind == "default" else None
        rng = np.random.default_rng(seed)
        own_profile = None if kind == "default" else subject.profile  # its steps do not follow xgpt's rule
        report, log = bench_plan(plan, Load(num_requests), rng, profile=own_profile, engine="vllm", server=server)
        click.echo(" | ".join(row(kind, plan, report)))
        steps = step_times(log, LaneCost(subject.model, subject.profile, whole(subject.model)))
        for name, (count, predicted_s, measured_s) in steps.items():
            click.echo(f"{kind}: {count} {name} steps: {predicted_s:.1f} s predicted, {measured_s:.1f} s measured")
        document = {
            "kind": kind,
            "plan": plan.model_dump(mode="json"),
            "simulated": simulated,
            "steps": steps,
            "report": report.model_dump(mode="json"),
        }
        write_atomic(Path(f"results/vllm.{kind}.json"), json.dumps(document, indent=1) + "\n")
        with closing(StepLogWriter(Path(f"results/vllm.{kind}.jsonl"))) as writer:
            for record in log:
                writer(record)


def default_plan(subject: Problem) -> Plan:
    planner = scheduler(subject, "exhaustive")
    placement = planner.candidates.uniform_placement("chunked", tp_degree=1, num_stages=1, replicas=1)
    batches = np.arange(1, MAX_BATCH + 1)
    columns = {"max_batch": batches, "token_budget": np.full_like(batches, DEFAULT_TOKEN_BUDGET)}
    evaluation = planner.candidates.space("chunked", placement).evaluate(columns)
    kept = np.flatnonzero(evaluation.feasible)
    if not len(kept):
        raise InfeasibleError("vLLM's default keeps no such bound", binding="latency_bound_s")
    best = kept[np.argmax(evaluation.throughput[kept])]
    settings = ChunkedSettings(token_budget=DEFAULT_TOKEN_BUDGET, max_batch=int(batches[best]))
    return planner.score(settings, placement)


def simulated_figures(subject: Problem, plan: Plan, num_requests: int, seed: int) -> tuple[float, float]:
    """Return the simulated requests a second, and the quantile of latency in s, for the requests that `bench_plan`
    draws."""
    measured, _ = simulate(plan, subject.profile, plan.workload, num_requests, np.random.default_rng(seed))
    return measured.throughput_rps, measured.latency_s


def step_times(log: list[StepRecord], cost: LaneCost) -> dict[str, tuple[int, float, float]]:
    """Return, for each kind of step, the number of steps, their predicted seconds, and their seconds from start to next
    start."""
    kinds: dict[str, list[tuple[float, float]]] = {"encode": [], "decode": [], "mixed": []}
    context: dict[int, int] = {}
    input_length: dict[int, int] = {}
    for record, following in pairwise(log):
        input_length |= {arrival.id: arrival.input_length for arrival in record.arrivals}
        encode = [(start, start + n, int(start + n == input_length[id_])) for id_, start, n in record.encode]
        context |= {id_: end for (id_, _, _), (_, end, _) in zip(record.encode, encode, strict=True)}
        for id_ in record.decode:
            context[id_] += 1
        predicted_s = sum(cost.step(StepCounts.of(encode, [context[id_] for id_ in record.decode])))
        kind = "decode" if not encode else "mixed" if record.decode else "encode"
        kinds[kind].append((predicted_s, (following.start_ns - record.start_ns) / 1e9))
    return {kind: (len(times), *np.sum(times, axis=0).tolist()) for kind, times in kinds.items() if times}


@contextmanager
def vllm_as_it_is(plan: Plan, directory: Path, step_log: Path) -> Iterator[str]:
    """Run vLLM's server with its own scheduler, which is only observed, and yield its URL."""
    assert isinstance(plan.policy, ChunkedSettings)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    prepared = launch(plan, plan_path="")
    arguments = list(prepared.arguments)
    for flag, value in (
        ("--scheduler-cls", "xrunner.vllm.logged.LoggedScheduler"),
        ("--additional-config", json.dumps({"xgpt": {"step_log": str(step_log)}})),
        ("--max-num-seqs", str(plan.policy.max_batch)),
        ("--max-num-batched-tokens", str(plan.policy.token_budget)),
    ):
        arguments[arguments.index(flag) + 1] = value
    command = [python(), "-m", "vllm.entrypoints.openai.api_server", "--model", prepared.model, *arguments]
    command += ["--served-model-name", plan.model.name, "--host", HOST, "--port", str(port)]
    url = f"http://{HOST}:{port}"
    with package_path() as packages, started(command, packages, prepared.variables | preload(python())) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=list, args=(process.stdout,), daemon=True)  # a full pipe would block it
        reader.start()
        while True:
            if process.poll() is not None:
                raise MachineError(f"vLLM did not start: exit code {process.returncode}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False, timeout=2).is_success:
                    break
            time.sleep(0.2)
        yield url


def row(kind: str, plan: Plan, report: BenchReport) -> list[str]:
    figures = {figure.metric: figure for figure in report.figures}
    cells = [kind, settings_text(plan), report.plan_sha256[:8]]
    for metric in ("throughput_rps", "latency_s"):
        figure = figures[metric]
        cells += [f"{figure.predicted:.3f}", f"{figure.measured:.3f}", f"{100 * figure.error:+.1f}%"]
    kept = {None: "-", True: "yes", False: "NO"}[report.bound_kept]
    failed = f"{report.num_failed} of {report.num_requests} failed"
    return [*cells, kept, failed, "/".join(f"{rate:.0f}" for rate in report.calibration_gflops)]


if __name__ == "__main__":
    main()
