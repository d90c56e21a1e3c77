"""Count the measurements that `xgpt tune` needs on engines whose true step times are hidden from it.

The machine is the simulator with other step times, another loop, other costs of mixed steps and another way of
requests than the prediction: drawn by part of a step and by size, so that no value of the tuner's parameters describes
it, and as widely as published measurements differ from predictions. The same machine is measured by Optuna's TPE, at
random, on the grid of vLLM's auto_tune.sh, and at the plan alone.

    python -m benchmarks.tune --problems 500 --output tune.json

With `--vllm`, the machine is vLLM on this machine. Settings that several strategies ask for are measured once, and each
strategy ends when its own measurements would have taken `--budget` seconds.

With `--published`, the machine is a published sweep: rows that `python -m benchmarks.truth --json` wrote, and their
settings from aiconfigurator-core's `silicon_sample.csv`. Candidates are the measured numbers of clients and divisions
of a model, device, engine and lengths; the value is requests/s for each device if TPOT is within the sweep's median,
else 0. A strategy chooses which rows to read.

    XGPT_VLLM_PYTHON=... python -m benchmarks.tune --vllm 'vllm serve ./llama' --workload log.csv --ttft 1 --tpot 0.06
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna

from benchmarks.lib.results import record, table
from xgpt.core.errors import XgptError
from xgpt.core.schema import ChunkedSettings, Profile
from xgpt.core.schema.tuning import TuneRun
from xgpt.problems import resolve
from xgpt.requests import TuneRequest, parse_arguments, plan_request
from xgpt.tuning.engines import Vllm
from xgpt.tuning.problem import EngineProblem, engine_problem
from xgpt.tuning.tune import Search, Told
from xscheduler.problem import Problem
from xscheduler.tuning.belief import TOLERANCE, Array, Belief, MeasuredRate
from xscheduler.tuning.model import EngineModel, MeasuredTimes
from xscheduler.tuning.tuner import Tuner
from xsimulator.calibrate import corrected
from xsimulator.capacity import CapacitySearch, Trial

PLACES = (
    ("llama-3.1-8b", "h100x1"),
    ("llama-3.1-8b", "h200x1"),
    ("qwen3-14b", "h100x1"),
    ("qwen3-8b", "l40sx8"),
    ("mistral-small-24b", "h200x1"),
    ("llama-2-7b", "a100x16"),
    ("qwen3-30b-a3b", "h200x1"),
)
WORKLOADS = ("azure-conv", "azure-code", "summarization", "translation", "chat-short", "chat-long", "code-generation")
TTFT, TPOT = (3.0, 30.0), (1.3, 5.0)
"""Ranges of the bounds, as multiples of the times of a small batch."""
SPREADS = {"tokens": 0.15, "encode_attention": 0.3, "decode_attention": 0.2, "head": 0.2, "overhead": 0.4}
"""Standard deviations of the logarithms of the hidden factors. Together they make mean TPOTs differ by 14% and TTFTs by
33%, as published ones do from predictions with imported tables (configs/errors.json: 2,805 rows)."""
PACE, TILT, MIXING, PATH_S = 0.12, 0.05, 0.15, 0.03
"""The same of all times together; standard deviation of the exponent with which times grow with a step's tokens; means
of the cost of mixed steps and of the further seconds of a request's way."""
APART = 0.33, 0.14
"""Standard deviations by which TTFTs and TPOTs of published rows differ from predictions, as above."""
NOISE, TIME_NOISE = 0.02, 0.03
"""Relative errors of a measured rate, and of measured times."""
MOST = 24
"""Largest number of measurements."""
WITHIN = 0.95
AUTO_TUNE = [(seqs, tokens) for seqs in (128, 256) for tokens in (512, 1024, 2048, 4096)]
"""The default grid of vLLM's auto_tune.sh, in its order."""
Strategy = Callable[["Machine | Real", EngineModel, int], Iterator[int]]


class Machine:
    """An engine with hidden times. Each candidate's true rate is simulated once."""

    def __init__(self, model: EngineModel, rng: np.random.Generator) -> None:
        self.model, self._rng = model, rng
        problem, draw = model.problem, rng.standard_normal
        by = {part: float(np.exp(spread * draw())) for part, spread in SPREADS.items()}
        pace = float(np.exp(PACE * draw()))
        self.profile = _tilted(corrected(problem.profile, {n: pace * f for n, f in by.items()}, "hidden", ""), rng)
        assert problem.engine is not None
        engine = problem.engine
        path_s = engine.before_admission_s + PATH_S * float(rng.exponential())
        self.engine = engine.but(mixing=engine.mixing + MIXING * float(rng.exponential()), before_admission_s=path_s)
        self._rates: dict[int, float] = {}

    def rate(self, candidate: int) -> float:
        if candidate not in self._rates:
            plan = self.model.plan(candidate).but(engine=self.engine)
            self._rates[candidate] = CapacitySearch(plan, self.profile, least_requests=1000).rate
        return self._rates[candidate]

    def measure(self, candidate: int) -> tuple[float, MeasuredTimes | None]:
        rate = self.rate(candidate) * float(np.exp(NOISE * self._rng.standard_normal()))
        if rate <= 0:
            return 0.0, None
        plan = self.model.plan(candidate).but(engine=self.engine)
        times = Trial(plan, self.profile, seed=7, least_requests=400).at(0.9 * rate)
        assert times is not None
        noise = np.exp(TIME_NOISE * self._rng.standard_normal(2))
        ttft_s, tpot_s = float(times.ttft_s.mean() * noise[0]), float(times.tpot_s.mean() * noise[1])
        return rate, MeasuredTimes(candidate, 0.9 * rate, ttft_s, tpot_s)

    @property
    def best(self) -> float:
        """The highest true rate of all that were simulated, among them each candidate that is promising by closed forms
        on the hidden times.
        """
        hidden = replace(self.model.problem, profile=self.profile, engine=self.engine)
        closed = self.model.rates_of(hidden)
        likely = np.flatnonzero(closed >= 0.85 * closed.max())
        return max(*(self.rate(int(index)) for index in likely), *self._rates.values())


def _tilted(profile: Profile, rng: np.random.Generator) -> Profile:
    tilt = TILT * float(rng.standard_normal())

    def bent(curve: Any) -> Any:
        points = np.maximum(curve.points, 1)
        seconds = np.maximum.accumulate(np.asarray(curve.seconds) * (points / 256) ** tilt)
        return curve.but(seconds=tuple(seconds.tolist()))

    layers = tuple(layer.but(rest=bent(layer.rest)) for layer in profile.layers)
    return profile.but(layers=layers)


class Outcome(NamedTuple):
    """The true rate of the recommended candidate after each measurement, and whether the strategy ended by its own
    proof that no candidate is better by more than the tolerance.
    """

    rates: list[float]
    proven: bool


def tuned(machine: Machine, model: EngineModel, seed: int) -> Outcome:
    tuner = Tuner(model, seed=seed)
    rates: list[float] = []
    verdict = tuner.standing()
    while not verdict.ends and len(rates) < MOST:
        assert verdict.next is not None
        rate, load = machine.measure(verdict.next)
        tuner.tell(MeasuredRate(verdict.next, rate), load)
        verdict = tuner.standing()
        assert verdict.best is not None
        rates.append(machine.rate(verdict.best))
    return Outcome(rates, verdict.is_decided)


def followed(order: Strategy) -> Callable[[Machine, EngineModel, int], Outcome]:
    def run(machine: Machine, model: EngineModel, seed: int) -> Outcome:
        best, true, rates = -1.0, 0.0, list[float]()
        for candidate in order(machine, model, seed):
            rate, _ = machine.measure(candidate)
            if rate > best:
                best, true = rate, machine.rate(candidate)
            rates.append(true)
        return Outcome(rates, proven=False)

    return run


def random(machine: Machine | Real, model: EngineModel, seed: int) -> Iterator[int]:
    yield from np.random.default_rng(seed).permutation(len(model.settings))[:MOST].tolist()


def grid(machine: Machine | Real, model: EngineModel, seed: int) -> Iterator[int]:
    for seqs, tokens in AUTO_TUNE:
        yield _nearest(model, tokens, seqs)


def planned(machine: Machine | Real, model: EngineModel, seed: int) -> Iterator[int]:
    yield int(model.rates(model.unfitted).argmax())


def tpe(machine: Machine | Real, model: EngineModel, seed: int) -> Iterator[int]:
    """TPE over both settings on logarithmic scales, told of each rate."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    budgets, batches = zip(*((s.token_budget, s.max_batch) for _, s in model.settings), strict=True)
    for _ in range(MOST):
        trial = study.ask()
        tokens = trial.suggest_int("token_budget", min(budgets), max(budgets), log=True)
        candidate = _nearest(model, tokens, trial.suggest_int("max_batch", 1, max(batches), log=True))
        yield candidate
        study.tell(trial, machine.rate(candidate))


def _nearest(model: EngineModel, tokens: int, batch: int) -> int:
    return model.nearest(ChunkedSettings(token_budget=tokens, max_batch=min(batch, tokens)))


STRATEGIES = {"tune": tuned} | {
    name: followed(order) for name, order in (("tpe", tpe), ("random", random), ("grid", grid), ("plan", planned))
}


class Real:
    """vLLM on this machine, driven as `xgpt tune` drives it."""

    def __init__(self, asked: EngineProblem, budget_s: float, seed: int) -> None:
        self.search = Search(asked, Vllm(), seed=seed)
        self.asked, self._budget_s, self._seed = asked, budget_s, seed
        self._runs: dict[int, TuneRun] = {}

    def run(self, candidate: int) -> TuneRun:
        if candidate not in self._runs:
            found = self.search.measured(candidate)
            assert found is not None
            self._runs[candidate] = found
            said = f"{found.start}: {found.rate_per_s:.2f}/s within the bounds, {found.seconds:.0f} s"
            print(f"  budget {found.token_budget}, batch {found.max_batch}: {said}", flush=True)
        return self._runs[candidate]

    def rate(self, candidate: int) -> float:
        return self.run(candidate).rate_per_s

    def followed(self, order: Iterator[int]) -> list[TuneRun]:
        """Return the runs of a strategy that begin within the budget."""
        runs: list[TuneRun] = []
        while sum(run.seconds for run in runs) < self._budget_s:
            candidate = next(order, None)
            if candidate is None:
                break
            runs.append(self.run(candidate))
        return runs

    def tune(self) -> list[TuneRun]:
        """Return the runs of `xgpt tune` until it ends by itself, or at the budget."""
        real, runs = self, list[TuneRun]()

        class Shared(Search):
            def measured(self, candidate: int, until_s: float = 0.0, told: Told | None = None) -> TuneRun | None:
                if sum(run.seconds for run in runs) >= real._budget_s:
                    return None
                runs.append(real.run(candidate))
                return runs[-1]

        found = Shared(self.asked, Vllm(), seed=self._seed).run()
        print(f"  tune: {found.recommendation.action}, {found.recommendation.why}; {found.ended}", flush=True)
        return runs


def real(given: argparse.Namespace) -> None:
    asked = engine_problem(
        parse_arguments(
            {
                "workload": given.workload,
                "ttft_s": given.ttft,
                "tpot_s": given.tpot,
                "quantile": given.quantile,
                "latency_bound_s": None,
                "profile": given.profile,
            },
            TuneRequest,
        ),
        given.vllm,
    )
    machine = Real(asked, given.budget, given.seed)
    model = machine.search.tuner.model
    now = machine.search.now
    assert now is not None
    orders = {
        name: order(machine, model, given.seed)
        for name, order in (("defaults", lambda *_: iter([now])), ("plan", planned), ("grid", grid), ("tpe", tpe))
    }
    predicted = model.rates(model.unfitted)
    for name in ("defaults", "plan", "tune", "grid", "tpe"):
        runs = machine.tune() if name == "tune" else machine.followed(orders[name])
        best = max(runs, key=lambda run: run.rate_per_s)
        settings = ChunkedSettings(token_budget=best.token_budget, max_batch=best.max_batch)
        first = 1 + next(i for i, run in enumerate(runs) if run.rate_per_s >= WITHIN * best.rate_per_s)
        row = {
            "problem": f"{Path(shlex.split(given.vllm)[2]).name}, {Path(given.workload).stem}",
            "strategy": name,
            "best within the bounds/s": f"{best.rate_per_s:.2f}",
            "predicted/s": f"{predicted[model.nearest(settings)]:.2f}",
            "settings": f"budget {settings.token_budget}, {settings.max_batch} requests",
            "measurements, first within 5% of its best": f"{len(runs)}, {first}",
            "seconds": f"{sum(run.seconds for run in runs):.0f}",
        }
        print("   ".join(row.values()), flush=True)
        if given.output is not None:
            with given.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if given.record:
        record_real([json.loads(line) for line in given.output.read_text(encoding="utf-8").splitlines()])


def record_real(rows: list[dict[str, str]]) -> None:
    """Store the table of all problems whose rows `--output` has."""
    best = {(row["problem"], row["strategy"]): float(row["best within the bounds/s"]) for row in rows}
    names = dict.fromkeys(problem for problem, _ in best)

    def over(strategy: str, other: str) -> str:
        return ", ".join(f"{best[name, strategy] / best[name, other]:.2f}" for name in names)

    figures = {name: over("tune", name) for name in ("defaults", "grid", "tpe")} | {"plan": over("plan", "defaults")}
    record("tune/vllm", REAL, table(list(rows[0]), [list(row.values()) for row in rows]), **figures)


TIMES = ("TTFT", "TPOT")


class Sweep(NamedTuple):
    """The rows of one published sweep.

    Attributes:
        places: logarithms of the clients and of the devices. # [candidates, 2]
        measured, predicted: requests/s for each device, 0 beyond the bound on TPOT. # [candidates]
        likely: the same predictions under random errors of TTFTs and TPOTs. # [samples, candidates]
    """

    name: str
    places: Array
    measured: Array
    predicted: Array
    likely: Array


def sweeps(rows: Path, sample: Path, rng: np.random.Generator) -> Iterator[Sweep]:
    with sample.open(encoding="utf-8", newline="") as file:
        settings = {row["id"]: row for row in csv.DictReader(file)}
    groups: dict[tuple[str, ...], list[tuple[int, int, int, dict[str, Any]]]] = {}
    for row in json.loads(rows.read_text(encoding="utf-8")):
        raw = settings.get(row["note"])
        if raw is None or raw["mode"] != "agg" or not row["predicted"]:
            continue
        devices = prod(max(1, int(raw[name] or 1)) for name in ("tp_size", "pp_size", "attention_dp_size"))
        names = ("model_path", "system", "backend", "backend_version", "precision", "isl", "osl")
        key = tuple(raw[name] for name in names)
        groups.setdefault(key, []).append((max(1, round(float(raw["batch_size"]))), devices, int(raw["osl"]), row))
    large = {" ".join(key): found for key, found in groups.items() if len(found) >= 8}
    within = {name: [float(np.std(np.log(_off(found, each)))) for each in TIMES] for name, found in large.items()}
    for name, found in large.items():
        others = [row for other, row in within.items() if other != name]
        yield _sweep(name, found, np.median(others, axis=0), rng)


def _off(found: list[tuple[int, int, int, dict[str, Any]]], time: str) -> Array:
    return np.asarray([one[3]["measured"][time] / one[3]["predicted"][time] for one in found])


def _sweep(
    name: str, found: list[tuple[int, int, int, dict[str, Any]]], within: Array, rng: np.random.Generator
) -> Sweep:
    """Return a sweep. Its likely values have errors of all times together, and of each time by itself as in the other
    sweeps (`within`: standard deviations of logarithms).
    """
    clients, devices, outputs = (np.asarray([one[at] for one in found], float) for at in range(3))
    paces = np.asarray(APART) * rng.standard_normal((512, 1, 2)) + within * rng.standard_normal((512, len(found), 2))
    bound_s = float(np.median([one[3]["measured"]["TPOT"] for one in found]))

    def rate(times: str, paces: Array) -> Array:
        ttft_s, tpot_s = (paces[..., i] * [one[3][times][name] for one in found] for i, name in enumerate(TIMES))
        rates = clients / (ttft_s + outputs * tpot_s) / devices
        return np.where(tpot_s <= bound_s, rates, 0.0)

    places = np.stack([np.log(clients) / log(3.0), np.log(devices) / log(2.0)], axis=1)
    as_is = np.ones((1, 1, 2))
    return Sweep(
        name, places, rate("measured", as_is)[0], rate("predicted", as_is)[0], rate("predicted", np.exp(paces))
    )


def published(given: argparse.Namespace) -> None:
    rows, sample, seed = given.published, given.sample, given.seed
    rng, found = np.random.default_rng(seed), list[dict[str, Any]]()
    for number, sweep in enumerate(sweeps(rows, sample, rng)):
        best, count = float(sweep.measured.max()), len(sweep.measured)

        def shares(order: Sequence[int], best: float = best, sweep: Sweep = sweep) -> list[float]:
            return (np.maximum.accumulate(sweep.measured[list(order)]) / best).tolist()

        belief, chosen = Belief(sweep.places, sweep.likely, np.zeros(len(sweep.likely)), seed=number), list[int]()
        standing = belief.standing()
        while not standing.ends and standing.next is not None:
            chosen.append(standing.next)
            belief = belief.measure(MeasuredRate(standing.next, float(sweep.measured[standing.next])))
            standing = belief.standing()
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=number))
        tried: list[int] = []
        for _ in range(MOST):
            trial = study.ask()
            lows, highs = sweep.places.min(axis=0), sweep.places.max(axis=0)
            at = [trial.suggest_float(f"{axis}", lows[axis], highs[axis]) for axis in range(2)]
            tried.append(int(((sweep.places - at) ** 2).sum(axis=1).argmin()))
            study.tell(trial, float(sweep.measured[tried[-1]]))
        orders = {"tune": chosen, "tpe": tried, "random": rng.permutation(count)[:MOST].tolist()}
        orders |= {"grid": list(range(count))[:MOST], "plan": [int(sweep.predicted.argmax())]}
        proven = {name: name == "tune" and standing.is_decided for name in orders}
        found.append(
            {"what": sweep.name, "candidates": count}
            | {name: {"shares": shares(order), "proven": proven[name]} for name, order in orders.items()}
        )
    sizes = [row["candidates"] for row in found]
    print(f"{len(found)} sweeps of {min(sizes)} to {max(sizes)} rows")
    print("\n".join([*summary(found), str(proofs(found))]))
    if given.record:
        record_counts("published", PUBLISHED, found)


def problem_of(rng: np.random.Generator) -> Problem:
    model, cluster = PLACES[rng.integers(len(PLACES))]
    asked: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "workload": str(rng.choice(WORKLOADS)),
        "engine": "vllm-0.32",
    }
    asked |= {"policy": "chunked", "devices": 1}
    loose = resolve(plan_request(**asked, latency_bound_s=None, ttft_s=10.0))
    few = EngineModel(loose).plan_of(ChunkedSettings(token_budget=2048, max_batch=4))
    ttft_s, tpot_s = (
        float(np.exp(rng.uniform(*np.log(factors)))) * time
        for factors, time in ((TTFT, few.estimate.ttft_s), (TPOT, few.estimate.tpot_s))
    )
    return loose.under(loose.constraint.but(ttft_s=ttft_s, tpot_s=tpot_s))


def run(number: int, seed: int) -> dict[str, Any] | None:
    rng = np.random.default_rng([seed, number])
    try:
        model = EngineModel(problem_of(rng))
        machine = Machine(model, rng)
        if len(model.settings) < 16 or machine.best <= 0:
            return None
        outcomes = {name: strategy(machine, model, number) for name, strategy in STRATEGIES.items()}
    except XgptError:
        return None
    problem = model.problem
    said = f"{problem.model.name} on {problem.cluster.name}, {problem.workload.name}"
    best = machine.best
    found: dict[str, Any] = {
        name: {"shares": [rate / best for rate in outcome.rates], "proven": outcome.proven}
        for name, outcome in outcomes.items()
    }
    return {"problem": number, "what": said, "candidates": len(model.settings), **found}


def needed(shares: list[float]) -> float:
    """Return the number of measurements after which the recommended setting stays within 5% of the best."""
    count = len(shares)
    while count and shares[count - 1] >= WITHIN:
        count -= 1
    return float("inf") if count == len(shares) else count + 1


def counts_of(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [needed(row[name]["shares"]) for row in rows]


def _quantile(counts: list[float], share: float) -> float:
    return float(np.quantile(counts, share, method="inverted_cdf"))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    columns = ("strategy", "measurements until within 5% of the best: median, 90%", "found", "regret after 3, 6, 12")
    lines = []
    for name in STRATEGIES:
        counts = counts_of(rows, name)
        regrets = [
            np.mean([1 - row[name]["shares"][min(after, len(row[name]["shares"])) - 1] for row in rows])
            for after in (3, 6, 12)
        ]
        shown = [f"{_quantile(counts, share):g}" for share in (0.5, 0.9)]
        used = np.median([len(row[name]["shares"]) for row in rows])
        found = f"{100 * np.mean(np.isfinite(counts)):.1f}%"
        regret = ", ".join(f"{100 * regret:.1f}%" for regret in regrets)
        lines.append((name, ", ".join(shown).replace("inf", "not found"), found, regret, f"{used:g}"))
    return table((*columns, "measurements in all, median"), lines)


def proofs(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the numbers of problems, of those in which tune ended by its own proof, and of true proofs."""
    ended = [row["tune"]["shares"][-1] for row in rows if row["tune"]["proven"]]
    return {"problems": len(rows), "ended": len(ended), "true": sum(share >= 1 / (1 + TOLERANCE) for share in ended)}


def record_counts(name: str, claim: str, rows: list[dict[str, Any]]) -> None:
    medians = {each: f"{_quantile(counts_of(rows, each), 0.5):g}" for each in ("tune", "tpe")}
    record(f"tune/{name}", claim, summary(rows), **medians, **proofs(rows))


PUBLISHED = (
    "In {problems} published sweeps of 8 to 24 rows, reading {tune} row in the median is enough for one within 5% of "
    "the best, for TPE {tpe}; of {ended} closing proofs {true} were true."
)
REAL = (
    "In vLLM on a CPU, the plan without any measurement serves {plan} times as much within the bounds as defaults do, "
    "and `xgpt tune` {defaults} times; {grid} times as much as auto_tune's grid and {tpe} times as Optuna's TPE find "
    "in the same time."
)
CLAIM = (
    "On {problems} engines whose step times are hidden from it, measurements until `xgpt tune` is within 5% of the "
    "best: {tune} in the median, Optuna's TPE {tpe}; of tune's {ended} closing proofs {true} were true."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a line for each problem; goes on after those that it has")
    parser.add_argument("--record", action="store_true", help="store the table as a result")
    parser.add_argument("--vllm", metavar="COMMAND", help="the command that runs now")
    parser.add_argument("--profile", help="of `xgpt profile --engine vllm`; without it, of xgpt's own engine")
    parser.add_argument("--workload", default="summarization")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.06)
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument("--budget", type=float, default=900.0, help="seconds of each strategy")
    parser.add_argument("--published", type=Path, metavar="ROWS.JSON")
    parser.add_argument("--sample", type=Path, metavar="CSV", help="with --published: silicon_sample.csv")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    if given.published is not None:
        published(given)
        return
    if given.vllm is not None:
        real(given)
        return
    begun = given.output is not None and given.output.exists()
    rows = [json.loads(line) for line in given.output.read_text(encoding="utf-8").splitlines()] if begun else []
    number = rows[-1]["problem"] + 1 if rows else 0
    while len(rows) < given.problems:
        row = run(number, given.seed)
        number += 1
        if row is not None:
            rows.append(row)
            if given.output is not None:
                with given.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            if len(rows) % 10 == 0:
                print("\n".join([*summary(rows), str(proofs(rows))]), flush=True)
    if given.record:
        record_counts("hidden", CLAIM, rows)
    print("\n".join([*summary(rows), str(proofs(rows))]))


if __name__ == "__main__":
    main()
