"""Search ExeGPT's scenarios (sec. 7.3, 7.4): the choice under each bound, its time, and the share of the space
examined.

    python -m benchmarks.scheduler [--only opt-13b] [--check] [--markdown FILE]
    python -m benchmarks.scheduler --sla request [--only opt-13b]

FasterTransformer (FT) is static batching with all devices of a node in one tensor-parallel group and the nodes in a
pipeline. Its batches in multiples of four give the bounds, as in sec. 7.1: the 10%, 30% and 70% quantiles of its
latencies at the 99th percentile's length, and no bound. FT itself must keep a bound up to the longest output, since its
batches end with their longest request. Column /FT is relative to this FT. Column /static is relative to static batching
on its best placement, which keeps the bound at the 99th percentile like all others. All figures are predicted from
datasheets.

--check predicts the points of every policy and placement, once for all bounds of a task, and reports by how much the
best point beats the chosen one. It predicts all points if this takes at most a minute (policies with few points first),
or else one point in a hundred, drawn at random. Each finished task is written to results/scenarios/ and read from there
the next time. --again repeats it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.lib import all_requests
from benchmarks.papers.settings import faster_transformer, problem, workload_of
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import Plan
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import POINTS_AT_ONCE, POLICIES, Evaluation, Space

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
OF_PAPER: Choices = {"exegpt": ("rra", "waa"), "static": ("static",)}
"""The choices of policies that `benchmarks.papers` shows."""
EXTRA = {"opt-13b": (3.1, 5.9, 11.5), "gpt3-39b": (9.8,)}
"""Bounds for summarization that the paper's text and Table 6 name."""

SAMPLED = 0.01
MOST_SECONDS = 60.0
"""Longest time of a task's sweep. If a policy's points would take longer than the remaining time, SAMPLED of them are
drawn."""
PILOT = 2000
"""Number of points of a placement that are predicted to estimate the time of a sweep."""


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
        swept: share by which the best point of the sweep exceeds the chosen one, or None without a sweep.
        all_swept: whether the sweep included all points of every policy.
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
    swept: float | None = None
    all_swept: bool = False


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
    for choice, kinds in reversed(choices.items()):
        empty = Row(subject.model.name, subject.cluster.name, subject.workload.name, bound_s, choice, None)
        started = time.process_time()
        try:
            plans = Scheduler(subject).best_of_each(kinds)
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


# Sweeps --------------------------------------------------------------------------------------------------------------


def with_sweep(rows: list[Row]) -> list[Row]:
    first = rows[0]
    scheduler = Scheduler(task_problem(first.model, first.cluster, first.workload, None))
    bounds = [row.bound_s for row in rows]
    spaces = {kind: scheduler.candidates.spaces(kind) for kind in POLICIES}
    left_s, best = MOST_SECONDS, {}
    for kind in sorted(POLICIES, key=lambda kind: sum(space.num_points for space in spaces[kind])):
        needed_s = sweep_seconds(spaces[kind])
        best[kind] = swept(spaces[kind], bounds, everything=needed_s <= left_s), needed_s <= left_s
        left_s -= needed_s if needed_s <= left_s else 0.0
    found = []
    for i, row in enumerate(rows):
        kinds = CHOICES[row.choice]
        rps = max(best[kind][0][i] for kind in kinds)
        assert row.chosen is not None or rps == 0, "a point that the search did not find"
        over = rps / row.throughput_rps - 1 if row.throughput_rps else 0.0
        found.append(replace(row, swept=over, all_swept=all(best[kind][1] for kind in kinds)))
    return found


def sweep_seconds(spaces: Sequence[Space]) -> float:
    if not spaces:
        return 0.0
    largest = max(spaces, key=lambda space: space.num_points)
    pilot = largest.points(np.arange(min(PILOT, largest.num_points)))
    largest.evaluate(pilot)  # tables are made on the first call
    started = time.process_time()
    largest.evaluate(pilot)
    each_s = (time.process_time() - started) / len(next(iter(pilot.values())))
    return each_s * sum(space.num_points for space in spaces)


def swept(spaces: Sequence[Space], bounds: Sequence[float | None], *, everything: bool) -> list[float]:
    rng = np.random.default_rng(0)
    best = np.zeros(len(bounds))
    for space in spaces:
        if everything:
            for _, evaluation in space.sweep():
                best = np.maximum(best, _best_under(evaluation, bounds))
        else:
            indices = drawn(space, rng)
            for part in np.array_split(indices, -(-len(indices) // POINTS_AT_ONCE)):
                best = np.maximum(best, _best_under(space.evaluate(space.points(part)), bounds))
    return best.tolist()


def drawn(space: Space, rng: np.random.Generator) -> np.ndarray:
    """Return the numbers of a random share SAMPLED of a placement's points: the same share of lines, and of points on a
    line."""
    counts = space.lines[2]
    starts = np.cumsum(counts) - counts
    share = SAMPLED if len(counts) == 1 else np.sqrt(SAMPLED)
    picked = [0] if len(counts) == 1 else rng.choice(len(counts), max(1, round(share * len(counts))), replace=False)
    parts = [np.arange(0)]
    for line in np.sort(picked):
        count = counts[line]
        if count:
            parts.append(starts[line] + np.sort(rng.choice(count, max(1, round(share * count)), replace=False)))
    found = np.concatenate(parts)
    return found if len(found) else np.zeros(1, int)


def _best_under(evaluation: Evaluation, bounds: Sequence[float | None]) -> np.ndarray:
    throughput = np.where(evaluation.fits, evaluation.throughput, 0.0)
    latency = evaluation.performance.latency
    return np.asarray([throughput[latency <= (bound_s or np.inf)].max(initial=0.0) for bound_s in bounds])


# Tables --------------------------------------------------------------------------------------------------------------


def show(row: Row) -> str:
    bound = "none" if row.bound_s is None else f"{row.bound_s:.2f}"
    head = f"{row.model:10} {row.cluster:8} {row.workload:15} {bound:>6} {row.choice:6}"
    if row.chosen is None:
        return f"{head}  no schedule keeps the bound"
    return (
        f"{head} {row.throughput_rps:8.3f} {row.latency_s:7.2f} {_ratio(row.over_ft):>6} {_ratio(row.over_static):>6} "
        f"{row.evaluations:6d} {row.space_size:10d} {100 * row.evaluations / row.space_size:6.3f}% {row.seconds:5.2f} "
        f"{100 * row.gap:5.2f}%  {_swept(row):15}  {row.chosen}"
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _swept(row: Row) -> str:
    return "" if row.swept is None else f"{100 * row.swept:+.2f}% {'all' if row.all_swept else 'sampled'}"


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| model, devices | policies | searches | plan over FT, mean (range) | plan over static, mean | chosen "
        "policies | "
        "seconds, median / most | largest share of settings evaluated | largest gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((f"{row.model}, {row.cluster}", row.choice), []).append(row)
    for (where, choice), group in groups.items():
        over = np.asarray([row.over_ft for row in group if row.over_ft is not None])
        static = np.asarray([row.over_static for row in group if row.over_static is not None])
        seconds = np.asarray([row.seconds for row in group if row.chosen is not None])
        kinds = Counter(row.chosen.split()[0] for row in group if row.chosen is not None)
        cells = [where, choice, str(len(group)), f"{over.mean():.2f}x ({over.min():.2f} to {over.max():.2f})"]
        cells += [f"{static.mean():.2f}x", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())]
        cells += [f"{np.median(seconds):.2f} / {seconds.max():.2f}"]
        cells += [f"{100 * max(row.evaluations / row.space_size for row in group if row.chosen is not None):.3f}%"]
        cells += [f"{100 * max(row.gap for row in group):.2f}%"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| model, devices, task | bound, s | policies | chosen | req/s | latency, s | /FT | /static | looked at | s | "
        "gap | sweep |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bound = "none" if row.bound_s is None else f"{row.bound_s:.2f}"
        cells = [f"{row.model}, {row.cluster}, {row.workload}", bound, row.choice]
        if row.chosen is None:
            cells += ["none keeps it", *("-" for _ in range(7)), _swept(row)]
        else:
            share = 100 * row.evaluations / row.space_size
            cells += [row.chosen, f"{row.throughput_rps:.2f}", f"{row.latency_s:.2f}", _ratio(row.over_ft)]
            cells += [_ratio(row.over_static), f"{row.evaluations} of {row.space_size:.3g} ({share:.2g}%)"]
            cells += [f"{row.seconds:.2f}", f"{100 * row.gap:.1f}%", _swept(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    for choice in CHOICES:
        chosen_rows = [row for row in rows if row.choice == choice and row.chosen is not None]
        over = np.asarray([row.over_ft for row in chosen_rows if row.over_ft is not None])
        static = np.asarray([row.over_static for row in chosen_rows if row.over_static is not None])
        seconds = np.asarray([row.seconds for row in chosen_rows])
        share = max((row.evaluations / row.space_size for row in chosen_rows), default=0.0)
        yield (
            f"{choice}: {len(chosen_rows)} rows; over FT {over.mean():.2f}x in the mean, "
            f"{over.min():.2f} to {over.max():.2f}x, "
            f"over static {static.mean():.2f}x, {static.min():.2f} to {static.max():.2f}x; "
            f"{np.median(seconds):.2f} s median, {seconds.max():.2f} s most, {(seconds < 1).sum()} under 1 s; "
            f"{100 * share:.2f}% of the space at most; gap {100 * max(row.gap for row in chosen_rows):.2f}% at most"
        )
        for name, exhaustive in (("all points", True), ("samples", False)):
            beaten = [row.swept for row in chosen_rows if row.swept is not None and row.all_swept == exhaustive]
            if beaten:
                yield f"  {name} of {len(beaten)} rows: {100 * min(beaten):+.2f}% to {100 * max(beaten):+.2f}%"


def path_of(model: str, cluster: str, workload: str, choices: Choices = CHOICES) -> Path:
    return RESULTS / f"{'-'.join((model, cluster, workload, *(choices if choices is not CHOICES else ())))}.json"


def rows_of(model: str, cluster: str, workload: str, choices: Choices = CHOICES, *, again: bool = False) -> list[Row]:
    path = path_of(model, cluster, workload, choices)
    if path.is_file() and not again:
        return [Row(**row) for row in json.loads(path.read_text())]
    rows = task_rows(model, cluster, workload, choices)
    _write(path, rows)
    return rows


@click.command()
@click.option("--only", help="Run only this model.")
@click.option("--check", is_flag=True, help="Compare with a sweep of all points, or of a sample.")
@click.option("--again", is_flag=True, help="Search finished cases again.")
@click.option(
    "--sla",
    type=click.Choice(["length", "request"]),
    default="length",
    help="The latency that is bounded; request: that of all requests.",
)
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table to this file.")
def main(only: str | None, check: bool, again: bool, sla: str, page: Path | None) -> None:
    if sla == "request":
        names = [(m, c, w) for m, c, workloads in SCENARIOS for w in workloads if only in (None, m)]
        free = [task_problem(*name, None) for name in names]
        all_requests.show([(subject, faster_transformer(subject).latency.tolist()) for subject in free])
        return
    click.echo(
        "model      cluster  workload         bound choice    req/s latency    /FT /static  evals      space   share"
        "  sec.   gap  sweep            chosen"
    )
    tasks = [(m, c, w) for m, c, workloads in SCENARIOS for w in workloads if only in (None, m)]
    found = {}
    # All searches run before the first sweep, since they are quick and their results are needed first.
    for task in tasks:
        found[path_of(*task)] = rows = rows_of(*task, again=again)
        if not check:
            click.echo("\n".join(map(show, rows)))
    for path, rows in found.items():
        if check and any(row.swept is None for row in rows):
            found[path] = with_sweep(rows)
            _write(path, found[path])
        if check:
            click.echo("\n".join(map(show, found[path])))
    everything = [row for rows in found.values() for row in rows]
    for line in summary(everything):
        click.echo(line)
    if page is not None:
        write_atomic(page, markdown(everything))


def _write(path: Path, rows: Sequence[Row]) -> None:
    write_atomic(path, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
