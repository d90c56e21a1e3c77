"""Change request lengths during a run, and measure the loss without re-planning and how soon re-planning recovers it.

    python -m benchmarks.drift [real] [shifts] [stationary] [rra] [waa] [t5] [--num-requests 900] [--refresh]

real: the lengths change from azure-conv's to azure-code's, scaled to the model's context, or the other way, on the
simulated clock and then through `xgpt serve`. shifts: both changes on the simulated clock, and ExeGPT's Figure 11.
stationary: 10,000 requests of one workload, and 3,000 on each of several machines that are always slower or faster than
their profile. rra, waa, t5: the lengths change from azure-code's to azure-conv's on two devices, and only one policy is
allowed: RRA, WAA, or RRA with an encoder-decoder. Every token is compared with that of a server that keeps its plan.
WAA's schedule depends on lengths only near the tightest bound, so use `--factor 1.5`. Models have nineteen million
parameters, and are profiled on this machine.

Prints tables and writes results/drift.json. The exit code is 1 if, 500 requests after a change, the bound is broken or
5% of throughput is lost, if a request has no answer, if a stationary workload is re-planned, or if a machine at a
constant pace is re-planned twice. On two devices, it is 1 if the plan does not change, if another policy runs, or if a
request is lost or has a wrong token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.lib.changing_lengths import Phase, Run, real, scaled, shifted, simulated
from xgpt.cli.render import show, table
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import Constraint, ModelSpec, Pinned, Plan, Profile, Workload
from xgpt.core.schema.policy import PolicyChoice
from xgpt.resolve import load_cluster, load_workload
from xprofiler.store import measured_profile, obtain_profile
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler

RESULTS = Path("results/drift.json")
SMALL = ModelSpec(
    name="opt-19m",
    family="opt",
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=2048,
    vocab_size=2048,
    max_context=2048,
)
T5 = SMALL.model_copy(
    update={
        "name": "t5-19m",
        "family": "t5",
        "num_layers": 3,
        "num_encoder_layers": 3,
        "activation": "relu",
        "tie_embeddings": True,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
    }
)
KINDS = ("rra", "chunked", "orca")
ON_TWO: dict[str, tuple[ModelSpec, PolicyChoice]] = {"rra": (SMALL, "rra"), "waa": (SMALL, "waa"), "t5": (T5, "rra")}
"""Models on two devices, and the policies that may run."""
SCALE = 1 / 16
REACTION = 500
"""Number of ended requests after which re-planning must have recovered the loss."""
TOLERANCE = 0.05
STEADY = ((1.0, 10_000), (1.5, 3000), (2.0, 3000), (0.7, 3000))
"""Pairs (slowdown of the machine, number of requests) for one workload."""
SHIFTS: tuple[dict[str, float], ...] = (
    {"mean": 0.7}, {"mean": 0.85}, {"mean": 1.15}, {"mean": 1.3},
    {"sd": 0.7}, {"sd": 1.3}, {"skew": 4.0}, {"skew": -4.0},
)  # fmt: skip


@dataclass
class Row:
    """A shift of lengths, with three runs over the same requests. Figures start at the 500th request after it."""

    name: str
    clock: str
    bound_s: float
    runs: dict[str, Run]
    figures: dict[str, tuple[float, float]]
    """For each run, requests/s and latency in seconds."""

    @property
    def is_good(self) -> bool:
        throughput, latency_s = self.figures["with"]
        best, best_s = self.figures["known"]
        # Even a plan made with full knowledge may miss the bound by the error of its profile.
        kept = latency_s <= max(self.bound_s, best_s)
        near = throughput >= (1 - TOLERANCE) * best
        return bool(kept and near) and not any(run.num_lost for run in self.runs.values())

    def cells(self) -> list[str]:
        cells = [self.name, self.clock, f"{self.bound_s:.2f}"]
        for throughput, latency_s in self.figures.values():
            cells += [f"{throughput:.2f}", f"{latency_s:.2f}" + ("!" if latency_s > self.bound_s else "")]
        changes = self.runs["with"].changes
        swaps = [str(ended) if ended else "x" for ended, decision in changes if decision.action != "keep"]
        return [*cells, " ".join(swaps) or "-", str(len(changes)), str(sum(run.num_lost for run in self.runs.values()))]

    def as_json(self) -> dict[str, Any]:
        decisions = [[ended, decision.model_dump(mode="json")] for ended, decision in self.runs["with"].changes]
        look_s = self.runs["with"].longest_look_s
        head = {"shift": self.name, "clock": self.clock, "latency_bound_s": self.bound_s, "is_good": self.is_good}
        paces = {"slowdown": self.runs["with"].slowdown}
        return head | paces | {"figures": self.figures, "decisions": decisions, "longest_look_s": look_s}


class Lab:
    """Plans of a small model on this machine.

    Args:
        refresh: whether to measure the profile even if one is stored.
    """

    def __init__(
        self, spec: ModelSpec = SMALL, cluster: str = "local", kinds: Sequence[str] = KINDS, *, refresh: bool = False
    ) -> None:
        self.spec, self.kinds, self.cluster = spec, kinds, load_cluster(cluster)
        self.profile: Profile = (measured_profile if refresh else obtain_profile)(spec, None, self.cluster)

    def plan(self, workload: Workload, bound_s: float | None, slowdown: float = 1.0) -> Plan:
        """Return the best plan on a machine that takes `slowdown` times as long as the profile states."""
        constraint = Constraint(latency_bound_s=bound_s, headroom=self.profile.headroom)
        problem = Problem(self.spec, None, self.cluster, workload, self.profile.slowed(slowdown), constraint)
        return Scheduler(problem).best(self.kinds)

    def bound(self, workload: Workload, factor: float) -> float:
        """Return `factor` times the tightest latency bound that some plan keeps."""
        try:
            self.plan(workload, 1e-6)
        except InfeasibleError as error:
            assert error.nearest_bound_s is not None
            return round(factor * error.nearest_bound_s, 3)
        raise AssertionError("no plan takes a microsecond")

    def row(self, name: str, phases: Sequence[Phase], factor: float, seed: int, *, is_real: bool) -> Row:
        before, after = phases
        bound_s = self.bound(before.workload, factor)
        plan = self.plan(before.workload, bound_s)

        skip = before.num_requests + REACTION
        count = after.num_requests - REACTION - 150

        def run(plan: Plan, *, replan: bool) -> Run:
            rng = np.random.default_rng(seed)
            done = (
                real(plan, phases, rng, replan=replan)
                if is_real
                else simulated(plan, self.profile, phases, rng, replan=replan)
            )
            tail = done.tail(plan, after.workload, skip, count)
            decisions = [
                f"{decision.action} at {ended or '?'} (steps x{decision.slowdown:.2f}): {decision.reason}"
                for ended, decision in done.changes
            ]
            figures = f"{tail.throughput_rps:.2f} requests/s, {tail.latency_s:.3f} s (bound {bound_s:g})"
            click.echo(f"  {name}: {figures}; steps x{done.slowdown:.2f}; {decisions}", err=True)
            return done

        runs = {"without": run(plan, replan=False), "with": run(plan, replan=True)}
        # Full knowledge includes the machine's pace.
        runs["known"] = run(self.plan(after.workload, bound_s, runs["with"].slowdown), replan=False)
        figures: dict[str, tuple[float, float]] = {}
        for kind, done in runs.items():
            tail = done.tail(plan, after.workload, skip, count)
            figures[kind] = tail.throughput_rps, tail.latency_s
        return Row(name, "real" if is_real else "simulated", bound_s, runs, figures)


def on_two_devices(name: str, num_requests: int, factor: float, seed: int, *, refresh: bool) -> dict[str, Any]:
    """Serve requests whose lengths change, on two devices, by a plan that stays and by a plan that may change."""
    spec, policy = ON_TWO[name]
    lab = Lab(spec, "local:2", (policy,), refresh=refresh)
    before, after = (scaled(load_workload(trace), SCALE, spec) for trace in ("azure-code", "azure-conv"))
    bound_s = max(lab.bound(workload, factor) for workload in (before, after))
    plan = lab.plan(before, bound_s).model_copy(update={"pinned": Pinned(policy=policy)})
    phases = Phase(before, num_requests // 3), Phase(after, num_requests)
    kept = real(plan, phases, np.random.default_rng(seed), replan=False)
    found = real(plan, phases, np.random.default_rng(seed), expected=kept.tokens)
    decisions = [decision for _, decision in found.changes]
    for decision in decisions:
        click.echo(f"  {decision.action} (steps x{decision.slowdown:.2f}): {decision.reason}", err=True)
    changes = [decision for decision in decisions if decision.action != "keep" and decision.best is not None]
    return {
        "case": f"{spec.name}, {policy}",
        "requests": len(found.tokens),
        "changes": len(changes),
        "pace at changes": " ".join(f"{decision.slowdown:.2f}" for decision in changes),
        "policies": " ".join(sorted({plan.policy.kind, *(d.best.policy.kind for d in changes if d.best)})),
        "lost": kept.num_lost + found.num_lost,
        "wrong": found.num_wrong,
    }


def steady(lab: Lab, workload: Workload, factor: float, seed: int, slowdown: float, count: int) -> dict[str, float]:
    plan = lab.plan(workload, lab.bound(workload, factor))
    found: dict[str, float] = {"slowdown": slowdown, "requests": count}
    for kind, replan in (("without", False), ("with", True)):
        rng = np.random.default_rng(seed)
        run = simulated(plan, lab.profile, [Phase(workload, count)], rng, replan=replan, slowdown=slowdown)
        tail = run.tail(plan, workload, count // 2, count // 4)
        found |= {f"{kind}_rps": tail.throughput_rps, f"{kind}_s": tail.latency_s}
        found["replans"] = sum(decision.action != "keep" for _, decision in run.changes)
        found["judged"] = len(run.changes)
    return found


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(("real", "shifts", "stationary", *ON_TWO)))
@click.option(
    "--num-requests", default=900, show_default=True, help="Requests after the shift; before it, a third as many."
)
@click.option(
    "--factor",
    default=3.0,
    show_default=True,
    help="Latency bound, as a multiple of the nearest bound that can be kept.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--refresh", is_flag=True, help="Measure the profile again.")
def main(parts: tuple[str, ...], num_requests: int, factor: float, seed: int, *, refresh: bool) -> None:
    """Change lengths during a run, with and without re-planning."""
    rows: list[Row] = []
    steadies: list[dict[str, float]] = []
    on_two: list[dict[str, Any]] = []

    def save() -> None:
        result = {"rows": [row.as_json() for row in rows], "stationary": steadies, "on two": on_two, "seed": seed}
        write_atomic(RESULTS, json.dumps(result, indent=1) + "\n")

    def add(name: str, before: Workload, after: Workload, *, is_real: bool = False) -> None:
        phases = Phase(before, num_requests // 3), Phase(after, num_requests)
        rows.append(lab.row(name, phases, factor, seed, is_real=is_real))
        click.echo("  " + " | ".join(rows[-1].cells()), err=True)
        save()

    for name in ON_TWO:
        if not parts or name in parts:
            on_two.append(on_two_devices(name, num_requests, factor, seed, refresh=refresh))
            save()
    if on_two:
        show(table("on two devices", list(on_two[0]), [[str(value) for value in row.values()] for row in on_two]))
    if parts and set(parts) <= ON_TWO.keys():
        raise SystemExit(not all(_is_well(row) for row in on_two))
    lab = Lab(refresh=refresh)
    conv, code = (scaled(load_workload(name), SCALE, SMALL) for name in ("azure-conv", "azure-code"))
    for name, before, after in (("conv to code", conv, code), ("code to conv", code, conv)):
        if not parts or "real" in parts or "shifts" in parts:
            add(name, before, after)  # printed before the run on the real clock, too
        if not parts or "real" in parts:
            add(name, before, after, is_real=True)
    if not parts or "shifts" in parts:
        summarization = load_workload("summarization", SMALL)
        plain = shifted(summarization)
        for shift in SHIFTS:
            changed = shifted(summarization, **shift)
            add(changed.name, plain, changed)
    if not parts or "stationary" in parts:
        for slowdown, count in STEADY:
            steadies.append(steady(lab, conv, factor, seed, slowdown, count))
            save()
        cells = [[f"{value:.4g}" for value in row.values()] for row in steadies]
        show(table(f"{conv.name}, simulated", list(steadies[0]), cells))
    columns = ["lengths", "clock", "bound s", "without", "s", "with", "s", "known", "s", "swaps at", "judged", "lost"]
    if rows:
        title = f"requests/s and latency from {REACTION} requests after the shift"
        show(table(title, columns, [r.cells() for r in rows]))
    is_restless = any(row["replans"] > (row["slowdown"] != 1) for row in steadies)
    raise SystemExit(is_restless or not all(row.is_good for row in rows) or not all(map(_is_well, on_two)))


def _is_well(row: dict[str, Any]) -> bool:
    return bool(row["changes"]) and " " not in row["policies"] and not row["lost"] and not row["wrong"]


if __name__ == "__main__":
    main()
