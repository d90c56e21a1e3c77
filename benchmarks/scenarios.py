"""Check plans of the scheduler benchmark's scenarios: arrival rates by simulation, and bounds on all requests.

    python -m benchmarks.scenarios rates|requests [--only opt-13b] [--jsonl FILE] [--markdown FILE]

rates: for each task, the bound is the one that 70% of FasterTransformer's settings keep. The stated rate of the plan of
`--objective arrivals` is checked on the simulated engine, which must keep the bound at this rate and break it 3% above.
requests: the bounds are the tightest, the middle and the loosest of `benchmarks.scheduler --sla request`. Throughput
must not fall with a looser bound. No plan for another bound may keep this bound (by its simulated latency, headroom
included) and serve more than this bound's plan. Seconds are processor time. Tasks that are already in the JSON lines
are not run again.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.arrivals import is_confirmed
from benchmarks.lib import made
from benchmarks.lib.all_requests import NUM_BOUNDS
from benchmarks.papers.settings import faster_transformer
from benchmarks.scheduler import SCENARIOS, task_problem
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import Constraint, Plan
from xgpt.core.schema.plan import rate_of
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.ladder import request_latency
from xscheduler.problem import Problem

SHARES = (0.1, 0.7)
"""Shares of FasterTransformer's settings that keep the tightest and the loosest bound."""
PAGES = {
    "rates": (
        "Stated arrival rates",
        "`python -m benchmarks.scenarios rates`: the scheduler benchmark's tasks, each under the bound that 70% of\n"
        "FasterTransformer's settings keep. Confirmed: the engine that simulates each request keeps the bound at the\n"
        "stated rate, and breaks it 3% above.",
    ),
    "requests": (
        "Bounds on all requests",
        "`python -m benchmarks.scenarios requests`: `--sla request` on the scheduler benchmark's tasks, each under a\n"
        "tight, a middle and a loose bound. keeps: the least bound that the plan keeps in simulation, with headroom.\n"
        "simulated: plans that were simulated. beaten: a plan made for another bound of the task keeps this one and\n"
        "serves more.",
    ),
}
CHOSEN = (0, NUM_BOUNDS // 2, NUM_BOUNDS - 1)
"""Indices of the chosen bounds on all requests."""


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.argument("what", type=click.Choice(["rates", "requests"]))
@click.option("--only", help="Run only this model.")
@click.option("--jsonl", "kept", type=click.Path(path_type=Path), help="Write each row to this file.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table to this file.")
def main(what: str, only: str | None, kept: Path | None, page: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    if kept is not None and kept.is_file():
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
    done = {(row["task"], row["bound"]) for row in rows}
    for model, cluster, workloads in SCENARIOS:
        for workload in workloads if only in (None, model) else ():
            problem, task = task_problem(model, cluster, workload, None), f"{model} {cluster} {workload}"
            tightest, loosest = np.quantile(faster_transformer(problem).latency, SHARES).tolist()
            bounds = np.geomspace(tightest, loosest, NUM_BOUNDS).round(3).tolist()
            for bound_s in [bounds[-1]] if what == "rates" else [bounds[i] for i in CHOSEN]:
                if (task, bound_s) in done:
                    continue
                row = {"task": task, "bound": bound_s} | (rate if what == "rates" else throughput)(problem, bound_s)
                click.echo(json.dumps(row))
                rows.append(row)
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    if page is not None:
        write_atomic(page, made.page(*PAGES[what], markdown(rows)))


def rate(problem: Problem, bound_s: float) -> dict[str, Any]:
    """Return the highest arrival rate of the chosen plan, and whether the simulated engine confirms it."""
    plan, seconds = planned(problem, Constraint(latency_bound_s=bound_s, objective="arrivals"))
    if plan is None:
        return {"policy": "-", "arrivals/s": None, "saturated": None, "cpu s": seconds, "confirmed": "-"}
    confirmed = "yes" if is_confirmed(plan, problem.profile) else "NO"
    rates = {"arrivals/s": round(rate_of(plan), 3), "saturated": round(plan.estimate.throughput_rps, 3)}
    return {"policy": plan.policy.kind} | rates | {"cpu s": seconds, "confirmed": confirmed}


def throughput(problem: Problem, bound_s: float) -> dict[str, Any]:
    """Return the throughput under a bound on the quantile of all requests."""
    plan, seconds = planned(problem, Constraint(latency_bound_s=bound_s, sla="request"))
    if plan is None:
        return {"policy": "-", "req/s": 0.0, "latency s": None, "keeps s": None, "simulated": None, "cpu s": seconds}
    keeps_s = (1 + plan.constraint.headroom) * request_latency(plan, problem.profile)
    found = {"req/s": plan.estimate.throughput_rps, "latency s": round(plan.estimate.latency_s, 3), "keeps s": keeps_s}
    return {"policy": plan.policy.kind} | found | {"simulated": plan.search.simulations, "cpu s": seconds}


def planned(problem: Problem, constraint: Constraint) -> tuple[Plan | None, float]:
    started, plan = time.process_time(), None
    with suppress(InfeasibleError):
        plan = next(iter(plan_each(problem.under(constraint)).values()))
    return plan, round(time.process_time() - started, 2)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table, and a line that summarises it."""
    if "keeps s" in rows[0]:
        rows = [row | {"beaten": "YES" if is_beaten(row, rows) else "no"} for row in rows]
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_text(row[name]) for name in names) + " |" for row in rows]
    seconds = sorted(row["cpu s"] for row in rows)
    text = f"CPU seconds: median {seconds[len(seconds) // 2]:.1f}, most {seconds[-1]:.1f}."
    if "confirmed" in names:
        text = f"Confirmed: {sum(row['confirmed'] == 'yes' for row in rows)} of {len(rows)}. " + text
    else:
        best: dict[str, float] = {}
        fallen = 0
        for row in sorted(rows, key=lambda row: row["bound"]):
            fallen += row["req/s"] < best.get(row["task"], 0.0) * (1 - 1e-9)
            best[row["task"]] = max(row["req/s"], best.get(row["task"], 0.0))
        beaten = sum(row["beaten"] == "YES" for row in rows)
        text = (
            f"Bounds under which less is served than under a tighter one: {fallen} of {len(rows)}; plans beaten by one "
            f"made for another bound: {beaten}. {text}"
        )
    return "\n".join([*lines, "", text]) + "\n"


def is_beaten(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return whether a plan for another bound of the task keeps this row's bound and serves more."""
    others = [other for other in rows if other["task"] == row["task"] and (other["keeps s"] or inf) <= row["bound"]]
    return any(other["req/s"] > row["req/s"] * (1 + 1e-9) for other in others)


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
