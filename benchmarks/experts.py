"""Measure the gains from dividing experts and from partial tensor parallelism: the best plans with both, and without
each.

    python -m benchmarks.experts [--only deepseek-v3] [--framework vllm-0.15] [--kv-dtype float8]

The figure is throughput at saturation under the latency bound of each case. Step times are from the datasheet, or from
imported tables with --framework. In "slices", each device has a slice of every expert. In "parts", each device of a
group has whole experts. In "equal stages", replicas are pipelines of equal groups, without partial tensor parallelism
and without two lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import click

from benchmarks.lib.results import record
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, DType, LayerTimes, Plan
from xgpt.reporting.plan_text import settings_text
from xgpt.resolve import load_cluster, load_engine, load_model, load_workload
from xprofiler import analytic, imported
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES


class Case(NamedTuple):
    model: str
    cluster: str
    workload: str
    latency_bound_s: float


CASES = (
    Case("gpt-oss-120b", "h100x8", "chat-short", 10.0),
    Case("mixtral-8x7b", "h100x8", "chat-long", 20.0),
    Case("qwen3-235b-a22b", "h200x8", "chat-long", 30.0),
    Case("qwen3-235b-a22b", "h200x32", "chat-long", 30.0),
    Case("deepseek-v3", "h200x8", "chat-long", 30.0),
    Case("deepseek-v3", "h200x32", "chat-long", 30.0),
)
HEADER = (
    "| model | devices | bound | best, req/s | slices | parts | equal stages | best plan |\n"
    "|---|---|---|---|---|---|---|---|"
)


def best(problem: Problem) -> Plan | None:
    scheduler, plans = Scheduler(problem), list[Plan]()
    for kind in POLICIES:
        with suppress(InfeasibleError):
            plans.append(scheduler.found((kind,))[kind].plan)
    return max(plans, key=lambda plan: plan.estimate.throughput_rps, default=None)


def only(problem: Problem, wanted: Callable[[LayerTimes], bool]) -> Problem:
    layers = tuple(layer for layer in problem.profile.layers if wanted(layer))
    return replace(problem, profile=problem.profile.model_copy(update={"layers": layers}))


def problem_of(case: Case, framework: str | None, kv_dtype: DType | None) -> Problem:
    spec, cluster = load_model(case.model)[0], load_cluster(case.cluster)
    if framework is None:
        profile = analytic.profile(spec, cluster, spec.default_dtype, kv_dtype=kv_dtype)
    else:
        engine = load_engine(framework)
        profile = imported.profile(spec, cluster, spec.default_dtype, engine, kv_dtype=kv_dtype)
    constraint = Constraint(latency_bound_s=case.latency_bound_s, headroom=profile.headroom)
    return Problem(spec, None, cluster, load_workload(case.workload, spec), profile, constraint)


def row(case: Case, framework: str | None, kv_dtype: DType | None) -> str:
    problem = problem_of(case, framework, kv_dtype)
    found = best(problem)
    name = f"| {case.model} | {case.cluster} | {case.latency_bound_s:g} s, {case.workload} "
    if found is None:
        return f"{name}| none | | | | |"
    most = found.estimate.throughput_rps
    others = (
        best(only(problem, lambda layer: layer.ep_degree == 1)),
        best(only(problem, lambda layer: layer.ep_degree == layer.tp_degree)),
        best(replace(problem, uniform=True)),
    )
    shares = ["none" if other is None else f"{other.estimate.throughput_rps / most - 1:+.1%}" for other in others]
    what = f"{found.policy.kind}, {settings_text(found)}"
    return f"{name}| {most:.1f} | {' | '.join(shares)} | {what} |"


@click.command()
@click.option("--only", "model", help="Run only the cases of this model.")
@click.option("--framework", help="Use imported step times of this engine's kernels instead of a datasheet.")
@click.option("--kv-dtype", type=click.Choice(["bfloat16", "float8"]))
def main(model: str | None, framework: str | None, kv_dtype: DType | None) -> None:
    lines = HEADER.splitlines()
    for case in CASES:
        if model is None or case.model == model:
            lines.append(row(case, framework, kv_dtype))
    sliced = [float(line.split("|")[5].strip().rstrip("%")) for line in lines[2:] if "%" in line.split("|")[5]]
    record(
        "experts/tables" if framework else "experts/datasheet",
        "From {times}, the best plan with only slices serves {least}% to {most}% as compared with the best.",
        lines,
        times=f"tables of {framework}" if framework else "datasheets",
        least=f"{min(sliced):+.1f}",
        most=f"{max(sliced):+.1f}",
    )


if __name__ == "__main__":
    main()
