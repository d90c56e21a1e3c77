"""Compare predictions with measurements in processor time, on machines that other work also uses.

    python -m benchmarks.processor_time --model DIRECTORY [--workload chat-short] [--requests 150] [--rounds 2]

The profile and the engine's step log count the seconds for which this process computes, on one thread. Time that other
work takes is in neither. The effect of other work on caches and clock rates is in both, and shows in the pace (measured
divided by predicted time of all steps). Each single-lane policy is planned with and without a bound, and the plans run
in turn. Prints a table, and writes results/processor_time.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import numpy as np
import torch

from xgpt.cli.render import show, table
from xgpt.core import policies
from xgpt.core.io import write_atomic
from xgpt.core.machine import detect
from xgpt.core.progress import silent
from xgpt.core.schema import Constraint, ModelSpec, Plan, Profile
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import sample
from xgpt.reporting.plan_text import settings_text
from xgpt.resolve import load_model, load_workload
from xgpt.serving.engine_process import build_engine
from xprofiler.bench import BLOCK_SIZE, NUM_BLOCKS
from xprofiler.measure import assembled, bench_of, fastest_layouts
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import runnable
from xsimulator.executed import paces
from xsimulator.run import read_log, requests_to_send

RESULTS = Path("results/processor_time.json")
KINDS = ("orca", "rra", "chunked", "static")
FIGURES = ("throughput_rps", "latency_s", "ttft_s", "itl_p99_s")
COLUMNS = (
    *("bound s", "policy", "settings", "pace"),
    *(text for name in FIGURES for text in (name, "measured", "error")),
)
"""Columns of the table. Errors are those of the prediction at the pace in the same row."""


def profiled(spec: ModelSpec, checkpoint: Path | None) -> Profile:
    """Return a model's profile on one thread, in processor time."""
    torch.set_num_threads(1)
    layouts = fastest_layouts(spec, "float32", (1,))
    settings = WorkerSettings(
        spec=spec, dtype="float32", checkpoint=checkpoint, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, layouts=layouts
    )
    worker = build_worker(settings)
    with torch.inference_mode():
        measured = bench_of(worker)(worker, silent, clock=time.process_time).measure()
    return assembled(spec, detect(1), "float32", 1, layouts, {(1, 1): measured})


def executed(plan: Plan, num_requests: int, seed: int) -> list[StepRecord]:
    """Return the steps of a plan's engine in this process. All requests wait from the start."""
    log: list[StepRecord] = []
    built = build_engine(plan)
    assert isinstance(built, Engine)
    engine = Engine(policies.build(plan), built.executor, clock=time.process_time_ns, on_step=log.append)
    rng = np.random.default_rng(seed)
    total = requests_to_send(plan, num_requests, saturated=True)
    for i, (length, output) in enumerate(zip(*sample(plan.workload, total, rng), strict=True)):
        prompt = tuple(rng.integers(0, plan.model.vocab_size, int(length)).tolist())
        engine.submit(Generation(i, prompt, plan.workload.output.lengths[-1], output_length=int(output)))
    while engine.step() is not None:
        pass
    engine.close()
    return log


def row(plan: Plan, profile: Profile, log: list[StepRecord], num_requests: int) -> list[str]:
    said, seen = plan.estimate, read_log(plan, plan.workload, log, num_requests, saturated=True)
    found = paces(plan, profile, log)
    assert found is not None
    pace, bound_s = found.ratio, plan.constraint.latency_bound_s
    cells = ["none" if bound_s is None else f"{bound_s:g}", plan.policy.kind, settings_text(plan), f"{pace:.3f}"]
    for name in FIGURES:
        predicted, measured = getattr(said, name), getattr(seen, name)
        slower = 1 / pace if name == "throughput_rps" else pace
        cells += [f"{predicted:.4g}", f"{measured:.4g}", f"{predicted * slower / measured - 1:+.1%}"]
    return cells


@click.command()
@click.option("--model", required=True, metavar="NAME|DIRECTORY")
@click.option("--workload", default="chat-short", show_default=True)
@click.option("--requests", "num_requests", default=150, show_default=True, help="Number of measured requests.")
@click.option("--bound", "bound_s", default=8.0, show_default=True, help="Latency bound, in processor time.")
@click.option("--rounds", default=2, show_default=True)
def main(model: str, workload: str, num_requests: int, bound_s: float, rounds: int) -> None:
    """Profile, plan and run each policy."""
    spec, checkpoint = load_model(model)
    where = None if checkpoint is None else str(checkpoint)
    lengths, profile = load_workload(workload), profiled(spec, checkpoint)
    rows: list[list[str]] = []
    for seed in range(rounds):
        for bound in (None, bound_s):
            problem = Problem(spec, where, detect(1), lengths, profile, Constraint(latency_bound_s=bound))
            for kind in runnable(KINDS, spec):
                plan = Scheduler(problem).best([kind])
                rows.append(row(plan, profile, executed(plan, num_requests, seed), num_requests))
                click.echo("  ".join(rows[-1]), err=True)
    show(table(f"{spec.name}, {lengths.name}, processor time of one thread", COLUMNS, rows))
    write_atomic(RESULTS, json.dumps([dict(enumerate(cells)) for cells in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
