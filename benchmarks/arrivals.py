"""Compare plans for arrival rates, plans for saturated throughput, and vLLM's defaults, each at its own highest arrival
rate.

    python -m benchmarks.arrivals [--cases 25] [--headroom 0] [--json FILE]

Profiles come from datasheets. A plan's stated rate is checked on the simulated engine: the bound must be kept at this
rate, and broken at a rate 3% higher. Three further draws of lengths and arrivals show how chance changes the rate.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import score_current
from xgpt.core.errors import XgptError
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xscheduler.objectives.best_plans import found_each, plan_each
from xscheduler.objectives.capacities import with_capacities
from xscheduler.problem import Problem
from xscheduler.tolerances import TOLERANCES
from xsimulator.capacity import CapacitySearch, Trial

CASES = (
    ("llama-3.1-70b", "h100x8", "azure-conv", 15.0),
    ("qwen3-32b", "h200x8", "azure-conv", 10.0),
    ("llama-3.1-8b", "h200x1", "azure-conv", 8.0),
    ("llama-3.1-70b", "h100x8", "azure-code", 5.0),
    ("qwen3-32b", "h200x8", "chat-long", 10.0),
    ("llama-3.1-8b", "h200x1", "azure-code", 4.0),
    ("llama-3.1-8b", "h200x1", "chat-short", 4.0),
    ("llama-3.1-8b", "h200x1", "chat-long", 12.0),
    ("llama-3.1-8b", "h200x1", "summarization", 6.0),
    ("llama-3.1-8b", "h200x1", "translation", 6.0),
    ("llama-3.1-70b", "h100x8", "chat-short", 6.0),
    ("llama-3.1-70b", "h100x8", "chat-long", 20.0),
    ("llama-3.1-70b", "h100x8", "summarization", 10.0),
    ("llama-3.1-70b", "h100x8", "azure-conv", 25.0),
    ("llama-3.1-70b", "h200x8", "azure-conv", 12.0),
    ("llama-3.1-70b", "h200x8", "azure-code", 4.0),
    ("qwen3-32b", "h100x8", "azure-conv", 12.0),
    ("qwen3-32b", "h100x8", "azure-code", 3.0),
    ("qwen3-32b", "h100x8", "chat-short", 5.0),
    ("qwen3-8b", "h200x1", "azure-conv", 8.0),
    ("opt-13b", "a40x4", "summarization", 8.0),
    ("opt-13b", "a40x4", "translation", 8.0),
    ("gpt3-39b", "a40x16", "summarization", 9.8),
    ("gpt3-175b", "a40x32", "translation", 30.0),
    ("llama-3.1-8b", "b200x8", "azure-conv", 6.0),
)
SEEDS = (1, 2, 3)
CONFIRMED = 0.03
"""A stated rate is confirmed if the bound is kept at this rate, and broken at a rate higher by this share."""


@dataclass(frozen=True)
class Row:
    """One case. Rates are the requests a second at which the bound is kept, waiting included."""

    case: str
    policy: str
    rate: float
    seconds: float
    """Processor seconds of planning for arrivals, simulations included."""
    gap: float | None
    """Largest share by which another schedule's rate may be higher, or None if nothing is proven."""
    error: float | None
    """Relative standard deviation of the rate over draws of lengths and arrivals."""
    closed: float | None
    saturated_policy: str
    saturated_choice: float
    """Rate of the plan with the highest saturated throughput."""
    saturated_best: float
    """Highest rate among the policies' plans with the highest saturated throughput."""
    vllm: float | None
    confirmed: bool
    other_draws: tuple[float, ...]


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--cases", type=click.IntRange(1, len(CASES)), default=len(CASES), show_default=True)
@click.option("--headroom", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(cases: int, headroom: float, path: Path | None) -> None:
    rows = []
    click.echo(
        "case; chosen, rate, gap, error, seconds, closed form; saturated choice, its rate, best of all; vLLM; "
        "confirmed; draws"
    )
    for case in CASES[:cases]:
        row = measure(case, headroom)
        rows.append(row)
        closed = "-" if row.closed is None else f"{row.closed:.2f}"
        vllm = "-" if row.vllm is None else f"{row.vllm:.2f}"
        draws = " ".join(f"{rate / row.rate - 1:+.1%}" for rate in row.other_draws)
        proof = "-" if row.gap is None else f"{row.gap:.1%}"
        click.echo(
            f"{row.case:48} {row.policy:>8} {row.rate:7.2f} {proof:>6} {row.error or 0:.1%} {row.seconds:5.1f} "
            f"{closed:>7} {row.saturated_policy:>12} "
            f"{row.saturated_choice:7.2f} {row.saturated_best:6.2f} {vllm:>6}  "
            f"{'yes' if row.confirmed else 'NO'}  {draws}"
        )
        if path is not None:
            path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    ahead = [row.rate / max(row.saturated_best, row.vllm or 0.0) for row in rows]
    gaps = sorted(row.gap for row in rows if row.gap is not None)
    click.echo(
        f"gap: median {gaps[len(gaps) // 2]:.1%}, most {gaps[-1]:.1%}, of {len(gaps)} proven; processor time: median "
        f"{sorted(row.seconds for row in rows)[len(rows) // 2]:.1f} s, most {max(row.seconds for row in rows):.1f} s"
    )
    over_choice = sorted(row.rate / max(row.saturated_choice, 1e-9) for row in rows)
    over_vllm = sorted(row.rate / row.vllm for row in rows if row.vllm)
    click.echo(f"least rate over the best of all others: {min(ahead):.3f}; confirmed {sum(r.confirmed for r in rows)}")
    click.echo(
        f"over the saturated choice, median {over_choice[len(over_choice) // 2]:.2f}, most {over_choice[-1]:.2f}"
    )
    if over_vllm:
        click.echo(f"over vLLM's defaults, median {over_vllm[len(over_vllm) // 2]:.2f}, most {over_vllm[-1]:.2f}")


def measure(case: tuple[str, str, str, float], headroom: float) -> Row:
    model, cluster, workload, bound_s = case
    asked = plan_request(
        model=model,
        cluster=cluster,
        workload=workload,
        latency_bound_s=bound_s,
        objective="arrivals",
        headroom=headroom,
    )
    subject = resolve(asked)
    started = time.process_time()
    best = next(iter(plan_each(subject).values()))
    seconds = time.process_time() - started
    saturated = found_each(subject.under(asked.constraint.but(objective="saturated")))
    choice, *others = (each.draft for each in with_capacities(saturated, subject.profile).values())
    found = best.estimate.capacity
    assert found is not None
    return Row(
        case=f"{model} {cluster} {workload} {bound_s:g} s",
        policy=best.policy.kind,
        rate=found.rate_per_s,
        seconds=round(seconds, 2),
        gap=best.search.gap,
        error=found.error,
        closed=found.closed_form_per_s,
        saturated_policy=choice.policy.kind,
        saturated_choice=rate_of(choice),
        saturated_best=max(map(rate_of, (choice, *others))),
        vllm=vllm_defaults(subject),
        confirmed=is_confirmed(best, subject.profile),
        other_draws=tuple(other_draw(best, subject.profile, seed) for seed in SEEDS),
    )


def other_draw(plan: Plan, profile: Profile, seed: int) -> float:
    search = CapacitySearch(plan, profile, rate_of(plan), seed=seed)
    search.precision = TOLERANCES.rate
    return search.rate


def vllm_defaults(subject: Problem) -> float | None:
    """Return the rate of vLLM's defaults, tensor-parallel over a node's devices, or None if they cannot be scored."""
    devices = min(subject.cluster.num_devices, subject.cluster.devices_per_node)
    try:
        current = read_current(f"vllm serve model -tp {devices}", subject.cluster)
        return rate_of(score_current(subject, current))
    except XgptError:
        return None


def is_confirmed(plan: Plan, profile: Profile) -> bool:
    trial, slack = Trial(plan, profile, by_request=True), 1 / (1 + plan.constraint.headroom)
    rate = rate_of(plan)
    above = (1 + CONFIRMED) * rate
    kept = trial.at(rate, slack) is not None
    return kept and (above >= plan.estimate.throughput_rps or trial.at(above, slack) is None)


if __name__ == "__main__":
    main()
