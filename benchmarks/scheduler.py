"""ExeGPT's scenarios (sec. 7.3, 7.4): what is chosen under each bound, how fast, and how much is looked at.

    python -m benchmarks.scheduler [--only opt-13b] [--check]

FasterTransformer (FT) is static batching with all devices of a node in one tensor-parallel group and the nodes in a
pipeline. Its batches in multiples of four give the bounds, as in sec. 7.1: the bottom 10%, 30%, 70% of its latencies,
and none. Predicted throughout, from the datasheets. --check draws one in a hundred of all points, of every placement,
and reports by how much the best of them beats what was chosen. Writes results/scheduler.json.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from xgpt.errors import InfeasibleError
from xgpt.io import write_atomic
from xgpt.resolve import load_cluster, load_model, load_workload
from xgpt.schema import Constraint, Plan
from xprofiler import analytic
from xscheduler.placement import Placement
from xscheduler.schedule import Problem, Scheduler
from xscheduler.space import POLICIES, Space

RESULTS = Path("results/scheduler.json")
SMALL, LARGE = ("summarization", "translation", "chat-short"), ("code-generation", "chat-short", "chat-long")
SCENARIOS = (
    ("t5-11b", "a40x8", SMALL),
    ("opt-13b", "a40x4", SMALL),
    ("gpt3-39b", "a40x16", SMALL),
    ("gpt3-101b", "a100x16", SMALL),
    ("gpt3-101b", "a100x16", LARGE),
    ("gpt3-175b", "a40x32", LARGE),
    ("gpt3-175b", "a100x16", LARGE),
    ("gpt3-341b", "a40x48", LARGE),
)
SHARES = (0.1, 0.3, 0.7, None)
CHOICES = {"exegpt": ("rra", "waa"), "auto": tuple(POLICIES)}
SAMPLED = 0.01
EXTRA = {"opt-13b": (3.1, 5.9, 11.5), "gpt3-39b": (9.8,)}
"""Bounds that the paper's text and Table 6 name, for summarization."""


@dataclass(frozen=True)
class Row:
    """One search.

    Attributes:
        over_ft, over_static: throughput over FT's under the bound, and over static batching at its best placement.
        seconds: of all policies' searches together.
        slowest_s: of one policy's search.
        sampled: best of the random points over the chosen one, less 1; None where none were drawn.
    """

    model: str
    cluster: str
    workload: str
    bound_s: float | None
    choice: str
    chosen: str
    throughput_rps: float
    latency_s: float
    over_ft: float | None
    over_static: float | None
    evaluations: int
    space_size: int
    seconds: float
    slowest_s: float
    gap: float
    sampled: float | None


def problem(model: str, cluster: str, workload: str, bound_s: float | None) -> Problem:
    spec, _ = load_model(model)
    devices = load_cluster(cluster)
    profile = analytic.profile(spec, devices, spec.default_dtype)
    constraint = Constraint(latency_bound_s=bound_s)
    return Problem(spec, None, devices, load_workload(workload, spec), profile, constraint)


def faster_transformer(of: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(latencies, throughputs) of FT's batches in multiples of four that fit."""
    scheduler = Scheduler(of)
    tp = min(of.cluster.devices_per_node, of.cluster.num_devices)
    placement: Placement = scheduler.uniform_placement("static", tp, of.cluster.num_devices // tp, 1)
    space = scheduler.space("static", placement)
    batches = np.arange(4, max(5, int(space.capacity) + 1), 4)
    evaluation = space.evaluate({"batch": batches})
    return evaluation.performance.latency[evaluation.fits], evaluation.throughput[evaluation.fits]


def sampled_best(scheduler: Scheduler, kinds: tuple[str, ...], rng: np.random.Generator) -> float:
    """The best throughput among one in a hundred of all points that fit and keep the bound."""
    best = 0.0
    for kind in kinds:
        for space in scheduler.spaces(kind):
            best = max(best, _best_of_sample(space, rng))
    return best


def _best_of_sample(space: Space, rng: np.random.Generator) -> float:
    size = 1
    for axis in space.axes:
        size *= len(axis.values)
    count = max(1, round(SAMPLED * size))
    columns = {axis.variable.name: rng.choice(axis.values, count) for axis in space.axes}
    evaluation = space.evaluate(columns)
    return float(evaluation.throughput[evaluation.feasible].max(initial=0.0))


def words(plan: Plan) -> str:
    values = [str(getattr(plan.policy, variable.name)) for variable in plan.policy.variables]
    lanes = [[stage.tp for stage in plan.stages if stage.lane == lane] for lane in ("both", "encode", "decode")]
    shape = " > ".join(str(degrees).replace(",", "") for degrees in lanes if degrees)
    micro = getattr(plan.policy, "microbatches", getattr(plan.policy, "decode_microbatches", 1))
    return f"{plan.policy.kind} {'/'.join(values)} M{micro} {plan.replicas}x{shape}"


def rows_of(model: str, cluster: str, workload: str, bound_s: float | None, check: bool) -> list[Row]:
    of = problem(model, cluster, workload, bound_s)
    latencies, throughputs = faster_transformer(of)
    kept = throughputs[latencies <= (bound_s or np.inf)]
    scheduler, seconds, plans = Scheduler(of), {}, {}
    for kind in POLICIES:
        started = time.perf_counter()
        try:
            plans |= scheduler.best_of_each((kind,))
            seconds[kind] = time.perf_counter() - started
        except InfeasibleError:
            continue  # what the search says of it takes longer than the search
    rows = []
    for choice, kinds in CHOICES.items():
        found = [plans[kind] for kind in kinds if kind in plans]
        if not found:
            continue
        best = max(found, key=lambda plan: plan.estimate.throughput_rps)
        e = best.estimate
        assert bound_s is None or e.latency_s <= bound_s, "a bound that is not kept"
        static = plans.get("static")
        sample = sampled_best(Scheduler(of), kinds, np.random.default_rng(0)) if check else None
        rows.append(
            Row(
                model,
                cluster,
                workload,
                bound_s,
                choice,
                words(best),
                e.throughput_rps,
                e.latency_s,
                e.throughput_rps / kept.max() if len(kept) else None,
                None if static is None else e.throughput_rps / static.estimate.throughput_rps,
                sum(plan.search.evaluations for plan in found),
                sum(plan.search.space_size for plan in found),
                sum(seconds[plan.policy.kind] for plan in found),
                max(seconds[plan.policy.kind] for plan in found),
                max(plan.search.gap or 0.0 for plan in found),
                None if sample is None else sample / e.throughput_rps - 1,
            )
        )
    return rows


def show(row: Row) -> str:
    def ratio(value: float | None) -> str:
        return "     -" if value is None else f"{value:5.2f}x"

    bound = "none" if row.bound_s is None else f"{row.bound_s:.2f}"
    sampled = "" if row.sampled is None else f"  sampled {100 * row.sampled:+.2f}%"
    return (
        f"{row.model:10} {row.cluster:8} {row.workload:15} {bound:>6} {row.choice:6} {row.throughput_rps:8.3f} "
        f"{row.latency_s:7.2f} {ratio(row.over_ft)} {ratio(row.over_static)} {row.evaluations:6d} {row.space_size:10d} "
        f"{100 * row.evaluations / row.space_size:6.3f}% {row.seconds:5.2f} {row.slowest_s:5.2f} {100 * row.gap:5.2f}%"
        f"  {row.chosen}{sampled}"
    )


@click.command()
@click.option("--only", help="One model.")
@click.option("--check", is_flag=True, help="Compare with one in a hundred of all points, drawn at random.")
def main(only: str | None, check: bool) -> None:
    click.echo(
        "model      cluster  workload         bound choice    req/s latency    /FT /static  evals      space   share"
        "  sec.  most   gap  chosen"
    )

    rows: list[Row] = []
    for model, cluster, workloads in SCENARIOS:
        if only not in (None, model):
            continue
        for workload in workloads:
            latencies, _ = faster_transformer(problem(model, cluster, workload, None))
            bounds = [None if share is None else float(np.quantile(latencies, share)) for share in SHARES]
            bounds += EXTRA.get(model, ()) if workload == "summarization" else ()
            for bound_s in bounds:
                for row in rows_of(model, cluster, workload, bound_s, check):
                    rows.append(row)
                    click.echo(show(row))
    for choice in CHOICES:
        over = [row.over_ft for row in rows if row.choice == choice and row.over_ft is not None]
        click.echo(
            f"{choice}: over FT {np.mean(over):.2f}x in the mean, {max(over):.2f}x at most, {min(over):.2f}x least"
        )
    write_atomic(RESULTS, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
