"""Search ExeGPT's scenarios (sec. 7.3, 7.4): the choice under each bound, its time, and the share of the space
examined.

    python -m benchmarks.scheduler

FasterTransformer (FT) is static batching with all devices of a node in one tensor-parallel group and the nodes in a
pipeline. Its batches in multiples of four give the bounds, as in sec. 7.1: the 10%, 30% and 70% quantiles of its
latencies at the 99th percentile's length, and no bound. FT itself must keep a bound up to the longest output, since its
batches end with their longest request. Static batching on its best placement keeps it at the 99th percentile like all
others. All figures are predicted from datasheets. Each finished task is written to results/scenarios/ and read from
there the next time.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.lib.results import record, table
from benchmarks.papers.settings import faster_transformer, problem, workload_of
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import Plan
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES

RESULTS = Path("results/scenarios")
SMALL, LARGE = ("summarization", "translation", "chat-short"), ("code-generation", "chat-short", "chat-long")
SCENARIOS = (
    ("t5-11b", "a40x8", SMALL),
    ("opt-13b", "a40x4", SMALL),
    ("gpt3-39b", "a40x16", SMALL),
    ("gpt3-101b", "a100x16", tuple(dict.fromkeys(SMALL + LARGE))),
    ("gpt3-175b", "a40x32", LARGE),
    ("gpt3-175b", "a100x16", LARGE),
    ("gpt3-341b", "a40x48", LARGE),
)
Choices = Mapping[str, Sequence[str]]
CHOICES: Choices = {"exegpt": ("rra", "waa"), "auto": tuple(POLICIES)}
HEADER = (
    "model, devices", "policies", "searches", "plan over FT, mean (range)", "plan over static, mean", "chosen policies",
    "seconds, median / largest", "largest share of settings evaluated", "largest gap",
)  # fmt: skip
EXTRA = {"opt-13b": (3.1, 5.9, 11.5), "gpt3-39b": (9.8,)}
"""Bounds for summarization that the paper's text and Table 6 name."""


@dataclass(frozen=True)
class Row:
    """The result of one search.

    Attributes:
        chosen: the chosen schedule, or None if no schedule keeps the bound.
        ft_rps: throughput of FT if it keeps the bound up to its longest output, or 0 if no batch does.
        ft_at_quantile_rps: throughput of FT if it keeps the bound only at the 99th percentile's length, like all
            others.
        by_policy: the highest throughput of each policy that keeps the bound, requests a second.
        over_ft, over_static: throughput relative to FT's and to static batching's, or None if these do not keep the
            bound.
        seconds: processor time from the problem to the plans of all policies of the choice.
    """

    model: str
    cluster: str
    workload: str
    bound_s: float | None
    choice: str
    chosen: str | None
    throughput_rps: float = 0.0
    latency_s: float = 0.0
    ft_rps: float = 0.0
    ft_at_quantile_rps: float = 0.0
    by_policy: dict[str, float] = field(default_factory=dict)
    over_ft: float | None = None
    over_static: float | None = None
    evaluations: int = 0
    space_size: int = 0
    seconds: float = 0.0
    gap: float = 0.0


def task_problem(model: str, cluster: str, workload: str, bound_s: float | None) -> Problem:
    return problem(model, cluster, workload_of(workload, model), bound_s)


def words(plan: Plan) -> str:
    values = [str(getattr(plan.policy, variable.name)) for variable in plan.policy.variables]
    lanes = [[stage.tp for stage in plan.stages if stage.lane == lane] for lane in ("both", "encode", "decode")]
    shape = " > ".join("+".join(_runs(degrees)) for degrees in lanes if degrees)
    micro = getattr(plan.policy, "microbatches", getattr(plan.policy, "decode_microbatches", 1))
    return f"{plan.policy.kind} {'/'.join(values)} M{micro} {plan.replicas}x({shape})"


def _runs(degrees: Sequence[int]) -> Iterator[str]:
    """Yield the numbers of consecutive stages with equal tensor-parallel degrees: 4, 4, 1 -> 2tp4, 1tp1."""
    for degree in dict.fromkeys(degrees):
        yield f"{degrees.count(degree)}tp{degree}"


# Searches ------------------------------------------------------------------------------------------------------------


def searched(subject: Problem, ft_rps: float | None, choices: Choices) -> list[Row]:
    rows = []
    bound_s = subject.constraint.latency_bound_s
    static: Plan | None = None
    for choice, kinds in reversed(list(choices.items())):
        empty = Row(subject.model.name, subject.cluster.name, subject.workload.name, bound_s, choice, None)
        started = time.process_time()
        try:
            plans = {kind: found.plan for kind, found in Scheduler(subject).found(kinds).items()}
        except InfeasibleError:
            rows.append(empty)
            continue
        seconds = time.process_time() - started
        best = max(plans.values(), key=lambda plan: plan.estimate.throughput_rps)
        static = plans.get("static", static)
        rps = best.estimate.throughput_rps
        assert bound_s is None or best.estimate.latency_s <= bound_s, "a bound that is not kept"
        rows.append(
            replace(
                empty,
                chosen=words(best),
                throughput_rps=rps,
                by_policy={kind: plan.estimate.throughput_rps for kind, plan in plans.items()},
                latency_s=best.estimate.latency_s,
                over_ft=None if ft_rps is None else rps / ft_rps,
                over_static=None if static is None else rps / static.estimate.throughput_rps,
                evaluations=sum(plan.search.evaluations for plan in plans.values()),
                space_size=sum(plan.search.space_size for plan in plans.values()),
                seconds=seconds,
                gap=max(plan.search.gap or 0.0 for plan in plans.values()),
            )
        )
    return rows[::-1]


def task_rows(model: str, cluster: str, workload: str, choices: Choices) -> list[Row]:
    baseline = faster_transformer(task_problem(model, cluster, workload, None))
    bounds = baseline.bounds()
    bounds += EXTRA.get(model, ()) if workload == "summarization" else ()
    rows = []
    for bound_s in bounds:
        found = searched(task_problem(model, cluster, workload, bound_s), baseline.at(bound_s) or None, choices)
        ft, at_quantile = baseline.at(bound_s), baseline.at(bound_s, at_quantile=True)
        rows += [replace(row, ft_rps=ft, ft_at_quantile_rps=at_quantile) for row in found]
    return rows


def rows_of(model: str, cluster: str, workload: str) -> list[Row]:
    path = RESULTS / f"{model}-{cluster}-{workload}.json"
    if path.is_file():
        return [Row(**row) for row in json.loads(path.read_text())]
    rows = task_rows(model, cluster, workload, CHOICES)
    write_atomic(path, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def line(where: str, choice: str, rows: Sequence[Row]) -> list[str]:
    over = np.asarray([row.over_ft for row in rows if row.over_ft is not None])
    static = np.asarray([row.over_static for row in rows if row.over_static is not None])
    chosen = [row for row in rows if row.chosen is not None]
    seconds = [row.seconds for row in chosen]
    kinds = Counter(row.chosen.split()[0] for row in chosen if row.chosen is not None)
    cells = [where, choice, str(len(rows)), f"{over.mean():.2f}x ({over.min():.2f} to {over.max():.2f})"]
    cells += [f"{static.mean():.2f}x", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())]
    cells += [f"{np.median(seconds):.2f} / {max(seconds):.2f}"]
    cells += [f"{100 * max(row.evaluations / row.space_size for row in chosen):.3f}%"]
    return [*cells, f"{100 * max(row.gap for row in chosen):.2f}%"]


def main() -> None:
    groups: dict[tuple[str, str], list[Row]] = {}
    for model, cluster, workloads in SCENARIOS:
        for workload in workloads:
            for row in rows_of(model, cluster, workload):
                groups.setdefault((f"{model}, {cluster}", row.choice), []).append(row)
    over = [row.over_ft for rows in groups.values() for row in rows if row.over_ft is not None]
    record(
        "scheduler/chosen",
        "Plans serve {mean} times what FasterTransformer does in the mean, with gaps that the last column bounds.",
        table(HEADER, [line(*key, rows) for key, rows in groups.items()]),
        mean=f"{np.mean(over):.2f}",
    )


if __name__ == "__main__":
    main()
