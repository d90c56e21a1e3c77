"""Sessions: decisions that flip, and what turns find in the cache: measured by others, and if pauses were known.

python -m benchmarks.sessions flips
python -m benchmarks.sessions evictions
python -m benchmarks.sessions published
"""

from __future__ import annotations

from typing import NamedTuple

import click
import numpy as np

import xgpt
from benchmarks.lib.results import record
from xgpt.core.schema.workload import SessionLaw
from xgpt.core.sessions import workload_of_law
from xgpt.core.turns import FIRST, TraceSessions
from xgpt.core.workload import TraceLengths
from xprofiler.store import profile_of
from xscheduler.objectives.capacities import ROUTES
from xsimulator.run import run_requests
from xsimulator.session_rate import SessionTrial
from xsimulator.sessions import TurnTimes, logged_turns, shared_tokens


@click.group()
def main() -> None:
    pass


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


def _on_four(name: str) -> xgpt.Plan:
    model, bounds, law = FLIPS[name]
    return xgpt.plan(
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


@main.command()
def flips() -> None:
    """Compare routers, and keeping K/V with computing it anew and with host memory, on four replicas of one device."""
    columns = "sessions | by session, 1/s | by prefix | by load | each replica alone, kept | computed anew | from host"
    table = [f"| {columns} |", "|---|---|---|---|---|---|---|"]
    gains = dict[str, float]()
    for name in FLIPS:
        plan = _on_four(name)
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


def share_found(run: TurnTimes, tokens: int, *, knows_pauses: bool) -> float:
    """Return the share of prompt tokens that turns find in a memory for so many tokens, at the times of a run. What is
    evicted is either what was used least recently, or what comes back last.
    """
    trace, sessions = run.trace, run.trace.sessions
    assert sessions is not None
    back_s = np.full(len(trace.input), np.inf)
    later = np.flatnonzero(sessions.after != FIRST)
    back_s[sessions.after[later]] = run.arrived_s[later]
    shared, running, hits = shared_tokens(trace), 0, 0
    kept = dict[int, list[float]]()  # session: tokens, and how long it may stay
    order = sorted([(at, 1, i) for i, at in enumerate(run.arrived_s)] + [(at, 0, i) for i, at in enumerate(run.end_s)])
    for at, arrives, i in order:
        own, size = int(sessions.session[i]), int(trace.input[i] + trace.output[i]) - shared
        if arrives:
            found = kept.pop(own, (0,))[0] if sessions.after[i] != FIRST else 0
            hits += min(int(found) + shared, int(sessions.common[i]), int(trace.input[i]) - 1)
            running += size
        else:
            running -= size
            kept[own] = [size, -back_s[i] if knows_pauses else at]
        excess = running + shared + sum(each[0] for each in kept.values()) - tokens
        while excess > 0 and kept:
            worst = min(kept, key=lambda one: kept[one][1])
            less = min(excess, kept[worst][0])
            kept[worst][0] -= less
            excess -= less
            if not kept[worst][0]:
                del kept[worst]
    return hits / int(trace.input.sum())


@main.command()
def evictions() -> None:
    """Compare evicting what was used least recently with evicting what comes back last, which needs to know pauses."""
    table = ["| sessions | least recently used | comes back last | nothing evicted |", "|---|---|---|---|"]
    gains = list[float]()
    for name in FLIPS:
        plan = _on_four(name)
        assert plan.estimate.sessions is not None
        trial = SessionTrial(plan, profile_of(plan, None))
        for more in (1.0, 1.3):
            run = trial.at(more * plan.estimate.sessions.rate_per_s).times
            tokens = plan.stages[0].kv_blocks * plan.block_size
            lru, oracle = (share_found(run, tokens, knows_pauses=each) for each in (False, True))
            gains.append(oracle - lru)
            rate = "highest rate" if more == 1 else f"{more:g} times that rate"
            table.append(f"| {name}, {rate} | {lru:.3f} | {oracle:.3f} | {trial.most_share:.3f} |")
            click.echo(table[-1])
    claim = (
        "If the engine knew how long each session pauses, and evicted what comes back last, turns would find at most "
        "{most} more of their prompt tokens than under least recently used, at the same times of a simulated replica."
    )
    record("sessions/evictions", claim, table, most=f"{100 * max(gains):.1f} percentage points")


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
