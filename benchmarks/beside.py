"""Measure the throughput that a saturated decode loses for each percent of the cores that other work uses.

    python -m benchmarks.beside [--model opt-125m] [--dtype float32] [--batch 32] [--seconds 2] [--rounds 6]

The engine's worker executes one decode step after the other on all cores, each thread on its own core, as in service.
Each interval with other work (`benchmarks.lib.other_work`) follows an interval without it, and the two are compared. A
pair does not count if a thread waited for its core in the first interval, since the machine then had work that the
benchmark did not start. The share that other work takes is computed from its processor time. Prints a table of medians
and writes results/beside.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import torch

from benchmarks.lib.other_work import KINDS, OtherWork, beside
from xgpt.cli.render import show, table
from xgpt.core.io import write_atomic
from xgpt.core.machine import num_cores
from xgpt.core.progress import silent
from xgpt.resolve import load_cluster, load_model
from xprofiler.bench import NUM_BLOCKS, Bench
from xprofiler.store import dtype_of
from xrunner.build import WorkerSettings, build_worker
from xrunner.cores import own_cores, waited_ns

RESULTS = Path("results/beside.json")
SHARES = (0.06, 0.12, 0.25)
"""Shares of the cores that other work uses."""
CONTEXT = 250
MOST_WAITED = 0.05
"""Largest share of an interval without other work for which a thread may wait for its core."""


class Stretch(NamedTuple):
    """The figures of an interval of steps.

    Attributes:
        others: share of the cores that the other work took.
        waited: share of the time for which a thread waited for its core, for the thread that waited longest.
    """

    steps_per_s: float
    others: float
    waited: float


def _stretch(bench: Bench, batch: int, seconds: float, others: OtherWork) -> Stretch:
    with own_cores():
        bench.step([(CONTEXT, 1)] * batch)
        count, used_s, waits, started = 0, others.seconds(), waited_ns(), time.monotonic()
        while time.monotonic() - started < seconds:
            bench.step([(CONTEXT, 1)] * batch)
            count += 1
        wall_s, used_s = time.monotonic() - started, others.seconds() - used_s
    waited = max(ns - waits.get(id_, 0) for id_, ns in waited_ns().items()) / 1e9
    return Stretch(count / wall_s, used_s / wall_s / num_cores(), waited / wall_s)


@click.command()
@click.option("--model", default="opt-125m", show_default=True)
@click.option("--dtype", default=None)
@click.option("--batch", default=32, show_default=True, help="Requests in each step.")
@click.option("--seconds", default=2.0, show_default=True, help="Duration of each stretch.")
@click.option("--rounds", default=6, show_default=True)
def main(model: str, dtype: str | None, batch: int, seconds: float, rounds: int) -> None:
    """Measure intervals in turn, and print the cost of each kind and share of other work."""
    spec, checkpoint = load_model(model, None)
    cluster = load_cluster("local")
    chosen = dtype_of(spec, cluster, dtype)  # type: ignore[arg-type]
    worker = build_worker(WorkerSettings(spec=spec, dtype=chosen, checkpoint=checkpoint, num_blocks=NUM_BLOCKS))
    torch.set_num_threads(num_cores())
    bench = Bench(worker, silent)
    pairs: dict[tuple[str, float], list[tuple[Stretch, Stretch]]] = {}
    with torch.inference_mode():
        for cache in worker.cache.layers:
            cache.fill_(0.1)
        for kind, share in [(kind, share) for _ in range(rounds) for kind in KINDS for share in SHARES]:
            with beside(kind, 0.0) as nothing:
                rest = _stretch(bench, batch, seconds, nothing)
            with beside(kind, share * num_cores()) as others:
                stretch = _stretch(bench, batch, seconds, others)
            if rest.waited < MOST_WAITED:
                pairs.setdefault((kind, share), []).append((stretch, rest))
    rows = []
    for (kind, share), found in sorted(pairs.items(), reverse=True):
        used = median(each.others for each, _ in found)
        lost = median(1 - each.steps_per_s / rest.steps_per_s for each, rest in found)
        rows.append((kind, share, used, lost, lost / used, median(each.waited for each, _ in found), len(found)))
    write_atomic(RESULTS, json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=1) + "\n")
    text = [[r[0], *(f"{100 * v:.1f}%" for v in r[1:4]), f"{r[4]:.2f}", f"{100 * r[5]:.1f}%", str(r[6])] for r in rows]
    show(table(f"{spec.name} in {chosen}, {batch} decodes a step", list(COLUMNS), text))


COLUMNS = (
    "other work",
    "wanted",
    "others' use of the cores",
    "throughput lost",
    "lost for each 1%",
    "a thread waited",
    "pairs",
)

if __name__ == "__main__":
    main()
