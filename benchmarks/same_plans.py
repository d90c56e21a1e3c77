"""Check that the plans of another commit and of this tree are equal, byte for byte.

    python -m benchmarks.same_plans [--against main] [--only contract]

This compares the plans of every search of the scheduler benchmark, of the contract tests' problems, and of `xgpt.plan`
and `xgpt.replan` under each objective, with and without shared prefixes. `search.seconds` and hashes over it are left
out. The other commit's plans are stored in results/plans/COMMIT. The plans of this tree are made again, even after an
interruption, unless --go-on is given.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

import xgpt
from benchmarks.papers.settings import faster_transformer, problem, workload_of
from benchmarks.scheduler import CHOICES, EXTRA, SCENARIOS
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import Plan
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES

RESULTS = Path("results/plans")
CONTRACT = (
    ("opt-13b", "a40x4", "summarization", 6.0),
    ("opt-13b", "a40x4", "summarization", 20.0),
    ("t5-11b", "a40x8", "translation", 12.0),
    ("llama-3.1-8b", "h100x8", "azure-conv", 20.0),
    ("llama-3.1-8b", "h200x1", "orca", 4.0),
    ("gpt3-39b", "a40x16", "chat-short", None),
    ("qwen3-235b-a22b", "h200x32", "chat-long", 30.0),
    ("deepseek-v3", "h200x32", "chat-long", 30.0),
)
"""Problems of tests/contract."""

ON_ONE = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "latency_bound_s": 8.0}
ON_FOUR = {"model": "opt-13b", "cluster": "a40x4", "workload": "summarization", "latency_bound_s": 6.0}
ASKED: dict[str, dict[str, object]] = {
    "arrivals": ON_ONE,
    "arrivals, several devices": ON_FOUR,
    "arrivals, time to first token": {**ON_ONE, "latency_bound_s": None, "ttft_s": 0.5, "tpot_s": 0.05},
    "arrivals, slack": {**ON_ONE, "ttft_s": 0.5, "tpot_s": 0.05, "policy": "slack"},
    "arrivals, few devices": {**ON_FOUR, "arrival_rate_per_s": 2.0, "devices": "auto"},
    "saturated": {**ON_ONE, "objective": "saturated"},
    "saturated, quantile": {**ON_ONE, "objective": "saturated", "kv": "quantile"},
    "saturated, exegpt": {**ON_FOUR, "objective": "saturated", "policy": "exegpt"},
    "all requests": {**ON_ONE, "sla": "request"},
    "all requests, several devices": {**ON_FOUR, "sla": "request"},
    "held": {**ON_FOUR, "fix": {"tp": 2, "max_batch": 64}},
}
"""Arguments of `xgpt.plan`."""
REUSE = {"model": "llama-3.1-8b", "cluster": "a40x4", "devices": 1, "latency_bound_s": 30.0, "policy": "chunked"}

Make = Callable[[], Mapping[str, Plan]]


def searched(model: str, cluster: str, workload: str, bound_s: float | None, kinds: tuple[str, ...]) -> dict[str, Plan]:
    subject = problem(model, cluster, workload_of(workload, model), bound_s)
    return {kind: found.plan for kind, found in Scheduler(subject).found(kinds).items()}


def asked(arguments: Mapping[str, object]) -> dict[str, Plan]:
    return dict(xgpt.solve(**arguments).plans)  # type: ignore[arg-type]


def with_reuse(objective: str) -> dict[str, Plan]:
    """Return the plans for prompts with shared prefixes, and the plan that would replace the first one for other
    lengths."""
    from tools.structured import shared_prompts, write

    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder, name) for name in ("agents.jsonl", "others.jsonl")]
        for seed, trace in enumerate(traces):
            trace.write_text(write(shared_prompts(1500, np.random.default_rng(seed), prompts=150 + 400 * seed)))
        plans = asked({**REUSE, "workload": traces[0], "objective": objective})
        plan = next(iter(plans.values()))
        return plans | {"replanned": xgpt.replan(plan, traces[1], least_gain=0.0).plan}


def replanned(name: str) -> dict[str, Plan]:
    plan = next(iter(asked(ASKED[name]).values()))
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as trace:
        trace.write("input,output\n" + "900,40\n1500,110\n400,150\n" * 400)
        trace.flush()
        return {"replanned": xgpt.replan(plan, trace.name, least_gain=0.0).plan}


def cases(only: str) -> Iterator[tuple[str, Make]]:
    return ((name, make) for name, make in _all_cases() if only in name)


def _all_cases() -> Iterator[tuple[str, Make]]:
    for model, cluster, workloads in SCENARIOS:
        for workload in workloads:
            bounds = faster_transformer(problem(model, cluster, workload_of(workload, model))).bounds()
            bounds += EXTRA.get(model, ()) if workload == "summarization" else ()
            for bound_s in bounds:
                for choice, kinds in CHOICES.items():
                    name = f"search {model} {cluster} {workload} {_bound(bound_s)} {choice}"
                    yield name, partial(searched, model, cluster, workload, bound_s, kinds)
    for scenario in CONTRACT:
        yield f"contract {' '.join(scenario[:3])} {_bound(scenario[3])}", partial(searched, *scenario, tuple(POLICIES))
    for name, arguments in ASKED.items():
        yield f"plan {name}", partial(asked, arguments)
    for objective in ("saturated", "arrivals"):
        yield f"plan reuse, {objective}", partial(with_reuse, objective)
    for name in ("arrivals", "saturated", "all requests"):
        yield f"replan {name}", partial(replanned, name)


def _bound(bound_s: float | None) -> str:
    return "none" if bound_s is None else f"{bound_s:.6g}"


def text_of(make: Make) -> str:
    try:
        plans = make()
    except InfeasibleError as error:
        return f"{error}\n"
    return json.dumps({kind: timeless(plan) for kind, plan in plans.items()}, indent=1) + "\n"


def timeless(plan: Plan) -> dict[str, Any]:
    """Return a plan's values without those that tell how long the search took."""
    values = plan.model_dump(mode="json")
    del values["search"]["seconds"]
    if values.get("recommendation"):
        del values["recommendation"]["plan_sha256"]  # of a plan with its seconds
    return values


def write(folder: Path, only: str) -> None:
    for name, make in cases(only):
        if not (path := folder / f"{name}.json").is_file():
            write_atomic(path, text_of(make))
            click.echo(f"{folder.name}: {name}")


def written_at(commit: str, only: str) -> Path:
    sha = _git("rev-parse", "--short=12", f"{commit}^{{commit}}").strip()
    folder = (RESULTS / sha).absolute()
    with tempfile.TemporaryDirectory() as tree:
        archive = subprocess.run(["git", "archive", sha], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        shutil.copy(__file__, Path(tree, "benchmarks"))
        command = [sys.executable, "-m", "benchmarks.same_plans", "--write", str(folder), "--only", only]
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": tree}, check=True)
    return folder


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


@click.command()
@click.option("--against", default="main", help="Commit to compare with.  [default: main]")
@click.option("--only", default="", help="Run only cases whose names contain this text.")
@click.option("--go-on", is_flag=True, help="Continue an interrupted run of this tree.")
@click.option("--write", "to", type=click.Path(path_type=Path), help="Only write this tree's plans to this folder.")
def main(against: str, only: str, go_on: bool, to: Path | None) -> None:
    if to is not None:
        write(to, only)
        return
    there, here = written_at(against, only), RESULTS / "tree"
    if not go_on:
        shutil.rmtree(here, ignore_errors=True)
    write(here, only)
    names = [f"{name}.json" for name, _ in cases(only)]
    texts = [[(folder / name).read_text() for folder in (there, here)] for name in names]
    others = [name for name, (then, now) in zip(names, texts, strict=True) if then != now]
    plans = sum(text.count('"schema_version"') for _, text in texts)
    for name in others:
        click.echo(f"differs: diff '{there / name}' '{here / name}'")
    same = len(names) - len(others)
    click.echo(f"{len(names)} cases, {plans} plans: {same} cases as in {there.name}, {len(others)} differ")
    sys.exit(bool(others))


if __name__ == "__main__":
    main()
