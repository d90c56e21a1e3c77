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
from xgpt.core.turns import FIRST, Ints, TraceSessions
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


class Hints(NamedTuple):
    """What the engine is told when a turn ends.

    Attributes:
        pause: standard deviation of the logarithm of the stated pause over the real one; None if none is stated.
        last: whether it is told that a turn is the last one.
    """

    pause: float | None = None
    last: bool = False


POLICIES = {
    "least recently used": Hints(),
    "last turn": Hints(last=True),
    "pause": Hints(pause=0.7),
    "pause and last turn": Hints(pause=0.7, last=True),
    "exact pause and last turn": Hints(pause=0.0, last=True),
}


def share_found(run: TurnTimes, tokens: int, hints: Hints, scale: float = 1.0) -> float:
    """Return the share of prompt tokens that turns find in a memory for so many tokens, at the times of a run. What is
    expected back last is evicted first; without hints, what was used least recently. What is overdue by its whole pause
    counts as never coming back.

    Args:
        scale: factor on the rate at which the run's sessions begin.
    """
    trace, sessions = run.trace, run.trace.sessions
    assert sessions is not None
    earlier = run.arrived_s[sessions.first][sessions.session] * (1 - 1 / scale)
    arrived, ended = run.arrived_s - earlier, run.end_s - earlier
    rng, later = np.random.default_rng(0), np.flatnonzero(sessions.after != FIRST)
    pause_s = rng.choice(sessions.pause_s[later], len(arrived))  # stated for a last turn, if that is not known
    pause_s[sessions.after[later]] = sessions.pause_s[later]
    pause_s *= np.exp((hints.pause or 0.0) * rng.standard_normal(len(pause_s)))
    if hints.last:
        pause_s[np.setdiff1d(np.arange(len(arrived)), sessions.after[later])] = np.inf
    shared, running, hits = shared_tokens(trace), 0, 0
    kept = dict[int, tuple[int, int]]()  # session: its last turn, and how many of its tokens are kept
    order = sorted([(at, 1, i) for i, at in enumerate(arrived)] + [(at, 0, i) for i, at in enumerate(ended)])

    def stays(own: int, now: float) -> float:
        turn, _ = kept[own]
        away = now - ended[turn]
        if hints.pause is None:
            return -np.inf if pause_s[turn] == np.inf else -away
        return -np.inf if away > 2 * pause_s[turn] else away - pause_s[turn]

    for at, arrives, i in order:
        own, size = int(sessions.session[i]), int(trace.input[i] + trace.output[i]) - shared
        if arrives:
            found = kept.pop(own, (0, 0))[1] if sessions.after[i] != FIRST else 0
            hits += min(found + shared, int(sessions.common[i]), int(trace.input[i]) - 1)
            running += size
        else:
            running -= size
            kept[own] = i, size
        excess = running + shared + sum(each for _, each in kept.values()) - tokens
        while excess > 0 and kept:
            worst = min(kept, key=lambda one: stays(one, at))
            turn, most = kept.pop(worst)
            if excess < most:
                kept[worst] = turn, most - excess
            excess -= most
    return hits / int(trace.input.sum())


EVICTED = {
    "coding-agents": {"session_wait_s": 60.0, "ttft_s": 10.0},
    "agentic-code": {"session_wait_s": 60.0, "ttft_s": 10.0},
    "multi-turn-chat": {"session_wait_s": 4.0, "ttft_s": 1.0},
    "questions on long documents": FLIPS["questions on long documents"].bounds,
}
SCALES, TURNS = (1.05, 1.1, 1.2, 1.4), 4000


@main.command()
def evictions() -> None:
    """Compare evicting what was used least recently with evicting by hints of the next pause, at a simulated replica's
    times.
    """
    columns = [*POLICIES, "nothing evicted", "more sessions by pause", "by pause and last turn"]
    table = [f"| sessions | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    gains = dict[str, float]()
    for name, bounds in EVICTED.items():
        law = None if name not in FLIPS else workload_of_law(name, SessionLaw.model_validate(FLIPS[name].law))
        plan = xgpt.plan(
            model="llama-3.1-8b",
            cluster="h100x1",
            workload=law or name,
            latency_bound_s=None,
            **{"quantile": 0.9, "policy": "chunked", **bounds},  # type: ignore[arg-type]
        )
        assert plan.estimate.sessions is not None
        trial, tokens = SessionTrial(plan, profile_of(plan, None)), plan.stages[0].kv_blocks * plan.block_size
        whole = trial.at(plan.estimate.sessions.rate_per_s).times
        assert whole.trace.sessions is not None
        run = taken(whole, np.flatnonzero(whole.trace.sessions.session < TURNS / trial.turns))
        found = [share_found(run, tokens, hints) for hints in POLICIES.values()]
        more = [_most(run, tokens, hints, found[0]) for hints in list(POLICIES.values())[2:4]]
        gains[name] = more[1]
        cells = [f"{each:.3f}" for each in (*found, trial.most_share)] + [f"{100 * (each - 1):.0f}%" for each in more]
        table.append(f"| {name} | {' | '.join(cells)} |")
        click.echo(table[-1])
    shipped = max(gain for name, gain in gains.items() if name not in FLIPS)
    claim = (
        "If the engine were told each pause (within a factor of 2, for two of three turns) and which turn is last, "
        "and evicted what is expected back last, a replica would serve {most} more sessions of shipped laws "
        "before it computed as many prompt tokens anew as under least recently used, at the same times of turns."
    )
    record("sessions/evictions", claim, table, most="less than 5%" if shipped == 1 else f"{100 * (shipped - 1):.0f}%")


def taken(run: TurnTimes, places: Ints) -> TurnTimes:
    columns = (each[places] for each in (run.arrived_s, run.first_s, run.end_s, run.cached))
    return TurnTimes(run.trace.take(places), *columns)


def _most(run: TurnTimes, tokens: int, hints: Hints, by_use: float) -> float:
    """Return the largest factor on the rate of sessions, of `SCALES`, at which no more prompt tokens a second are
    computed than by use at the run's own rate.
    """
    kept = (scale for scale in SCALES if scale * (1 - share_found(run, tokens, hints, scale)) <= 1 - by_use)
    return max(kept, default=1.0)


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
