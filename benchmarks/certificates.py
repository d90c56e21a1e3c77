"""Attack the highest arrival rate that plans state, on any number of random problems.

    python -m benchmarks.certificates LINES --attack outside --problems 5000 --seed 0 [--seconds S] [--scale 1.0]

Problem n is drawn from the seed and n, planned, and then attacked:

- outside: copies of plan.json with other settings run through `xgpt simulate` (`benchmarks.lib.outside`). Within the
  bounds, none may serve more than the plan says that any schedule serves. The problems are shipped models and clusters
  with random lengths.

The other attacks draw request lengths with few distinct values, monotone tables or not, one or two devices, one policy,
bounds on latency or first tokens:

- brute: all settings of a small space are simulated. The best one must be the plan, or lie within its gap.
- nearest: the bound is tightened until no plan keeps it. A plan must keep the bound that the error names, as printed.

Each problem adds a line to LINES (JSON). Problems that are already in this file are not run again. --scale multiplies
the stated rates. With 0.8 they are wrong, and the attack must show this.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.lib.outside import Attacked, attack_outside
from tests.contract.test_claims import Case
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, Plan, PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xscheduler.objectives.best_plans import best_of_each, corrected, kinds_of, plan_each
from xscheduler.objectives.saturation import with_simulated_figures
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler, scheduler
from xscheduler.space import Space
from xsimulator.capacity import CapacitySearch

KINDS = ("chunked", "orca", "rra", "waa", "static")
ABOVE = 1.02
"""Multiple of the stated rate that no setting may exceed."""
TIGHTER = (0.3, 0.08, 0.02)
"""Shares of the bound, tried in this order until no plan keeps the resulting bound."""
MOST_SWEPT = 60
"""Largest space, as a number of settings, of which every setting is simulated."""


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.argument("lines", type=click.Path(path_type=Path))
@click.option("--attack", type=click.Choice(["outside", "brute", "nearest"]), default="outside", show_default=True)
@click.option("--problems", type=int, default=5000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--seconds", type=float, help="Time after which no problem begins.")
@click.option(
    "--scale", type=float, default=1.0, show_default=True, help="Factor by which the stated rates are multiplied."
)
def main(lines: Path, attack: str, problems: int, seed: int, seconds: float | None, scale: float) -> None:
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    done, ends = {row["problem"] for row in rows}, time.monotonic() + (seconds or 1e9)
    for number in range(problems):
        if number in done or time.monotonic() > ends:
            continue
        rows.append(row_of(attack, seed, number, scale))
        with lines.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    attacked, beaten = [row for row in rows if row["tried"]], [row for row in rows if row["excess"] > 0]
    click.echo(
        f"{attack}: {len(rows)} problems, {len(attacked)} attacked with {sum(row['tried'] for row in rows)} settings; "
        f"{len(beaten)} beaten, by {max((row['excess'] for row in rows), default=0.0):.1%} at most; "
        f"{sum(row['seconds'] for row in rows):.0f} s of a processor"
    )
    sys.exit(bool(beaten))


def row_of(attack: str, seed: int, number: int, scale: float) -> dict[str, Any]:
    attacks: dict[str, Callable[[np.random.Generator, float], Attacked | None]] = {
        "outside": attack_outside,
        "brute": attack_by_sweep,
        "nearest": attack_nearest,
    }
    started = time.process_time()
    found = attacks[attack](np.random.default_rng((seed, number)), scale) or Attacked(0, 0.0, "nothing to attack")
    seconds = round(time.process_time() - started, 3)
    return {"problem": number, "tried": found.tried, "excess": found.excess, "note": found.note, "seconds": seconds}


def problem(rng: np.random.Generator, kinds: tuple[str, ...] = KINDS, devices: int = 2) -> tuple[Problem, str] | None:
    """Return a random problem and the policy for its plan, or None if the policy has no plan under any bound."""
    quantile, kind = float(rng.choice([0.5, 0.9, 0.99])), str(rng.choice(kinds))
    seed, monotone = int(rng.integers(2**32)), bool(rng.integers(2))
    case = Case(seed, int(rng.integers(1, devices + 1)), kind, "length", monotone, quantile)  # type: ignore[arg-type]
    free = case.subject.under(Constraint(quantile=quantile))
    try:
        estimate = scheduler(free).best(kinds_of(free, kind)).estimate  # type: ignore[arg-type]
    except InfeasibleError:
        return None
    looser = float(rng.choice([1.1, 1.6, 2.5, 5.0]))
    bound = (
        {"ttft_s": looser * estimate.ttft_s}
        if rng.random() < 0.25
        else {"latency_bound_s": looser * estimate.latency_s}
    )
    return case.subject.under(Constraint(quantile=quantile, objective="arrivals", **bound)), kind  # type: ignore[arg-type]


def planned(subject: Problem, kind: str) -> Plan | None:
    try:
        finish = partial(corrected, problem=subject)
        kinds = kinds_of(subject, kind)  # type: ignore[arg-type]
        return next(iter(best_of_each(scheduler(subject), kinds, finish, only_best=True).values())).plan
    except InfeasibleError:
        return None


def plans_at(by: Scheduler, space: Space, indices: np.ndarray, plan: Plan) -> Iterator[PlanDraft]:
    points = space.points(indices)
    for i in range(len(indices)):
        one = by.draft_at(space, space.settings(points, i), plan.search.effort)
        if one is not None:
            yield one


def attack_by_sweep(rng: np.random.Generator, scale: float) -> Attacked | None:
    """Simulate every setting of a small space, and compare the best one with the plan and its gap."""
    drawn = problem(rng, ("orca", "chunked", "rra", "static"), devices=1)
    if drawn is None:
        return None
    subject, kind = drawn
    fixed = {"chunked": {"token_budget": int(rng.choice([32, 64, 128]))}, "rra": {"decode_iterations": 4}}
    subject = replace(subject, profile=of_few(subject.profile), fixed=fixed.get(kind, {}))
    plan = planned(subject, kind)
    if plan is None:
        return None
    by, rates = scheduler(subject), [0.0]
    for space in by.candidates.spaces(kind):
        if space.num_points > MOST_SWEPT:
            return None
        for one in plans_at(by, space, np.arange(space.num_points), plan):
            rates.append(CapacitySearch(with_simulated_figures(one, subject.profile), subject.profile).rate)
    gap, best = plan.search.gap, max(rates)
    most = scale * (1 + (gap or 0.0)) * rate_of(plan)
    note = f"best {best:.4g}, plan {rate_of(plan):.4g}, gap {gap}"
    return Attacked(len(rates) - 1, max(0.0, best / most - ABOVE), note)


def of_few(profile: Profile) -> Profile:
    layers = []
    for layer in profile.layers:
        table = layer.decode_attention
        few = {"batches": table.batches[:-1], "seconds": table.seconds[:-1]}
        layers.append(layer.model_copy(update={"decode_attention": table.model_copy(update=few)}))
    return profile.model_copy(update={"layers": tuple(layers)})


def attack_nearest(rng: np.random.Generator, scale: float) -> Attacked | None:
    """Plan under a bound that no plan keeps, and then under the bound that the error names, as printed."""
    drawn = problem(rng)
    if drawn is None:
        return None
    subject, kind = drawn
    name = "ttft_s" if subject.constraint.ttft_s is not None else "latency_bound_s"
    for share in TIGHTER:
        tight = share * getattr(subject.constraint, name)
        try:
            plan_each(subject.under(subject.constraint.model_copy(update={name: tight})), kind)  # type: ignore[arg-type]
        except InfeasibleError as error:
            printed = re.search(r"one keeps is ([0-9.e+-]+) s", str(error))
            if printed is None:
                return Attacked(1, 1.0, f"names no bound: {error}")
            nearest = scale * float(printed[1])
            plan = planned(subject.under(subject.constraint.model_copy(update={name: nearest})), kind)
            is_kept = plan is not None and rate_of(plan) > 0
            return Attacked(1, 0.0 if is_kept else 1.0, f"{name} {tight:g} -> {nearest:g}")
    return None


if __name__ == "__main__":
    main()
