"""Attack a stated ceiling from outside: edit plan.json by hand, and run it through `xgpt simulate`.

Nothing of the planner decides which settings are tried. Only the simulated engine's K/V blocks and its preemptions
decide what fits, so an assumption about memory that the search and its proof share does not protect them.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from click.testing import CliRunner

from xgpt.cli import cli
from xgpt.core.errors import XgptError

SETUPS = (
    ("opt-13b", "a40x4", (1, 2, 4)),
    ("llama-3.1-8b", "l4x8", (1, 2, 4)),
    ("llama-3.1-8b", "h100x8", (1, 2)),
    ("qwen3-32b", "h200x8", (1, 2)),
    ("qwen3-14b", "a40x4", (1, 2)),
)
"""Models, clusters, and numbers of devices."""
POLICIES = ("rra", "waa", "static", "orca", "chunked")
NOISE = 0.01
"""A run of `MANY` requests may exceed a stated ceiling by this share by chance."""
FEW, MANY = 1000, 6000
TRIED = 3
Plan = dict[str, Any]


@dataclass(frozen=True)
class Attacked:
    """The result of an attack.

    Attributes:
        tried: number of settings that were simulated. 0 means that there was nothing to attack.
        excess: share by which the best of them exceeds the stated ceiling, or 0 if none does.
    """

    tried: int
    excess: float
    note: str = ""


def run(*words: str) -> str | None:
    result = CliRunner().invoke(cli, list(words))
    if result.exception is not None and not isinstance(result.exception, (SystemExit, XgptError)):
        raise result.exception
    return result.stdout if result.exit_code == 0 else None


def attack_outside(rng: np.random.Generator, scale: float = 1.0) -> Attacked | None:
    """Plan a random problem, and try to exceed the plan's ceiling with edited copies of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        words = drawn(rng, Path(folder))
        if (plan := planned(path, words)) is None:
            return None
        if rng.random() < 0.8:  # a bound between the fastest and the fullest plan
            bound = plan["estimate"]["latency_s"] * float(rng.choice([0.3, 0.6, 0.9, 1.2]))
            plan = planned(path, [*words, "--latency-bound", f"{bound:.6g}"]) or plan
        if plan["search"]["gap"] is None:
            return None
        return attack(path, plan, edits(plan, rng), scale)


def attack(path: Path, plan: Plan, others: Iterator[Plan], scale: float = 1.0) -> Attacked:
    """Simulate edited copies of a plan. Return the largest excess over the plan's ceiling within its bounds."""
    tried, excess, note, most = 0, 0.0, "", scale * ceiling(plan)
    for other in others:
        tried += 1
        if served(path, other, most, FEW, seed=0) > (1 + NOISE) * most:
            again = [served(path, other, most, MANY, seed=seed) for seed in (1, 2)]
            if min(again) > (1 + NOISE) * most and min(again) / most - 1 > excess:
                excess, note = min(again) / most - 1, json.dumps(other["policy"])
    return Attacked(tried, excess, note)


def drawn(rng: np.random.Generator, folder: Path) -> list[str]:
    model, cluster, devices = SETUPS[int(rng.integers(len(SETUPS)))]
    lengths = {}
    for name, longest in (("input", 1200), ("output", 160)):
        mean = float(np.exp(rng.uniform(np.log(8), np.log(longest / 2))))
        most = int(min(longest, math.ceil(mean * rng.uniform(1.2, 4))))
        sd = mean * float(rng.uniform(0.1, 1.2))
        lengths[name] = {"kind": "normal", "mean": mean, "sd": sd, "min": 1, "max": max(most, 2)}
    (folder / "lengths.yaml").write_text(yaml.safe_dump({"name": "drawn", "source": "random", **lengths}))
    words = ["--model", model, "--cluster", cluster, "--devices", str(rng.choice(devices))]
    words += ["--workload", str(folder / "lengths.yaml"), "--policy", str(rng.choice(POLICIES)), "--headroom", "0"]
    words += ["--kv", "quantile" if rng.random() < 0.25 else "reserve"]
    words += ["--quantile", str(rng.choice([0.5, 0.9, 0.99]))]
    return [*words, "--objective", "saturated" if rng.random() < 0.75 else "arrivals"]


def planned(path: Path, words: list[str]) -> Plan | None:
    bound = [] if "--latency-bound" in words else ["--latency-bound", "inf"]
    return None if run("plan", *words, *bound, "--force", "-o", str(path)) is None else json.loads(path.read_text())


def ceiling(plan: Plan) -> float:
    """Return the rate that the plan says no other schedule exceeds."""
    estimate, by_arrivals = plan["estimate"], plan["constraint"]["objective"] == "arrivals"
    rate = estimate["throughput_rps"]
    if by_arrivals and estimate["capacity"] is not None:
        rate = estimate["capacity"]["rate_per_s"]
    return float((1 + plan["search"]["gap"]) * rate)


def served(path: Path, plan: Plan, most: float, count: int, seed: int) -> float:
    """Return the requests a second that the plan serves within its bounds in simulation, 0 if it breaks one.

    If the objective is the arrival rate, the requests arrive just above the ceiling, and this rate counts as served if
    the bounds are kept.
    """
    bounds, rate = plan["constraint"], (1 + 2 * NOISE) * most
    by_arrivals = bounds["objective"] == "arrivals"
    path.write_text(json.dumps(plan))
    arrivals = ["--arrival-rate", f"{rate:.9g}"] if by_arrivals else []
    output = run("simulate", str(path), "--requests", str(count), "--seed", str(seed), *arrivals, "--json")
    if output is None:
        return 0.0
    found = json.loads(output)
    if by_arrivals:
        kept = found.get("goodput", 1.0) >= bounds["quantile"] and found["throughput_rps"] > most
        return rate if kept else 0.0
    is_kept = bounds["latency_bound_s"] is None or found.get("latency_s", 0.0) <= bounds["latency_bound_s"]
    return float(found["throughput_rps"]) if is_kept else 0.0


def edits(plan: Plan, rng: np.random.Generator) -> Iterator[Plan]:
    """Yield copies of a plan with other settings: larger by different factors, and one that fills memory."""
    own = plan["policy"]
    for i in range(TRIED):
        factor = 3.0 if i == 0 else float(np.exp(rng.uniform(np.log(0.8), np.log(2.5))))
        ratio = 1.0 if i < 2 else float(np.exp(rng.uniform(np.log(0.4), np.log(2.5))))
        if own["kind"] == "rra":
            iterations = max(1, round(own["decode_iterations"] * ratio))
            yield edited(plan, encode_batch=larger(own["encode_batch"], factor), decode_iterations=iterations)
        elif own["kind"] == "waa":
            cap = larger(own["max_decode_batch"], factor)
            yield edited(plan, encode_batch=max(1, min(cap, round(own["encode_batch"] * ratio))), max_decode_batch=cap)
        elif own["kind"] == "static":
            yield edited(plan, batch=larger(own["batch"], factor))
        elif own["kind"] == "orca":
            yield edited(plan, max_batch=larger(own["max_batch"], factor))
        else:
            budget = max(2, round(own["token_budget"] * ratio))
            yield edited(plan, max_batch=larger(own["max_batch"], factor), token_budget=budget)


def larger(value: int, factor: float) -> int:
    """Return the value multiplied by a factor, but another value than before."""
    return max(1, round(value * factor) if round(value * factor) != value else value + 1)


def edited(plan: Plan, **settings: int) -> Plan:
    policy, workload = plan["policy"] | settings, plan["workload"]
    prompt = float(np.dot(workload["input"]["lengths"], workload["input"]["probabilities"]))
    outputs, shares = np.asarray(workload["output"]["lengths"]), np.asarray(workload["output"]["probabilities"])
    estimate = dict(plan["estimate"])
    if policy["kind"] == "rra":
        phases = float(np.ceil((outputs - 1) / policy["decode_iterations"]) @ shares)
        batch = policy["encode_batch"]
        estimate |= {"encode_batch": float(batch), "encode_tokens": batch * prompt, "decode_batch": batch * phases}
    elif policy["kind"] == "waa":
        batch = policy["encode_batch"]
        running = estimate["decode_batch"] * policy["max_decode_batch"] / plan["policy"]["max_decode_batch"]
        estimate |= {"encode_batch": float(batch), "encode_tokens": batch * prompt, "decode_batch": running}
    elif policy["kind"] == "static":
        batch = policy["batch"]
        estimate |= {"encode_batch": float(batch), "encode_tokens": batch * prompt, "decode_batch": float(batch)}
    else:
        running = estimate["decode_batch"] * policy["max_batch"] / plan["policy"]["max_batch"]
        estimate |= {"decode_batch": max(running, 1e-3)}
    admission = dict(plan["admission"])
    if admission["max_running"] is not None:
        largest = policy.get("max_batch") or policy.get("max_decode_batch") or policy.get("batch")
        admission["max_running"] = max(admission["max_running"], math.ceil(largest or 2 * estimate["decode_batch"]))
    return plan | {"policy": policy, "estimate": estimate, "admission": admission}
