"""Compare the capacity of token budgets by slack with the capacity of the best fixed budget on this machine.

    python -m benchmarks.slack_measured --plan FILE [--model opt-125m] [--workload summarization]
    python -m benchmarks.slack_measured --run FILE [--seconds 400] [--engine vllm]

--plan profiles the machine, computes bounds as multiples of a decode's and a prompt's time, makes each kind of plan
under each pair of bounds, and writes the plans to FILE with their simulated capacities, before anything is served.
--run serves the plans of the pair with the highest predicted gain. Each plan is tried at rates above and below its
prediction, until 99% of the requests keep the bounds at one rate but not at a rate `STEP` higher. All plans get the
same requests. Runs are stored in FILE, and an interrupted command continues. The share of a rate is computed from the
engine's step log.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.slack import best_fixed, best_of
from xgpt.benchmark import Load, bench_plan
from xgpt.core.io import dump_json
from xgpt.core.policies.slack import StepClock
from xgpt.core.schema import EngineKind, Plan
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import ArrivalProcess
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xprofiler.store import measured_profile, profile_of
from xsimulator.costs.step_times import with_step_times

STEP = 0.06
"""Relative difference between neighbouring rates."""
REQUESTS = 300
"""Number of requests that count at each rate. Three of them may break their bounds."""
FACTORS = ((4.0, 4.0), (8.0, 4.0))
"""Bounds: TPOT as a multiple of a decode step's time with one request, and TTFT as a multiple of the longest prompt's
time."""


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--plan", "plan_path", type=click.Path(path_type=Path))
@click.option("--run", "run_path", type=click.Path(exists=True, path_type=Path))
@click.option("--model", default="opt-125m", show_default=True)
@click.option("--workload", default="summarization", show_default=True)
@click.option("--bounds", multiple=True, type=(float, float), default=FACTORS, show_default=True)
@click.option("--profile", help="Existing profile of this machine.")
@click.option("--seconds", default=400.0, show_default=True, help="Time after which no further rate begins.")
@click.option("--engine", type=click.Choice(["xgpt", "vllm"]), default="xgpt", show_default=True)
def main(
    plan_path: Path | None,
    run_path: Path | None,
    model: str,
    workload: str,
    bounds: tuple[tuple[float, float], ...],
    profile: str | None,
    seconds: float,
    engine: EngineKind,
) -> None:
    if plan_path is not None:
        plan_path.write_text(json.dumps(predictions(model, workload, bounds, profile), indent=1) + "\n")
    if run_path is not None:
        run(run_path, seconds, engine)


def predictions(
    model: str, workload: str, pairs: tuple[tuple[float, float], ...], given: str | None
) -> list[dict[str, Any]]:
    free = resolve(plan_request(model=model, workload=workload, profile=given, headroom=0.0))
    if given is None:
        measured_profile(free.model, None, free.cluster)
        free = resolve(plan_request(model=model, workload=workload, headroom=0.0))
    loose = best_of(free, "chunked")
    assert loose is not None
    times = with_step_times(loose, free.profile).estimate.step_times
    assert times is not None
    prompt_s = StepClock(times).prompt_ns(free.workload.input.lengths[-1]) / 1e9
    decode_s = StepClock(times).tokens(1) + StepClock(times).decodes(1, 0)
    click.echo(f"a decode {1000 * decode_s:.3g} ms, longest prompt {1000 * prompt_s:.4g} ms")
    cases = []
    for tpot, ttft in pairs:
        limits = {"ttft_s": float(f"{ttft * prompt_s:.2g}"), "tpot_s": float(f"{tpot * decode_s:.2g}")}
        case = free.under(free.constraint.model_copy(update=limits))
        plans = {"fixed": best_fixed(case), "slack": best_of(case, "slack")}
        found = {name: plan for name, plan in plans.items() if plan is not None}
        click.echo(f"{limits}: " + ", ".join(f"{name} {rate_of(plan):.3f}" for name, plan in found.items()))
        cases.append(
            {**limits, "plans": {name: json.loads(dump_json(plan)) for name, plan in found.items()}, "runs": []}
        )
    return cases


def run(path: Path, seconds: float, engine: EngineKind) -> None:
    cases = json.loads(path.read_text())
    case = max(cases, key=_gain)
    started = time.perf_counter()
    for name, document in case["plans"].items():
        plan = Plan.model_validate(document)
        profile = profile_of(plan)
        while (rate := _next_rate(rate_of(plan), _seen(case, name, engine))) is not None:
            if time.perf_counter() - started > seconds:
                return
            load = Load(REQUESTS, arrivals=ArrivalProcess.at(rate))
            report, _ = bench_plan(plan, load, np.random.default_rng(1), profile=profile, engine=engine)
            figures = {f.metric: (f.predicted, f.measured) for f in report.figures}
            found = {"share": report.share_within_bound, "kept": report.bound_kept, "pace": report.pace}
            case["runs"].append({"plan": name, "engine": engine, "rate": rate, **found, "figures": figures})
            click.echo(f"{name} at {rate:.3f}/s: {found}")
            path.write_text(json.dumps(cases, indent=1) + "\n")
    _table(case, engine)


def _gain(case: dict[str, Any]) -> float:
    plans = {name: Plan.model_validate(plan) for name, plan in case["plans"].items()}
    return rate_of(plans["slack"]) / rate_of(plans["fixed"]) if {"slack", "fixed"} <= plans.keys() else 0.0


def _seen(case: dict[str, Any], name: str, engine: EngineKind) -> dict[float, bool]:
    return {run["rate"]: run["kept"] for run in case["runs"] if (run["plan"], run["engine"]) == (name, engine)}


def _next_rate(predicted: float, seen: dict[float, bool]) -> float | None:
    """Return the next rate to try, in steps from the predicted rate, or None if a kept rate is next to a broken one."""
    kept = max((rate for rate, is_kept in seen.items() if is_kept), default=None)
    broken = min((rate for rate, is_kept in seen.items() if not is_kept and rate > (kept or 0)), default=None)
    if kept is None and broken is None:
        return predicted
    if broken is None:
        return max(seen) * (1 + STEP)
    return None if kept is not None else min(seen) / (1 + STEP)


def _table(case: dict[str, Any], engine: EngineKind) -> None:
    click.echo(f"TTFT {case['ttft_s']:g} s, TPOT {1000 * case['tpot_s']:g} ms, {engine}")
    click.echo(
        "| plan | settings | predicted | measured | error | over the fixed budget, predicted | measured | pace |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for name, document in case["plans"].items():
        plan = Plan.model_validate(document)
        runs = [run for run in case["runs"] if (run["plan"], run["engine"]) == (name, engine)]
        predicted, measured = rate_of(plan), max(run["rate"] for run in runs if run["kept"])  # see `_next_rate`
        first = first or (predicted, measured)
        pace = float(np.median([run["pace"] for run in runs]))
        click.echo(
            f"| {name} | {settings_text(plan)} | {predicted:.3f} | {measured:.3f} | {predicted / measured - 1:+.1%} | "
            f"{predicted / first[0] - 1:+.1%} | {measured / first[1] - 1:+.1%} | {pace:.3f} |"
        )


if __name__ == "__main__":
    main()
