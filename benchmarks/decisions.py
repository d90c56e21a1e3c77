"""Check verdicts of `xgpt compare` on random logs and deployments against a replay of each whole log, step by step.

    python -m benchmarks.decisions [--first 0] [--last 200] [--commands] [--json FILE]

A log has a day's shape (a quiet night first, a busy noon), bursts, and random lengths. A deployment is a random
command of vLLM on a random part of a cluster. The verdict is right if the simulated engine, which counts no requests
but runs every step, says the same of the whole log: that what runs now keeps the bounds or not, that the recommended
plan keeps them and, if neither does, that it keeps no fewer requests, and that the devices that are said to hold the
log do. The table has one row for each kind of verdict. With --commands, `xgpt plan`, `compare`, `simulate` and
`replan` must also say the same of each deployment, in JSON and in lines (`benchmarks.lib.one_answer`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections import Counter
from math import floor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.one_answer import contradictions
from xgpt.cli import main as main_of_xgpt
from xgpt.comparing.compare import Compared, compare
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.load import NO_GROWTH, KeptByWindow, LogLoad
from xgpt.core.schema import Plan, Profile
from xgpt.deciding.recommend import CLEAR
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xgpt.resolve import load_of
from xsimulator.run import run_requests, times_of

MODELS = {"meta-llama/Llama-3.1-8B-Instruct": (1, 2), "Qwen/Qwen3-4B": (1, 2), "Qwen/Qwen3-14B": (1, 2)}
"""Models with the tensor-parallel degrees of their deployments."""
CLUSTERS = {"h100x1": 1, "h200x1": 1, "a40x4": 4}
NUM_REQUESTS = (150, 600)
EDGE = 0.004
"""If a required share lower or higher by this changes the verdict, two simulations may judge it either way."""
WANTED = 0.9
"""Probability with which a load must be held: a plan that does so replaces a deployment that does not."""


class Case(NamedTuple):
    asked: dict[str, Any]
    command: str


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
    return Case(asked, command)


def replayed(plan: Plan, profile: Profile, load: LogLoad) -> KeptByWindow:
    """Return the shares of a log's requests that keep the bounds, by running every step of each replica."""
    log = load.requests
    kept = np.zeros(len(log.input), bool)
    for replica in range(plan.replicas):
        own = np.arange(replica, len(kept), plan.replicas)
        part, one = log.take(own), plan.but(replicas=1)
        steps = run_requests(one, profile, part, plan.workload.output.lengths[-1])
        times = times_of(one, steps, len(own), part.output).later(plan.request_path_s)
        kept[own] = times.excess(plan.constraint.all_bounds) <= 1
    return load.kept(kept)


def check(found: Compared, case: Case) -> tuple[str, str]:
    told, profile = found.recommendation, found.planned.problem.profile
    assert found.current is not None and told.now is not None
    first = told.rejected if told.action == "keep" else told.best
    assert first is not None
    quantile, load = found.best.constraint.quantile, load_of(case.asked["workload"], NO_GROWTH, found.best.model)
    assert load is not None
    wrong, holds, shares = [], [], []
    for name, offer, plan in (("now", told.now, found.current), ("plan", first, found.best)):
        said, seen = offer.at_load, replayed(plan, profile, load)
        holds.append(said is not None and said.holds)
        shares.append(seen.share)
        if holds[-1] not in {seen.holds(quantile - EDGE), seen.holds(quantile + EDGE)}:
            wrong.append(f"{name}: said {said}, replayed {seen.share:.4f}, worst window {seen.worst_share}")
    right = {(False, True): "change", (True, False): "keep"}.get((holds[0], holds[1]))
    if all(holds):
        ours, theirs = (None if o.at_load is None else o.at_load.confidence for o in (told.now, first))
        is_surer = ours is not None and theirs is not None and ours < WANTED <= theirs
        is_as_sure = None in (ours, theirs) or theirs >= min(WANTED, floor(10 * ours) / 10)
        right = "change" if (first.num_devices < told.now.num_devices and is_as_sure) or is_surer else "keep"
    if not any(holds) and abs(shares[1] - shares[0]) > CLEAR + EDGE:
        right = "change" if shares[1] > shares[0] else "keep"
    if right is not None and told.action != right:
        wrong.append(f"{told.action} instead of {right}")
    if told.would_hold is not None and told.would_hold_of != "runner_up":
        plan = found.current if told.action == "keep" and told.would_hold_of == "best" else found.best
        if told.steady is not None:
            plan = next(each for each in found.planned.steady if settings_text(each) == told.steady.settings)
        several = replayed(plan.but(replicas=plan.replicas * told.would_hold // plan.num_devices), profile, load)
        if not (several.holds(quantile - EDGE) or several.holds(quantile + EDGE)):
            wrong.append(f"{told.would_hold} devices were said to hold it, replayed {several.share:.4f}")
    now, then = ("yes" if each else "no" for each in holds)
    return f"{told.action}; now keeps: {now}, plan keeps: {then}", "; ".join(wrong)


def options_of(case: Case) -> tuple[str, ...]:
    """Return a case as options of the command line."""
    names = {"latency_bound_s": "latency-bound", "ttft_s": "ttft", "tpot_s": "tpot"}
    given = {"latency_bound_s": "inf", **case.asked} if "ttft_s" in case.asked else dict(case.asked)
    del given["policy"]  # `xgpt compare` has no such option
    return tuple(word for name, value in given.items() for word in (f"--{names.get(name, name)}", str(value)))


def run_here(*arguments: str) -> str:
    """Run a command in this process, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main_of_xgpt(list(arguments))
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"xgpt {arguments}: {told.getvalue()}") from None
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=200)
    parser.add_argument("--commands", action="store_true")
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
                faults = [fault] if fault else []
                if given.commands:
                    model = case.command.split()[2]
                    faults += contradictions(run_here, options_of(case), model, case.command, Path(folder))
                fault = "; ".join(faults)
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
