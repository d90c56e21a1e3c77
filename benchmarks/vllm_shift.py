"""Change request lengths while vLLM serves, and report the new plan and whether a request is lost.

    python -m benchmarks.vllm_shift --model DIR --profile vllm.json [--latency-bound 6] [--factor 1.7]

`xgpt serve --engine vllm` starts with rra's best plan for the workload. After a number of requests, all lengths change
by a factor. Decisions come from the server's log, and all figures from the step log of vLLM's scheduler. Writes
results/vllm.shift.json. docs/results/vllm.md has the last results.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.lib.changing_lengths import Phase, is_lost, requests_of, scaled
from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.core.errors import MachineError
from xgpt.core.io import dump_json, read_step_log, sha256, write_atomic
from xgpt.core.schema import Constraint, Plan
from xgpt.core.schema.step_log import StepRecord
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xscheduler.objectives.best_plans import plan_each
from xsimulator.run import outstanding_requests

RESULTS = Path("results/vllm.shift.json")


@click.command()
@click.option("--model", required=True)
@click.option("--profile", "profile_path", required=True)
@click.option("--workload", default="tcb", show_default=True)
@click.option("--latency-bound", default=6.0, show_default=True)
@click.option("--factor", default=1.7, show_default=True, help="Factor by which the lengths change.")
@click.option(
    "--requests", "num_requests", default=400, show_default=True, help="Requests before the change, and again after it."
)
@click.option("--seed", default=0, show_default=True)
def main(
    model: str, profile_path: str, workload: str, latency_bound: float, factor: float, num_requests: int, seed: int
) -> None:
    """Serve, change the lengths, and report the results."""
    subject = resolve(plan_request(model=model, workload=workload, profile=profile_path))
    plan = plan_each(subject.under(Constraint(latency_bound_s=latency_bound)), "rra")["rra"]
    click.echo(f"{settings_text(plan)}: plan {sha256(plan)}")
    after = scaled(subject.workload, factor, subject.model)
    phases = [Phase(subject.workload, num_requests), Phase(after, num_requests)]
    results, requests, log, said = serve(plan, profile_path, phases, np.random.default_rng(seed))
    lost = sum(is_lost(result, request) for result, request in zip(results, requests, strict=True))
    decisions = [line for line in said if line.get("message") in ("re-planned", "plan kept")]
    for line in said:
        click.echo(json.dumps({name: line[name] for name in SHOWN if name in line}))
    parts = [summary(part) for part in split(log, num_requests)]
    for name, part in zip(("before", "after"), parts, strict=True):
        click.echo(f"{name}: {part}")
    click.echo(
        f"{len(requests)} requests, {lost} lost, {len(decisions)} decisions, one vLLM from the first to the last"
    )
    document = {"plan": sha256(plan), "decisions": decisions, "said": said, "lost": lost, "parts": parts}
    write_atomic(RESULTS, json.dumps(document, indent=1) + "\n")


SHOWN = ("message", "action", "reason", "settings", "gain", "planning_s", "plan_sha256")


def serve(
    plan: Plan, profile_path: str, phases: Sequence[Phase], rng: np.random.Generator
) -> tuple[list[ClientResult], list[ClientRequest], list[StepRecord], list[dict[str, Any]]]:
    """Return results and requests in order, vLLM's steps, and the server's log."""
    requests = [
        ClientRequest(rng.integers(3, plan.model.vocab_size, r.input_length).tolist(), r.output_length, r.max_output)
        for r in requests_of(phases, rng)
    ]
    said: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        plan_path, step_log = Path(directory) / "plan.json", Path(directory) / "steps.jsonl"
        plan_path.write_text(dump_json(plan))
        command = [sys.executable, "-m", "xgpt", "serve", str(plan_path), "--engine", "vllm", "--port", "0"]
        command += ["--profile", profile_path, "--step-log", str(step_log)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr is not None
            try:
                url = next((line.split()[-1] for line in process.stderr if "listening on" in line), None)
                if url is None:
                    raise MachineError("the server did not start")
                reader = threading.Thread(target=_read, args=(process.stderr, said))
                reader.start()
                results = asyncio.run(replay(url, requests, concurrency=outstanding_requests(plan), stream=False))
            finally:
                process.terminate()
            reader.join()
        return results, requests, read_step_log(step_log), said


def _read(lines: Any, said: list[dict[str, Any]]) -> None:
    for line in lines:
        if line.startswith("{"):
            said.append(json.loads(line))
        else:
            click.echo(line.rstrip(), err=True)


def split(log: Sequence[StepRecord], num_requests: int) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the steps before and after the change. The second list begins with the first step that encodes a request
    with changed lengths.
    """
    at = next(i for i, record in enumerate(log) if any(id_ >= num_requests for id_, _, _ in record.encode))
    return list(log[:at]), list(log[at:])


def summary(log: Sequence[StepRecord]) -> dict[str, float]:
    """Return figures of the steps: their number, requests that ended per second, prompts per step, and decode batch."""
    seconds = (log[-1].end_ns - log[0].start_ns) / 1e9
    encodes = [len(record.encode) for record in log if record.encode]
    return {
        "steps": len(log),
        "seconds": round(seconds, 2),
        "requests_per_s": round(sum(len(record.finished) for record in log) / seconds, 3),
        "prompts_an_encode": round(float(np.mean(encodes)), 2) if encodes else 0.0,
        "decodes_an_encode": round((len(log) - len(encodes)) / max(1, len(encodes)), 2),
        "decode_batch": round(float(np.mean([len(record.decode) for record in log if record.decode])), 2),
    }


if __name__ == "__main__":
    main()
