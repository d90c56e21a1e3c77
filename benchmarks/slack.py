"""Compare the capacity of token budgets by slack with the capacity of the best fixed budget, in simulation.

    python -m benchmarks.slack [--quick] [--models llama-3.1-8b] [--loads azure-code,azure-conv] [--json FILE]
    python -m benchmarks.slack --classes

Capacity is the highest arrival rate at which 99% of all requests keep the bounds on TTFT and on the mean time per
token, waiting included. Every row is planned with profiles from datasheets: the best fixed budget
(chunked, order fcfs) and slack. Plans are found and tuned on one draw of 2,000 requests.
The gain of slack is measured on 50,000 other requests, which no search has seen, over the fixed budget that serves most
of them. These fixed budgets are the planner's own, those planned under a tighter TPOT, and each of them multiplied by
the factors in `SWEEP`. With --json, an interrupted run continues.

--classes sends half of a
plan's capacity as interactive requests (priority 1, share 8), and the whole capacity as batch requests
(priority 0, share 1).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.lib.ceiling import ceiling
from benchmarks.lib.results import record
from xgpt.core import policies
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import dump_json
from xgpt.core.schema import ChunkedSettings, Plan, Profile, RequestClass, SlackBudget
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.policy import PolicyChoice
from xgpt.core.workload import gamma_arrivals, sample
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xprofiler.store import profile_of
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.capacities import with_capacity
from xscheduler.objectives.tuning import TIGHTER
from xscheduler.problem import Problem
from xsimulator.capacity import CapacitySearch
from xsimulator.costs.step_times import with_step_times
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.run import accounts_of, clock_of

MODELS = {"llama-3.1-8b": 1, "llama-3.1-70b": 4}
"""Models, each with the number of H100 on which it runs."""
LOADS: dict[str, tuple[str, float]] = {
    "azure-code": ("azure-code", 1.0),
    "azure-conv": ("azure-conv", 1.0),
    "bursty": ("chat-short", 3.0),
    "agent": (str(Path(__file__).parent / "lib" / "agent.yaml"), 1.0),
}
"""Lengths, and the coefficient of variation of the gaps between arrivals."""
BOUNDS = {
    "llama-3.1-8b": ((0.25, 0.03), (0.5, 0.02), (0.5, 0.05)),
    "llama-3.1-70b": ((0.5, 0.05), (1.0, 0.04), (1.0, 0.1)),
}
"""Bounds on TTFT and TPOT, s."""
LONGER = {"agent": 8.0}
"""Factor on the bound on TTFT for loads with longer prompts: up to 32,000 tokens instead of 7,400."""
PRECISION = 0.01
UNSEEN_SEED, NUM_UNSEEN = 3, 50_000
"""Seed and size of the draw of lengths and arrivals on which gains are measured. No search sees this draw, and it is so
long that chance changes gains little."""
SWEEP = (1.0, 0.5, 0.7, 1.4, 2.0)
"""Factors by which the planner's fixed budgets are multiplied."""


@dataclass(frozen=True)
class Row:
    """One case. Rates are in requests a second. None means that no plan keeps the bounds, or that it is not simulated
    yet."""

    model: str
    load: str
    ttft_s: float
    tpot_s: float
    settings: str
    seconds: float
    """Seconds that tuning slack took, including the search for the fixed budget."""
    plans: dict[str, list[Any]]
    """The plans with fixed budgets, and slack's plan."""
    unseen: dict[str, float] = field(default_factory=dict)
    """The highest rates of these plans on the draw that no search has seen, and the ceiling, which no rule for steps
    can exceed on their placements."""

    @property
    def case(self) -> tuple[str, str, float, float]:
        return self.model, self.load, self.ttft_s, self.tpot_s

    @property
    def gain(self) -> float | None:
        return self._over_fixed("slack")

    @property
    def most_gain(self) -> float | None:
        """The largest gain that any rule for steps could have."""
        return self._over_fixed("ceiling")

    def _over_fixed(self, name: str) -> float | None:
        return self.unseen[name] / self.unseen["fixed"] - 1 if {name, "fixed"} <= self.unseen.keys() else None


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--quick", is_flag=True, help="Use one pair of bounds for each load instead of three.")
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--loads", default=",".join(LOADS), show_default=True)
@click.option("--trace", "traces", multiple=True, type=click.Path(exists=True), help="Trace to use as a further load.")
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.option("--classes", is_flag=True)
def main(quick: bool, models: str, loads: str, traces: tuple[str, ...], path: Path | None, classes: bool) -> None:
    if classes:
        rows = [*two_classes()]
        kept = [row.split("|")[4].strip() for row in rows[2:]]
        record(
            "slack/classes",
            "Beside twice as many batch requests, {fixed} of interactive requests keep their bounds under a fixed "
            "budget, and {slack} under slack.",
            rows,
            fixed=kept[0],
            slack=kept[2],
        )
        return
    chosen = {name: LOADS[name] for name in loads.split(",") if name}
    chosen |= {Path(trace).stem: (trace, 1.0) for trace in traces}
    measured: list[Row] = []
    known = [Row(**row) for row in json.loads(path.read_text())] if path is not None and path.exists() else []
    for states in cases(models.split(","), chosen, known, quick=quick):
        for row in states:
            measured = [one for one in measured if one.case != row.case] + [row]
            if path is not None:
                later = [one for one in known if one.case not in {row.case for row in measured}]
                path.write_text(json.dumps([asdict(one) for one in (*measured, *later)], indent=1) + "\n")
    gains = [row.gain for row in measured if row.gain is not None and row.load != "agent"]
    record(
        "slack/gain",
        "Slack serves {median} more than the best fixed budget in the median of {count} cases ({least} to {most}), "
        "without the agent load, and is planned in {seconds} s.",
        [HEADER, RULE, *map(line, measured)],
        median=f"{median(gains):.1%}",
        count=len(gains),
        least=f"{min(gains):+.1%}",
        most=f"{max(gains):+.1%}",
        seconds=f"{median(row.seconds for row in measured):.0f}",
    )


def cases(
    models: list[str], loads: dict[str, tuple[str, float]], known: list[Row], *, quick: bool
) -> Iterator[Iterator[Row]]:
    """Yield each row in its successive states. The last one is complete."""
    rows_by_case = {row.case: row for row in known}
    for model in models:
        for load in loads:
            for ttft_s, tpot_s in BOUNDS[model][: 1 if quick else None]:
                bounds = LONGER.get(load, 1.0) * ttft_s, tpot_s
                yield _states(
                    rows_by_case.get((model, load, *bounds)), (model, MODELS[model], load, loads[load], *bounds)
                )


def _states(known: Row | None, case: tuple[str, int, str, tuple[str, float], float, float]) -> Iterator[Row]:
    row = known or measure(*case)
    yield row
    plans = {name: [Plan.model_validate(each) for each in documents] for name, documents in row.plans.items()}
    if not all(plans.values()):
        return
    of_each: dict[str, Callable[[Profile], float]] = {
        "fixed": lambda profile: unseen_rate(
            [_with_budget(plan, by) for plan in plans["fixed"] for by in SWEEP], profile
        ),
        "slack": lambda profile: unseen_rate(plans["slack"], profile),
        "ceiling": lambda profile: max(
            ceiling(plan, profile, UNSEEN_SEED, NUM_UNSEEN) for each in plans.values() for plan in each
        ),
    }
    for name, rate in of_each.items():
        if name not in row.unseen:
            row = replace(row, unseen=row.unseen | {name: rate(profile_of(plans["slack"][0]))})
            yield row


def _with_budget(plan: Plan, factor: float) -> Plan:
    assert isinstance(plan.policy, ChunkedSettings)
    budget = max(plan.policy.microbatches, round(factor * plan.policy.token_budget))
    return plan.model_copy(update={"policy": plan.policy.model_copy(update={"token_budget": budget})})


def unseen_rate(plans: list[Plan], profile: Profile) -> float:
    best = 0.0
    for plan in plans:
        most, first = 1.3 * plan.estimate.throughput_rps, best or 0.9 * rate_of(plan)
        search = CapacitySearch(plan, profile, first, seed=UNSEEN_SEED, most=most, least_requests=NUM_UNSEEN)
        search.precision = PRECISION
        if not best or search.keeps((1 + PRECISION) * best):
            best = max(best, search.rate)
    return best


def measure(model: str, devices: int, load: str, quantity: tuple[str, float], ttft_s: float, tpot_s: float) -> Row:
    workload, burstiness = quantity
    asked = plan_request(
        model=model,
        cluster="h100x8",
        devices=devices,
        workload=workload,
        burstiness=burstiness,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        headroom=0.0,
    )
    subject = resolve(asked)
    budgets = fixed_budgets(subject)
    started = time.perf_counter()
    slack = best_of(subject, "slack")
    seconds = time.perf_counter() - started
    text = "-" if slack is None else settings_text(slack)
    found = {"fixed": budgets, "slack": [] if slack is None else [slack]}
    plans = {name: [json.loads(dump_json(plan)) for plan in each] for name, each in found.items()}
    return Row(model, load, ttft_s, tpot_s, settings=text, seconds=round(seconds, 1), plans=plans)


def best_of(subject: Problem, policy: PolicyChoice) -> Plan | None:
    try:
        return next(iter(plan_each(subject, policy).values()))
    except InfeasibleError:
        return None


def best_fixed(subject: Problem) -> Plan | None:
    return max(fixed_budgets(subject), key=rate_of, default=None)


def fixed_budgets(subject: Problem) -> list[Plan]:
    constraint = subject.constraint
    assert constraint.tpot_s is not None
    found = []
    for share in (1.0, *TIGHTER):
        tighter = constraint.model_copy(update={"tpot_s": share * constraint.tpot_s})
        plan = best_of(subject.under(tighter), "chunked")
        if plan is not None:
            plan = plan.model_copy(update={"constraint": constraint})
            found.append(plan if share == 1 else with_capacity(plan, subject.profile, rate_of(plan), edges=False))
    return found


HEADER = "| model | load | bounds on TTFT, TPOT | fixed budget | slack | gain | bound on any gain |"
RULE = "|---|---|---|---|---|---|---|"


def line(row: Row) -> str:
    def texts(*rates: float | None) -> str:
        return " | ".join("-" if rate is None else f"{rate:.2f}" for rate in rates)

    unseen = texts(row.unseen.get("fixed"), row.unseen.get("slack"))
    gains = " | ".join(f"{gain:+.1%}" if gain is not None else "-" for gain in (row.gain, row.most_gain))
    bounds = f"{row.ttft_s:g} s, {1000 * row.tpot_s:g} ms"
    return f"| {row.model} | {row.load} | {bounds} | {unseen} | {gains} |"


LOADS_OF_CLASSES = {"interactive": 0.5, "batch": 1.0}
"""The arrival rate of each class, as a multiple of the plan's capacity."""


def two_classes(num_requests: int = 2000) -> Iterator[str]:
    """Yield the results of two classes if one and a half times the capacity arrives."""
    yield "| plan | class | arrivals a second | kept TTFT and TPOT | served a second | longest wait, s |"
    yield "|---|---|---|---|---|---|"
    asked = plan_request(
        model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", ttft_s=1.0, tpot_s=0.05, headroom=0.0
    )
    subject = resolve(asked)
    fixed = best_of(subject, "chunked")
    assert fixed is not None
    slack = with_step_times(fixed, subject.profile)
    budget = SlackBudget(least_tokens=32, most_tokens=8192)
    in_time = slack.admission.model_copy(update={"order": "in-time"})
    policy = slack.policy.model_copy(update={"slack": budget})
    slack = slack.model_copy(update={"policy": policy, "admission": in_time})
    for name, plan in (("fixed budget", fixed), ("slack", slack)):
        yield from _of_classes(name, plan, rate_of(fixed), subject.profile, num_requests)


def _of_classes(name: str, plan: Plan, rate: float, profile: Profile, count: int) -> Iterator[str]:
    rng, total = np.random.default_rng(0), sum(LOADS_OF_CLASSES.values())
    bounds = {"interactive": {"ttft_s": plan.constraint.ttft_s, "tpot_s": plan.constraint.tpot_s, "priority": 1}}
    classes = tuple(
        RequestClass(name=kind, share=share / total, **bounds.get(kind, {})) for kind, share in LOADS_OF_CLASSES.items()
    )
    plan = plan.model_copy(update={"constraint": plan.constraint.with_classes(classes)})
    inputs, outputs = sample(plan.workload, count, rng)
    arrivals_ns = (1e9 * gamma_arrivals(rate * total, count, 1.0, rng)).astype(int)
    accounts = accounts_of(plan, count)
    kinds = [account.of_class for account in accounts]
    longest = plan.workload.output.lengths[-1]
    requests = [
        SimulatedRequest(i, int(inputs[i]), longest, int(outputs[i]), int(arrivals_ns[i]), account=accounts[i])
        for i in range(count)
    ]
    schedule = policies.build(plan)
    first: dict[int, int] = {}
    end: dict[int, int] = {}
    begun: dict[int, int] = {}
    for step in SimulatedEngine(schedule, clock_of(plan, profile, schedule), requests).run():
        for id_, start, length in step.encode:
            begun.setdefault(id_, step.start_ns)
            if start + length == inputs[id_]:
                first[id_] = step.end_ns
        end |= dict.fromkeys(step.finished, step.end_ns)
    until = int(arrivals_ns[-1])  # after the last arrival, the load falls
    for kind, share in LOADS_OF_CLASSES.items():
        ids = [i for i in range(count // 8, count) if kinds[i] == kind]
        kept = sum(
            first[i] - arrivals_ns[i] <= 1e9 * (plan.constraint.ttft_s or 0)
            and end[i] - first[i] <= 1e9 * (plan.constraint.tpot_s or 0) * (outputs[i] - 1)
            for i in ids
        )
        served = sum(end[i] <= until for i in ids) / ((until - arrivals_ns[ids[0]]) / 1e9)
        waited = max(begun[i] - arrivals_ns[i] for i in ids) / 1e9
        yield f"| {name} | {kind} | {share * rate:.1f} | {kept / len(ids):.1%} | {served:.1f} | {waited:.1f} |"


if __name__ == "__main__":
    main()
