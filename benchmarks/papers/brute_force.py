"""Compare plans with a brute force over ExeGPT's timelines, written from the paper alone.

    python -m benchmarks.papers.brute_force [--json FILE]

Each of twelve small spaces has one policy on one placement. All settings are evaluated on timelines of ExeGPT sec. 4 to
6, from the step times in a profile and nothing else of the planner. The best settings then run on the simulated engine,
as copies of plan.json, and the best of these runs that keeps the bound is the optimum. The product's plan runs in the
same way. It must reach `LEAST` of the optimum.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.lib.outside import edited, planned, run

LEAST = 0.995
BEST = 6
"""Number of the best settings, by their timelines, that run on the simulated engine."""
REQUESTS = "4000"
ONE, TWO = "tp=1 pp=1 replicas=1", "tp=1 pp=2 replicas=1 microbatches=2"
SPACES = [
    ("rra", "opt-13b", "a40x4", "summarization", ONE, (6.0, 11.5)),
    ("rra", "llama-3.1-8b", "l4x8", "chat-short", ONE, (15.0, 30.0)),
    ("rra", "opt-13b", "a40x4", "summarization", TWO, (8.0, 14.0)),
    ("rra", "qwen3-14b", "a40x4", "chat-short", TWO, (10.0, 20.0)),
    ("waa", "opt-13b", "a40x4", "summarization", "tp=1 pp=1 replicas=1", (3.0, 6.0)),
    ("waa", "llama-3.1-8b", "l4x8", "chat-short", "tp=1 pp=1 replicas=1", (15.0, 30.0)),
]
"""Policy, model, cluster, lengths, placement, and two bounds in seconds."""
Array = np.ndarray


class Times:
    """Step times of one device of a pipeline of `stages` equal stages, from a profile."""

    def __init__(self, profile: dict[str, Any], workload: dict[str, Any], stages: int) -> None:
        self.profile, self.stages = profile, stages
        self.layers = profile["model"]["num_layers"] / stages
        self.layer = next(one for one in profile["layers"] if one["tp_degree"] == 1)
        self.prompts, self.of_prompts = (np.asarray(workload["input"][name]) for name in ("lengths", "probabilities"))
        self.outputs, self.of_outputs = (np.asarray(workload["output"][name]) for name in ("lengths", "probabilities"))
        self.prompt = float(self.prompts @ self.of_prompts)

    def encode(self, batch: Array) -> Array:
        """Seconds in which a stage encodes `batch` prompts."""
        attention = self.of_prompts @ surface(self.layer["encode_attention"], np.ones(len(self.prompts)), self.prompts)
        return self.step(batch * self.prompt, batch) + self.layers * batch * attention

    def decode(self, batch: Array, context: float) -> Array:
        """Seconds of a decode iteration of `batch` requests on a stage."""
        some = np.maximum(batch, 1.0)
        attention = surface(self.layer["decode_attention"], some, np.full(some.shape, context))
        return np.where(batch > 0, self.step(some, some) + self.layers * attention, 0.0)

    def step(self, tokens: Array, sampled: Array) -> Array:
        """Seconds of a step without attention. The slowest stage has the embedding or the head."""
        ends = curve(self.profile["head"], sampled)
        if self.stages == 1:
            ends = ends + curve(self.profile["embedding"], tokens)
        return self.layers * curve(self.layer["rest"], tokens) + ends + curve(self.profile["overhead"], sampled)


def curve(table: dict[str, Any], at: Array) -> Array:
    points, seconds = np.asarray(table["points"], float), np.asarray(table["seconds"])
    slope = (seconds[-1] - seconds[-2]) / (points[-1] - points[-2])
    return np.interp(at, points, seconds) + np.maximum(at - points[-1], 0.0) * slope


def surface(table: dict[str, Any], batch: Array, length: Array) -> Array:
    columns = np.asarray([np.interp(length, table["lengths"], row) for row in table["seconds"]])
    batches = np.asarray(table["batches"], float)
    i = np.clip(np.searchsorted(batches, batch) - 1, 0, len(batches) - 2)
    share = (batch - batches[i]) / (batches[i + 1] - batches[i])
    rows = np.arange(len(length))
    return columns[i, rows] * (1 - share) + columns[i + 1, rows] * share


def rra(times: Times, blocks: int, bound_s: float, micro: int) -> list[dict[str, int]]:
    """Rank all (B_E, N_D) by throughput within the bound."""
    outputs, shares, found = times.outputs - 1, times.of_outputs, []
    held = (times.prompt + times.outputs[-1]) / 16 + 0.5  # blocks of a request, its longest output included
    longest = int(times.outputs[np.searchsorted(np.cumsum(shares), 0.99 - 1e-12)]) - 1
    context = times.prompt + float((outputs**2) @ shares / max(outputs @ shares, 1e-9)) / 2
    for iterations in range(1, int(outputs[-1]) + 1):
        phases = float(np.ceil(outputs / iterations) @ shares)
        batch = np.arange(1, int(blocks / held / max(phases, 1.0)) + 1, dtype=float)
        if not len(batch):
            continue
        # Of B_E requests, those with more than j N_D + u decodes left run in iteration u of their phase j.
        present = np.asarray(
            [
                sum(shares[outputs > start + u].sum() for start in range(0, int(outputs[-1]), iterations))
                for u in range(iterations)
            ]
        )
        encode = times.encode(batch / micro)
        steps = [times.decode(batch / micro * share, context) for share in present]
        cycle, ends = phase(encode, steps, micro, times.stages)
        last = longest - (-(-longest // iterations) - 1) * iterations
        latency = (-(-longest // iterations) - 1) * cycle + ends[last]
        kept = latency <= bound_s
        found += [
            (rate, {"encode_batch": int(b), "decode_iterations": iterations})
            for rate, b in zip((batch / cycle)[kept].tolist(), batch[kept].tolist(), strict=True)
        ]
    return [settings for _, settings in sorted(found, key=lambda one: -one[0])[:BEST]]


def phase(encode: Array, steps: list[Array], micro: int, stages: int) -> tuple[Array, list[Array]]:
    """Return the seconds of a phase in the steady state, and the seconds from its start to the end of each of its
    steps, by a recursion over steps, micro-batches and stages.
    """
    free = [np.zeros_like(encode) for _ in range(stages)]
    ready = [np.zeros_like(encode) for _ in range(micro)]
    starts, ends = [], [np.zeros_like(encode)] * (1 + len(steps))
    for _ in range(3):
        starts.append(free[0].copy())
        for i, seconds in enumerate([encode, *steps]):
            for m in range(micro):
                at = ready[m]
                for j in range(stages):
                    at = free[j] = np.maximum(at, free[j]) + seconds
                ready[m] = at
            ends[i] = at - starts[-1]
    return starts[2] - starts[1], ends


def waa(times: Times, blocks: int, bound_s: float, micro: int) -> list[dict[str, int]]:
    """Rank all (B_E, largest decode batch) by throughput within the bound: a device encodes and a device decodes."""
    del micro
    outputs, shares, found = times.outputs - 1, times.of_outputs, []
    decodes = float(outputs @ shares)
    held = (times.prompt + times.outputs[-1]) / 16 + 0.5
    longest = int(times.outputs[np.searchsorted(np.cumsum(shares), 0.99 - 1e-12)]) - 1
    context = times.prompt + float((outputs**2) @ shares / max(decodes, 1e-9)) / 2
    cap = int(blocks / held)
    running = np.arange(1.0, cap + 1)
    step = times.decode(running, context)
    for batch in range(1, cap + 1):
        encode = float(times.encode(np.asarray([float(batch)]))[0])
        rate = np.minimum(running / (decodes * step), batch / encode)
        # While the encode lane limits, fewer requests run than may.
        runs = np.searchsorted(running / (decodes * step), batch / encode) + 1
        most = min(int(runs) + batch * 2, cap)
        index = np.arange(min(most, cap))
        latency = encode + (longest + 1) * step[np.minimum(index, len(step) - 1)]
        kept = index[(latency <= bound_s) & (index + 1 >= batch)]
        if len(kept):
            best = kept[-1]
            found.append((float(rate[best]), {"encode_batch": batch, "max_decode_batch": int(best + 1)}))
    return [settings for _, settings in sorted(found, key=lambda one: -one[0])[:BEST]]


def compared(space: tuple[Any, ...], bound_s: float, folder: Path) -> dict[str, Any] | None:
    kind, model, cluster, lengths, placement, _ = space
    path = folder / "plan.json"
    words = f"--model {model} --cluster {cluster} --workload {lengths} --policy {kind} --headroom 0 --devices "
    words += "1" if placement == ONE and kind == "rra" else "2"
    fixed = [word for name in placement.split() for word in ("--fix", name)]
    plan = planned(path, [*words.split(), *fixed, "--objective", "saturated", "--latency-bound", str(bound_s)])
    if plan is None:
        return None
    run("profile", "--model", model, "--cluster", cluster, "-o", str(folder / "profile.json"), "--force")
    profile = json.loads((folder / "profile.json").read_text())
    blocks = min(stage["kv_blocks"] for stage in plan["stages"] if stage["lane"] != "encode")
    stages = sum(stage["lane"] == "both" for stage in plan["stages"]) or 1
    times = Times(profile, plan["workload"], stages)
    tried = {"rra": rra, "waa": waa}[kind](times, blocks, bound_s, plan["policy"].get("microbatches", 1))
    rates = [(rate_of(path, edited(plan, **settings), bound_s), settings) for settings in tried]
    best, settings = max(rates, key=lambda one: one[0], default=(0.0, {}))
    return {"product": rate_of(path, plan, np.inf), "optimum": best, "settings": settings, "plan": plan["policy"]}


def rate_of(path: Path, plan: dict[str, Any], bound_s: float) -> float:
    """Return the requests a second of a plan on the simulated engine, 0 if it breaks the bound."""
    path.write_text(json.dumps(plan))
    output = run("simulate", str(path), "--requests", REQUESTS, "--json")
    found = {} if output is None else json.loads(output)
    return float(found["throughput_rps"]) if found and found["latency_s"] <= bound_s else 0.0


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(path: Path | None) -> None:
    rows, fails = [], 0
    for space in SPACES:
        for bound_s in space[-1]:
            with tempfile.TemporaryDirectory() as folder:
                found = compared(space, bound_s, Path(folder))
            name = f"{', '.join(space[:4])}, {space[4]}, {bound_s:g} s"
            if found is None:
                click.echo(f"{name}: no plan")
                continue
            share = found["product"] / found["optimum"] if found["optimum"] else np.inf
            fails += share < LEAST
            rows.append({"space": name, **found})
            click.echo(f"{name}: {found['product']:.3f} of {found['optimum']:.3f}, {share:.4f} {found['settings']}")
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(bool(fails))


if __name__ == "__main__":
    main()
