"""Check verdicts of `xgpt compare` on random logs and deployments against a replay of each whole log, step by step.

    python -m benchmarks.decisions [--first 0] [--last 200] [--json FILE]

A log has a day's shape (a quiet night first, a busy noon), bursts, and random lengths. A deployment is a random command
of vLLM on a random part of a cluster. The verdict is right if the simulated engine, which counts no requests but runs
every step, says the same of the whole log: that what runs now keeps the bounds or not, and that the recommended plan
keeps them. The table has one row for each kind of verdict.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from xgpt.comparing.compare import Compared, compare
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Offer, Plan, Profile
from xgpt.core.workload import TraceLengths
from xgpt.requests import plan_request
from xgpt.resolve import load_trace
from xsimulator.run import replay_trace, times_of

MODELS = {"meta-llama/Llama-3.1-8B-Instruct": (1, 2), "Qwen/Qwen3-4B": (1, 2), "Qwen/Qwen3-14B": (1, 2)}
"""Models with the tensor-parallel degrees of their deployments."""
CLUSTERS = {"h100x1": 1, "h200x1": 1, "a40x4": 4}
NUM_REQUESTS = (150, 600)
EDGE = 0.004
"""A share of kept requests that differs from the required one by less may be judged either way by two simulations."""


class Case(NamedTuple):
    asked: dict[str, Any]
    command: str
    log: TraceLengths


def draw(number: int, folder: Path) -> Case:
    rng = np.random.default_rng(number)
    model = str(rng.choice(list(MODELS)))
    count, span_s = int(rng.integers(*NUM_REQUESTS)), float(rng.choice([15.0, 40.0, 120.0, 400.0]))
    night = rng.uniform(0.02, 0.6)
    shape = rng.choice(["noon", "steps", "flat"])
    grid = np.linspace(0, 1, 200)
    noon = night + (1 - night) * np.clip(np.sin(np.pi * grid), 0, 1) ** int(rng.integers(2, 12))
    rates = {"noon": noon, "steps": np.where(grid > rng.uniform(0.5, 0.9), 1.0, night), "flat": np.ones(200)}[
        str(shape)
    ]
    places = np.interp(np.sort(rng.random(count)), np.cumsum(rates) / rates.sum(), grid)
    times = span_s * np.sort(places + rng.exponential(0.001, count) * rng.integers(0, 2))
    inputs = np.clip(rng.lognormal(rng.uniform(5, 7.5), 0.8, count), 16, 6000).astype(int)
    outputs = np.clip(rng.lognormal(rng.uniform(3.5, 5.5), 0.7, count), 2, 1000).astype(int)
    path = folder / f"log{number}.csv"
    rows = (f"{t:.4f},{i},{o}" for t, i, o in zip(times - times[0], inputs, outputs, strict=True))
    path.write_text("\n".join(["timestamp_s,input,output", *rows]) + "\n")
    bounds = {"latency_bound_s": float(rng.choice([8.0, 15.0, 30.0]))}
    if rng.random() < 0.6:
        bounds = {"ttft_s": float(rng.choice([0.5, 1.0, 2.0])), "tpot_s": float(rng.choice([0.04, 0.08, 0.15]))}
    cluster = str(rng.choice(list(CLUSTERS)))
    degree, replicas = int(rng.choice(MODELS[model])), int(rng.choice([1, 1, 2]))
    degree, replicas = min(degree, CLUSTERS[cluster]), min(replicas, CLUSTERS[cluster])
    command = f"vllm serve {model} --tensor-parallel-size {degree} --max-model-len 8192"
    command += f" --data-parallel-size {replicas}" if replicas > 1 else ""
    command += f" --max-num-seqs {int(rng.choice([32, 128, 256]))}" if rng.random() < 0.6 else ""
    command += f" --max-num-batched-tokens {int(rng.choice([2048, 8192]))}" if rng.random() < 0.5 else ""
    asked = {"cluster": cluster, "workload": str(path), "policy": "chunked", **bounds}
    trace = load_trace(str(path))
    assert trace is not None
    return Case(asked, command, trace)


def share_kept(plan: Plan, profile: Profile, log: TraceLengths) -> float:
    """Return the share of a log's requests that keep the bounds, by running every step of each replica."""
    kept, count = 0, len(log.input)
    for replica in range(plan.replicas):
        part = log.take(np.arange(replica, count, plan.replicas))
        one, number = plan.but(replicas=1), len(part.input)
        _, steps = replay_trace(one, profile, plan.workload, part, number)
        times = times_of(one, steps, number, part.output).later(plan.request_path_s)
        kept += int((times.excess(plan.constraint.all_bounds) <= 1).sum())
    return kept / count


def check(found: Compared, case: Case) -> tuple[str, str]:
    told, profile = found.recommendation, found.planned.problem.profile
    assert found.current is not None and told.now is not None
    first = told.rejected if told.action == "keep" else told.best
    assert first is not None
    quantile = found.best.constraint.quantile
    kept = {
        "now": (told.now, share_kept(found.current, profile, case.log)),
        "plan": (first, share_kept(found.best, profile, case.log)),
    }
    wrong = []
    for name, (offer, share) in kept.items():
        said = said_share(offer)
        if (said >= quantile) != (share >= quantile) and abs(share - quantile) > EDGE:
            wrong.append(f"{name}: said {said:.4f}, replayed {share:.4f}")
    now, then = (said_share(offer) >= quantile for offer, _ in kept.values())
    right = {(False, True): "change", (True, False): "keep"}.get((now, then))
    if now and then:
        right = "change" if first.num_devices < told.now.num_devices else "keep"
    if right is not None and told.action != right:
        wrong.append(f"{told.action} instead of {right}")
    return f"{told.action}; now keeps: {'yes' if now else 'no'}, plan keeps: {'yes' if then else 'no'}", "; ".join(
        wrong
    )


def said_share(offer: Offer) -> float:
    return 0.0 if offer.at_load is None or offer.at_load.share_kept is None else offer.at_load.share_kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    kinds, wrong, refused = Counter[str](), dict[int, str](), Counter[str]()
    with TemporaryDirectory() as folder:
        number, judged, told = given.first, 0, 0
        while judged < given.last - given.first:
            case = draw(number, Path(folder))
            try:
                found = compare(plan_request(**case.asked), case.command)
            except (InfeasibleError, InputError) as error:
                refused[type(error).__name__] += 1
            else:
                kind, fault = check(found, case)
                kinds[kind] += 1
                judged += 1
                if fault:
                    wrong[number] = fault
                    print(f"case {number}: {fault}", flush=True)
            number += 1
            if judged and judged % 10 == 0 and told != judged:
                told = judged
                print(f"{judged - len(wrong)} of {judged} agree so far", flush=True)
    for kind, count in kinds.most_common():
        print(f"{count:4d}  {kind}")
    print(f"{judged - len(wrong)} of {judged} verdicts agree with the replay; refused: {dict(refused)}")
    if given.json is not None:
        given.json.write_text(json.dumps({"kinds": kinds, "wrong": wrong, "refused": refused}, indent=1))


if __name__ == "__main__":
    main()
