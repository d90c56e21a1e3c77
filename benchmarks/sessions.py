"""Sessions: brute force on small problems, the ceiling attacked by random settings, decisions that flip, and published
measurements of what turns find in the cache.

    python -m benchmarks.sessions brute --problems 10
    python -m benchmarks.sessions attack --last 500
    python -m benchmarks.sessions flips
    python -m benchmarks.sessions published
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import NamedTuple, TextIO

import click
import numpy as np

import xgpt
from benchmarks.lib.results import record
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import SearchEffort
from xgpt.core.schema.workload import SessionLaw
from xgpt.core.sessions import workload_of_law
from xgpt.core.turns import FIRST, TraceSessions
from xgpt.core.workload import TraceLengths
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xprofiler.store import profile_of
from xscheduler.objectives.capacities import ROUTES
from xscheduler.objectives.sessions import KINDS, found_in_sessions
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xsimulator.run import run_requests
from xsimulator.session_rate import SessionTrial
from xsimulator.sessions import logged_turns

CLUSTERS = (("h100x1", 1), ("h200x1", 1), ("a100x16", 2), ("h100x8", 2), ("l40sx8", 4))
MODELS = ("llama-3.1-8b", "opt-13b", "qwen3-8b")


def random_law(rng: np.random.Generator, most: int) -> SessionLaw:
    """Return a law of sessions whose contexts hold at most `most` tokens."""

    def between(low: float, high: float) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    shared = int(rng.choice([0, between(64, most // 4)]))
    added, output, first = between(20, most // 8), between(8, min(most // 8, 100)), between(50, most // 4)
    pause = float(np.exp(rng.uniform(np.log(0.05), np.log(20))))
    return SessionLaw.model_validate(
        {
            "turns": {"kind": "uniform", "min": 1, "max": between(2, 12)},
            "shared_prefix": shared,
            "first_input": {"kind": "uniform", "min": max(1, first // 2), "max": 2 * first},
            "added_input": {"kind": "uniform", "min": max(1, added // 3), "max": 2 * added},
            "output": {"kind": "uniform", "min": max(1, output // 3), "max": 2 * output},
            "left_out": float(rng.choice([0.0, 0.5])),
            "pause": {"median_s": pause, "p90_s": float(pause * rng.uniform(1.1, 8))},
            "max_context": most,
        }
    )


def random_problem(rng: np.random.Generator) -> Problem:
    """Return a problem of short sessions. Its runs are as long as a plan's: in runs of 2,000 turns, queues that grow do
    not yet break bounds, so that rates above the ceiling seem to be kept.
    """
    model = str(rng.choice(MODELS))
    most = 1500 if model == "opt-13b" else int(rng.choice([4000, 16_000]))
    workload = workload_of_law("random", random_law(rng, most))
    ttft, tpot = float(np.exp(rng.uniform(-1, 2))), float(np.exp(rng.uniform(-3.5, -1.5)))
    asked: dict[str, float] = {"ttft_s": ttft, "session_wait_s": float(ttft * rng.uniform(1, 12))}
    if rng.random() < 0.5:
        asked["tpot_s"] = tpot
    cluster, devices = CLUSTERS[int(rng.integers(len(CLUSTERS)))]
    request = plan_request(
        model=model,
        cluster=cluster,
        devices=devices,
        workload=workload,
        quantile=float(rng.choice([0.9, 0.95, 0.99])),
        **asked,
    )
    return resolve(request)


EFFORT = SearchEffort(method="given", evaluations=1, space_size=1, seconds=0.0)


def attacked(problem: Problem, rng: np.random.Generator, tries: int) -> float:
    """Return the highest rate of random settings, in turns a second."""
    constraint = scheduler(problem).problem.constraint
    by = scheduler(replace(problem, constraint=constraint.but(session_wait_s=None, session_time_s=None)))
    spaces = [space for kind in KINDS for space in by.candidates.spaces(kind) if space.num_points]
    best = 0.0
    for _ in range(tries if spaces else 0):
        space = spaces[int(rng.integers(len(spaces)))]
        columns = space.points(rng.integers(space.num_points, size=1))
        settings = space.settings(columns, 0)
        draft = by.draft_at(space, settings, EFFORT)
        if draft is None:
            continue
        draft = draft.but(constraint=constraint)
        trial = SessionTrial(draft, problem.profile)
        start = best * 1.02 or 0.3 * draft.estimate.throughput_rps
        if best and not trial.keeps(start / trial.turns):
            continue
        rate = trial.highest(start / trial.turns) * trial.turns
        best = max(best, rate)
    return best


def brute_force(problem: Problem) -> float:
    """Return the highest rate of all settings, in turns a second."""
    constraint = scheduler(problem).problem.constraint
    by = scheduler(replace(problem, constraint=constraint.but(session_wait_s=None, session_time_s=None)))
    best = 0.0
    for space in (space for kind in KINDS for space in by.candidates.spaces(kind)):
        columns = space.points(np.arange(space.num_points))
        for i in range(space.num_points):
            draft = by.draft_at(space, space.settings(columns, i), EFFORT)
            if draft is None:
                continue
            trial = SessionTrial(draft.but(constraint=constraint), problem.profile)
            if not best or trial.keeps(1.001 * best / trial.turns):
                best = max(best, trial.highest((best or 1.0) / trial.turns) * trial.turns)
    return best


@click.group()
def main() -> None:
    pass


@main.command()
@click.option("--first", default=0, show_default=True)
@click.option("--last", default=499, show_default=True)
@click.option("--tries", default=6, show_default=True)
@click.option("--seconds", default=1000.0, show_default=True)
def attack(first: int, last: int, tries: int, seconds: float) -> None:
    """Attack the ceiling of random problems by random settings. Each problem is a line, so that a file of lines can be
    gone on with.
    """
    began = time.monotonic()
    for seed in range(first, last + 1):
        if time.monotonic() - began > seconds:
            break
        rng = np.random.default_rng(seed)
        try:
            problem = random_problem(rng)
            found = next(iter(found_in_sessions(problem).values()))
        except InfeasibleError:
            click.echo(json.dumps({"seed": seed}))
            continue
        rate = found.plan.estimate.capacity.rate_per_s  # type: ignore[union-attr]
        best = max(rate, attacked(problem, rng, tries))
        click.echo(json.dumps({"seed": seed, "plan": rate, "best": best, "ceiling": found.ceiling.most}))


@main.command()
@click.argument("lines", type=click.File())
def attacks(lines: TextIO) -> None:
    """Sum up what `attack` has written."""
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    found = [row for row in rows if row.get("ceiling")]
    over, gains = ([row["best"] / row[name] - 1 for row in found] for name in ("ceiling", "plan"))
    claim = (
        "Of the ceilings of {count} random problems, {over} are exceeded, by at most {most}. In {better}, settings "
        "drawn at random serve over 2% more than the plan, by at most {gain}. The median ceiling is {gap} times the "
        "best rate. The table has the problems in which the plan loses most."
    )
    figures = {
        "count": f"{len(found)}",
        "over": f"{sum(each > 0 for each in over)}",
        "most": f"{max(0.0, *over):.1%}",
        "better": f"{sum(each > 0.02 for each in gains)}",
        "gain": f"{max(gains):.1%}",
        "gap": f"{1 / (1 + float(np.median(over))):.2f}",
    }
    table = ["| problem | plan, turns/s | best | ceiling |", "|---|---|---|---|"]
    for row in sorted(found, key=lambda row: row["plan"] / row["best"])[:5]:
        table.append(f"| {row['seed']} | {row['plan']:.4g} | {row['best']:.4g} | {row['ceiling']:.4g} |")
    record("sessions/ceiling", claim, table, **figures)


@main.command()
@click.option("--problems", default=10, show_default=True)
def brute(problems: int) -> None:
    """Compare plans with the best of all settings on small problems."""
    table, seed = ["| problem | settings | plan, turns/s | best of all | lost |", "|---|---|---|---|---|"], 0
    while len(table) < problems + 2:
        seed += 1
        rng = np.random.default_rng(10_000 + seed)
        problem = replace(random_problem(rng), fixed={"token_budget": int(rng.choice([512, 2048]))})
        if problem.max_devices != 1:
            continue
        try:
            plan = next(iter(found_in_sessions(problem).values())).plan
        except InfeasibleError:
            continue
        best, rate = brute_force(problem), plan.estimate.capacity.rate_per_s  # type: ignore[union-attr]
        table.append(
            f"| {seed} | {plan.search.space_size} | {rate:.4g} | {best:.4g} | {max(0.0, 1 - rate / best):.1%} |"
        )
        click.echo(table[-1])


def _lognormal(median: int, p90: int, most: int) -> dict[str, object]:
    return {"kind": "lognormal", "median": median, "p90": p90, "max": most}


def _uniform(low: int, high: int) -> dict[str, object]:
    return {"kind": "uniform", "min": low, "max": high}


class Flip(NamedTuple):
    model: str
    bounds: dict[str, float]
    law: dict[str, object]


FLIPS = {
    "questions on long documents": Flip(
        "llama-3.1-8b",
        {"session_wait_s": 8.0, "ttft_s": 2.0},
        {
            "turns": _uniform(1, 8),
            "shared_prefix": 200,
            "first_input": _lognormal(3000, 20_000, 60_000),
            "added_input": _uniform(20, 400),
            "output": _uniform(50, 300),
            "pause": {"median_s": 10, "p90_s": 60, "max_s": 300},
            "max_context": 80_000,
        },
    ),
    "short turns after a long system prompt": Flip(
        "llama-3.1-8b",
        {"session_wait_s": 5.0, "ttft_s": 0.5, "tpot_s": 0.03},
        {
            "turns": _uniform(1, 6),
            "shared_prefix": 6000,
            "first_input": _uniform(20, 200),
            "added_input": _uniform(10, 60),
            "output": _lognormal(150, 900, 3000),
            "pause": {"median_s": 5, "p90_s": 30, "max_s": 120},
            "max_context": 16_000,
        },
    ),
    "reasoning, little K/V memory": Flip(
        "qwen3-32b",
        {"session_wait_s": 20.0, "ttft_s": 2.0},
        {
            "turns": _uniform(1, 6),
            "first_input": _uniform(50, 400),
            "added_input": _uniform(30, 200),
            "output": _lognormal(1000, 4000, 8000),
            "left_out": 0.9,
            "pause": {"median_s": 5, "p90_s": 20, "max_s": 60},
            "max_context": 16_000,
        },
    ),
}


@main.command()
def flips() -> None:
    """Compare routers, and keeping K/V with computing it anew and with host memory, on four replicas of one device."""
    columns = "sessions | by session, 1/s | by prefix | by load | each replica alone, kept | computed anew | from host"
    table = [f"| {columns} |", "|---|---|---|---|---|---|---|"]
    gains = dict[str, float]()
    for name, (model, bounds, law) in FLIPS.items():
        plan = xgpt.plan(
            model=model,
            cluster="h100x8",
            devices=4,
            workload=workload_of_law(name, SessionLaw.model_validate(law)),
            latency_bound_s=None,
            quantile=0.9,
            policy="chunked",
            fix={"tp": 1, "replicas": 4},
            **bounds,  # type: ignore[arg-type]
        )
        assert plan.estimate.sessions is not None
        found, profile = plan.estimate.sessions, profile_of(plan, None)
        rates = {route: SessionTrial(plan, profile, route=route).highest(found.rate_per_s) for route in ROUTES}
        alone = found.rate_per_s, found.alone_per_s or 0.0, found.from_host_per_s or found.rate_per_s
        gains[name] = rates["session"] / rates["load"]
        table.append(f"| {name} | {' | '.join(f'{rate:.3g}' for rate in [*rates.values(), *alone])} |")
        click.echo(table[-1])
    low, high = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    claim = (
        "The best router depends on the sessions: for {high}, routing by session serves {more} as many sessions within "
        "the bounds as routing by load; for {low}, only {less} as many. Simulated with the same sessions at each rate; "
        "not measured."
    )
    figures = {"more": f"{gains[high]:.2f} times", "less": f"{gains[low]:.2f} times", "high": high, "low": low}
    record("sessions/routes", claim, table, **figures)


class Published(NamedTuple):
    """Rounds of SGLang's benchmark/hicache/bench_multiturn.py with a barrier: each client sends a turn in each round.

    Attributes:
        tokens: K/V memory, or None if it held everything.
        hits: the share of prompt tokens that was found, by round.
    """

    source: str
    clients: int
    prompt: int
    output: int
    tokens: int | None
    hits: tuple[float, ...]


PAGE = 64
PUBLISHED = (
    Published(
        "sgl-project/sglang pull 27010, device memory only",
        *(128, 512, 64, 262_144),
        (0.0, 0.470588, 0.653846, 0.630580, 0.363459, 0.239976, 0.146925, 0.143266, 0.055469, 0.035112),
    ),
    Published(
        "sgl-project/sglang pull 27010, with host memory",
        *(128, 512, 64, None),
        (0.0, 0.470588, 0.653846, 0.742857, 0.795455),
    ),
    Published(
        "sgl-project/sglang issue 33984, with host memory and SSD",
        *(20, 8192, 2, None),
        (0.0, 0.499939, 0.666558, 0.749863, 0.799844, 0.833164, 0.856964, 0.874813, 0.888696),
    ),
)


def rounds(case: Published, rng: np.random.Generator) -> TraceLengths:
    """Return the turns of a case: in each round the clients in a random order, a second apart on average."""
    count, rounds_ = case.clients, len(case.hits)
    turn = np.arange(count * rounds_)
    number = turn // count
    grown = number * (case.prompt + case.output)
    like = np.where(number == 0, FIRST, turn - count)
    starts = [(count + 30) * i + rng.permutation(np.cumsum(rng.exponential(1.0, count))) for i in range(rounds_)]
    sessions = TraceSessions(turn % count, np.full(len(turn), FIRST), np.zeros(len(turn)), like, grown)
    inputs, outputs = case.prompt + grown, np.full(len(turn), case.output)
    return TraceLengths(inputs, outputs, np.concatenate(starts), sessions=sessions)


@main.command()
def published() -> None:
    """Compare what turns find in the simulated cache with published measurements. Nothing is fitted to them."""
    profile = xgpt.profile(model="llama-3.1-8b", cluster="h100x8")
    plan = xgpt.plan(
        model="llama-3.1-8b",
        cluster="h100x8",
        devices=8,
        workload="azure-conv",
        latency_bound_s=None,
        objective="saturated",
        policy="chunked",
        profile=profile,
        fix={"tp": 8},
    )
    table, errors = ["| source | round | measured | simulated |", "|---|---|---|---|"], list[float]()
    kept = list[float]()
    for case in PUBLISHED:
        trace = rounds(case, np.random.default_rng(0))
        whole = int((trace.input + trace.output).max()) * case.clients
        blocks = (case.tokens or 2 * whole) // PAGE
        draft = plan.but(block_size=PAGE, stages=tuple(stage.but(kv_blocks=blocks) for stage in plan.stages))
        run = logged_turns(draft, trace, run_requests(draft, profile, trace, case.output))
        for i, hit in enumerate(case.hits):
            mine = slice(i * case.clients, (i + 1) * case.clients)
            found = float(run.cached[mine].sum() / trace.input[mine].sum())
            if case.tokens is not None and trace.sessions is not None and whole > case.tokens and i > 2:
                table.append(f"| {case.source} | {i} | {hit:.3f} | {found:.3f} |")
                errors.append(abs(found - hit))
            else:
                kept.append(abs(found - hit))
    claim = (
        "In {rows} rounds of one published run in which memory holds only some sessions, the share of prompt tokens "
        "found is simulated to within {median} of the measured one (median; at most {most}). In {others} rounds in "
        "which nothing is evicted, it is the measured one to within {least}. Nothing was fitted to these rows."
    )
    figures = {"median": np.median(errors), "most": max(errors), "least": max(kept)}
    counts = {"rows": len(errors), "others": len(kept)}
    record("sessions/hits", claim, table, **counts, **{name: f"{value:.3f}" for name, value in figures.items()})


if __name__ == "__main__":
    main()
