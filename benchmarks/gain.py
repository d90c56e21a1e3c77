"""Which policy is chosen where, what the choice gains, and how far that hangs on what mixed steps cost.

    python -m benchmarks.gain [--quick] [--engine vllm-0.15] [--json results/gain.json]

Every case is a model on a cluster, a workload and a latency bound: multiples of the nearest that any schedule keeps,
and none; profiles from the datasheet with the engine's loop. Each is planned with mixed steps in which decodes take 0,
10, 20 and 40% longer. Compared are the best uniform plan (equal stages; chunked, orca, static) and the engine as it is
started by default, on the smallest groups of devices that hold the model: in saturated throughput, and for one cost of
mixed steps (the engine's own) in the highest rate of Poisson arrivals that keeps the bound.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from xgpt.app.arrivals import rate_of
from xgpt.app.comparing import score_current
from xgpt.app.planning import plan_each, plan_uniform
from xgpt.app.problems import resolve
from xgpt.app.request import plan_request
from xgpt.app.vllm_command import read_vllm_command
from xgpt.errors import InfeasibleError, InputError
from xgpt.resolve import load_engine
from xgpt.schema import EngineSpec, Plan
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
QUICK = (PAIRS[::2], WORKLOADS[:3:2], BOUNDS[1::2])


@dataclass(frozen=True)
class Case:
    """One planning problem.

    Attributes:
        bound: multiple of the nearest bound that a schedule keeps; None: no bound.
        chosen: the policy, by the cost of mixed steps.
        over_uniform, over_default: the gain in saturated throughput, by the cost of mixed steps.
        arrivals_over_uniform, arrivals_over_default: that in the arrival rate, at the engine's own cost.
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
    """The engine as it is started by default on the smallest groups that hold the model; None: on none of them."""
    devices = problem.cluster.devices_per_node
    for tp in (t for t in (1, 2, 4, 8) if t <= devices):
        command = f"vllm serve m -tp {tp} -dp {devices // tp}"
        try:
            return score_current(problem, read_vllm_command(command, problem.cluster))
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
    """Plan one case at every cost of mixed steps.

    Raises:
        InfeasibleError: the model does not fit.
        InputError: the workload is longer than its context.
    """
    asked = {"model": pair[0], "cluster": pair[1], "workload": workload, "engine": engine}
    problem = resolve(plan_request(**asked, objective="saturated"))
    bound_s = None if bound is None else bound * nearest_bound(problem)
    problem = problem.under(problem.constraint.model_copy(update={"latency_bound_s": bound_s}))
    chosen, over_uniform, over_default = {}, {}, {}
    for mixing in MIXING:
        of = replace(problem, engine=engine.model_copy(update={"mixing": mixing}))
        best = next(iter(plan_each(of).values()))
        chosen[mixing] = best.policy.kind
        uniform, default = plan_uniform(of), default_of(of)
        if uniform is not None:
            over_uniform[mixing] = best.estimate.throughput_rps / uniform.estimate.throughput_rps - 1
        if default is not None:
            over_default[mixing] = best.estimate.throughput_rps / default.estimate.throughput_rps - 1
    found = Case(*pair, workload, bound, chosen, over_uniform, over_default)
    return _with_arrivals(found, problem) if arrivals and bound is not None else found


def _with_arrivals(case: Case, problem: Problem) -> Case:
    of = problem.under(problem.constraint.model_copy(update={"objective": "arrivals"}))
    try:
        best = next(iter(plan_each(of).values()))
    except InfeasibleError:
        return case  # kept by requests that do not wait, and by none that arrive
    uniform, default = plan_uniform(of), default_of(of)
    rates = {name: rate_of(plan) for name, plan in (("uniform", uniform), ("default", default)) if plan is not None}
    gains = {f"arrivals_over_{name}": rate_of(best) / rate - 1 for name, rate in rates.items() if rate > 0}
    return replace(case, arrivals_chosen=best.policy.kind, **gains)


def cases(engine: EngineSpec, *, quick: bool) -> Iterator[Case]:
    pairs, workloads, bounds = QUICK if quick else (PAIRS, WORKLOADS, BOUNDS)
    for pair, workload, bound in product(pairs, workloads, bounds):
        try:
            # Arrivals take seconds a case: one bound in three stands for all.
            yield case_of(pair, workload, bound, engine, arrivals=quick or bound == BOUNDS[1])
        except (InfeasibleError, InputError) as error:
            print(f"{pair[0]} {pair[1]} {workload} {bound}: {error}", flush=True)


def summary(found: list[Case], engine: EngineSpec) -> str:
    """The tables of docs/results/gain.md."""
    lines = [
        "| decodes in mixed steps | chosen | over uniform: median | most | over default: median | most |",
        "|---|---|---|---|---|---|",
    ]
    for mixing in MIXING:
        kinds = Counter(case.chosen[mixing] for case in found)
        texts = [
            _gains([getattr(case, name).get(mixing) for case in found]) for name in ("over_uniform", "over_default")
        ]
        chosen = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        lines.append(f"| +{100 * mixing:.0f}% | {chosen} | {' | '.join(texts)} |")
    rated = [case for case in found if case.arrivals_chosen]
    kinds = Counter(case.arrivals_chosen for case in rated)
    chosen = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    texts = [_gains([getattr(case, f"arrivals_over_{name}") for case in rated]) for name in ("uniform", "default")]
    lines.append(f"| arrivals, +{100 * engine.mixing:.0f}% | {chosen} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _gains(values: list[float | None]) -> str:
    gains = [100 * value for value in values if value is not None]
    return f"{np.median(gains):.1f}% | {max(gains):.1f}%" if gains else "- | -"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm-0.15")
    parser.add_argument("--quick", action="store_true", help="sixteen cases")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = load_engine(options.engine)
    found = []
    for case in cases(engine, quick=options.quick):
        found.append(case)
        bound = "none" if case.bound is None else f"{case.bound:g}x"
        gains = ", ".join(f"{m:g}: {case.chosen[m]} {100 * case.over_uniform.get(m, 0):+.1f}%" for m in MIXING)
        print(f"{case.model} {case.cluster} {case.workload} bound {bound}: {gains}; {case.arrivals_chosen}", flush=True)
    print(summary(found, engine))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(case) for case in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
