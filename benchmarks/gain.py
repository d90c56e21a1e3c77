"""Compute for many cases which policy is chosen, what this gains, and how the choice depends on the cost of mixed
steps.

    python -m benchmarks.gain [--quick] [--engine vllm-0.15] [--part 0/2] [--seconds 300] [--json results/gain.json ...]

Every case is a model on a cluster, a workload and a latency bound (a multiple of the nearest bound that any schedule
keeps, or no bound). Profiles come from the datasheet, with the engine's loop. Each case is planned with mixed steps in
which decodes take 0, 10, 20 and 40% longer. The plan is compared with the best uniform plan (equal stages, and chunked,
orca or static) and with the engine's defaults on the smallest groups of devices that have memory for the model. The
comparison is by saturated throughput and, for the engine's own cost of mixed steps, by the highest rate of Poisson
arrivals that keeps the bound. Cases in the first file are not planned again, so a long run can be divided into pieces
of `--seconds`. Cases in further files, from other parts, are included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from xgpt.comparing.current import CurrentEngine
from xgpt.comparing.scoring import score_current
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import EngineSpec, Plan
from xgpt.core.schema.plan import rate_of
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_engine
from xscheduler.objectives.best_plans import plan_each, plan_uniform
from xscheduler.problem import Problem

PAIRS = (
    ("llama-3.1-8b", "h100x8"),
    ("llama-3.1-8b", "h200x1"),
    ("llama-3.1-70b", "h100x8"),
    ("llama-3.1-70b", "h200x8"),
    ("qwen3-32b", "h100x8"),
    ("qwen3-32b", "h200x8"),
    ("qwen3-8b", "h200x1"),
)
WORKLOADS = ("azure-conv", "azure-code", "chat-long", "code-generation", "summarization", "translation")
BOUNDS = (1.25, 2.0, 5.0, None)
MIXING = (0.0, 0.1, 0.2, 0.4)
MOST_REQUESTS = 1 << 20
"""Number of requests in a step of an engine that is limited only by its memory."""
QUICK = (PAIRS[::2], WORKLOADS[:3:2], BOUNDS[1::2])


@dataclass(frozen=True)
class Case:
    """One planning problem.

    Attributes:
        bound: multiple of the nearest bound that a schedule keeps. None means no bound.
        chosen: the chosen policy, by the cost of mixed steps.
        over_uniform, over_default: the gain in saturated throughput, by the cost of mixed steps.
        arrivals_over_uniform, arrivals_over_default: the gain in the arrival rate, at the engine's own cost of mixed
            steps.
    """

    model: str
    cluster: str
    workload: str
    bound: float | None
    chosen: dict[float, str]
    over_uniform: dict[float, float]
    over_default: dict[float, float]
    arrivals_chosen: str | None = None
    arrivals_over_uniform: float | None = None
    arrivals_over_default: float | None = None


def default_of(problem: Problem) -> Plan | None:
    devices, engine = problem.cluster.devices_per_node, problem.engine
    assert engine is not None and engine.token_budget is not None
    for tp in (t for t in (1, 2, 4, 8) if t <= devices):
        try:
            most = engine.max_batch or MOST_REQUESTS
            return score_current(problem, CurrentEngine(tp, 1, devices // tp, 1, most, engine.token_budget))
        except (InfeasibleError, InputError):
            continue
    return None


def nearest_bound(problem: Problem) -> float:
    try:
        plan_each(problem.under(problem.constraint.model_copy(update={"latency_bound_s": 1e-4})))
    except InfeasibleError as error:
        if error.nearest_bound_s is not None:
            return error.nearest_bound_s
        raise
    raise AssertionError("no schedule is that fast")


def case_of(pair: tuple[str, str], workload: str, bound: float | None, engine: EngineSpec, *, arrivals: bool) -> Case:
    asked = {"model": pair[0], "cluster": pair[1], "workload": workload, "engine": engine}
    problem = resolve(plan_request(**asked, objective="saturated"))
    bound_s = None if bound is None else bound * nearest_bound(problem)
    problem = problem.under(problem.constraint.model_copy(update={"latency_bound_s": bound_s}))
    chosen, over_uniform, over_default = {}, {}, {}
    for mixing in MIXING:
        subject = replace(problem, engine=engine.model_copy(update={"mixing": mixing}))
        best = next(iter(plan_each(subject).values()))
        chosen[mixing] = best.policy.kind
        uniform, default = plan_uniform(subject), default_of(subject)
        if uniform is not None:
            over_uniform[mixing] = best.estimate.throughput_rps / uniform.estimate.throughput_rps - 1
        if default is not None:
            over_default[mixing] = best.estimate.throughput_rps / default.estimate.throughput_rps - 1
    found = Case(*pair, workload, bound, chosen, over_uniform, over_default)
    return _with_arrivals(found, problem) if arrivals and bound is not None else found


def _with_arrivals(case: Case, problem: Problem) -> Case:
    subject = problem.under(problem.constraint.model_copy(update={"objective": "arrivals"}))
    try:
        best = next(iter(plan_each(subject).values()))
    except InfeasibleError:
        return case  # a bound that only requests without waiting keep
    uniform, default = plan_uniform(subject), default_of(subject)
    rates = {name: rate_of(plan) for name, plan in (("uniform", uniform), ("default", default)) if plan is not None}
    gains = {f"arrivals_over_{name}": rate_of(best) / rate - 1 for name, rate in rates.items() if rate > 0}
    return replace(case, arrivals_chosen=best.policy.kind, **gains)


Key = tuple[str, str, str, float | None]


def keys(part: str, *, quick: bool) -> list[Key]:
    pairs, workloads, bounds = QUICK if quick else (PAIRS, WORKLOADS, BOUNDS)
    number, count = map(int, part.split("/"))
    return [(*pair, workload, bound) for pair, workload, bound in product(pairs, workloads, bounds)][number::count]


def planned(key: Key, engine: EngineSpec, *, quick: bool) -> Case | None:
    *pair, workload, bound = key
    try:
        # Planning for arrivals takes seconds for each case, so it is done for one bound in three.
        return case_of((pair[0], pair[1]), workload, bound, engine, arrivals=quick or bound == BOUNDS[1])
    except (InfeasibleError, InputError) as error:
        print(f"{pair[0]} {pair[1]} {workload} {bound}: {error}", flush=True)
        return None


def read(path: Path) -> dict[Key, Case | None]:
    if not path.exists():
        return {}
    found: dict[Key, Case | None] = {}
    for key, entry in json.loads(path.read_text(encoding="utf-8")):
        if entry is not None:
            by_mixing = {name: {float(m): case for m, case in entry[name].items()} for name in BY_MIXING}
            entry = Case(**(entry | by_mixing))
        found[key[0], key[1], key[2], key[3]] = entry
    return found


def write(path: Path, found: dict[Key, Case | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [(key, None if case is None else asdict(case)) for key, case in found.items()]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


BY_MIXING = ("chosen", "over_uniform", "over_default")


def summary(found: list[Case], engine: EngineSpec) -> str:
    lines = [
        "| extra time of decodes in mixed steps | how often each policy is chosen | gain over uniform plans: median | "
        "largest | gain over defaults: median | largest |",
        "|---|---|---|---|---|---|",
    ]
    for mixing in MIXING:
        texts = [
            _gains([getattr(case, name).get(mixing) for case in found]) for name in ("over_uniform", "over_default")
        ]
        lines.append(f"| +{100 * mixing:.0f}% | {_chosen(found, mixing)} | {' | '.join(texts)} |")
    rated = [case for case in found if case.arrivals_chosen]
    texts = [_gains([getattr(case, f"arrivals_over_{name}") for case in rated]) for name in ("uniform", "default")]
    lines.append(f"| arrivals, +{100 * engine.mixing:.0f}% | {_chosen(rated, None)} | {' | '.join(texts)} |")
    lines += ["", *_by(found, "workload", lambda case: case.workload)]
    lines += ["", *_by(found, "bound", lambda case: "none" if case.bound is None else f"{case.bound:g}x")]
    return "\n".join(lines)


def _by(found: list[Case], name: str, key: Callable[[Case], str]) -> Iterator[str]:
    columns = " | ".join(f"chosen at +{100 * mixing:.0f}% | gain" for mixing in MIXING)
    yield f"| {name} | cases | {columns} | chosen for arrivals |"
    yield "|---" * (3 + 2 * len(MIXING)) + "|"
    for value in dict.fromkeys(map(key, found)):
        cases = [case for case in found if key(case) == value]
        cells = [
            f"{_chosen(cases, mixing)} | {_gains([case.over_uniform.get(mixing) for case in cases], ', ')}"
            for mixing in MIXING
        ]
        rated = [case for case in cases if case.arrivals_chosen]
        yield f"| {value} | {len(cases)} | {' | '.join(cells)} | {_chosen(rated, None) or '-'} |"


def _chosen(cases: list[Case], mixing: float | None) -> str:
    """Return how often each policy is chosen at a cost of mixing (None: for arrivals)."""
    kinds = Counter(case.arrivals_chosen if mixing is None else case.chosen[mixing] for case in cases)
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


def _gains(values: list[float | None], between: str = " | ") -> str:
    gains = [100 * value for value in values if value is not None]
    return f"{np.median(gains):.1f}%{between}{max(gains):.1f}%" if gains else f"-{between}-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm-0.15")
    parser.add_argument("--quick", action="store_true", help="sixteen cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no case begins")
    parser.add_argument("--part", default="0/1", help="share of the cases: 0/2 and 1/2 are the two halves")
    parser.add_argument("--json", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    engine, started = load_engine(options.engine), time.monotonic()
    found = read(options.json[0]) if options.json else {}
    for key in keys(options.part, quick=options.quick):
        if key in found:
            continue
        if time.monotonic() - started > options.seconds:
            print("time is over: run the command again")
            break
        case = found[key] = planned(key, engine, quick=options.quick)
        if case is not None:
            bound = "none" if case.bound is None else f"{case.bound:g}x"
            gains = ", ".join(f"{m:g}: {case.chosen[m]} {100 * case.over_uniform.get(m, 0):+.1f}%" for m in MIXING)
            title = f"{case.model} {case.cluster} {case.workload} bound {bound}"
            print(f"{title}: {gains}; {case.arrivals_chosen}", flush=True)
        if options.json:
            write(options.json[0], found)
    for path in options.json[1:]:
        found |= read(path)
    print(summary([case for case in found.values() if case is not None], engine))


if __name__ == "__main__":
    main()
