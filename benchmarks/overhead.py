"""Time a step without the model (rule, pool, batch, sampling, settling), and how this time grows.

    python -m benchmarks.overhead [--steps 50]

The worker does everything except compute, so the results do not depend on a model. Each table varies one size and keeps
the others constant: requests in decode, tokens of context, or waiting requests. The figures are medians. Writes
results/overhead.json. docs/results/engine.md has the last results.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click

from xgpt.core.io import write_atomic
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import ModelSpec
from xprofiler.bench import ModelFree
from xrunner.build import BACKENDS
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.kv_cache import KvCache
from xrunner.models import family_of
from xrunner.worker import Worker

BLOCK_SIZE = 16
DECODES, CONTEXT, WAITING = 256, 256, 0
SIZES = {
    "decode": (1, 16, 64, 128, 256, 512),
    "context": (64, 256, 1024, 4096),
    "waiting": (0, 1_000, 10_000, 100_000),
}


@click.command()
@click.option("--steps", default=50, show_default=True)
def main(steps: int) -> None:
    """Print one table for each varied size."""
    rows = []
    for what, sizes in SIZES.items():
        click.echo(f"| {what} | ms a step | µs a request |\n|---|---|---|")
        for size in sizes:
            sized = {"decode": DECODES, "context": CONTEXT, "waiting": WAITING} | {what: size}
            seconds = step_s(sized["decode"], sized["context"], sized["waiting"], steps)
            click.echo(f"| {size} | {1e3 * seconds:.3f} | {1e6 * seconds / sized['decode']:.2f} |")
            rows.append({**sized, "seconds": seconds})
    write_atomic(Path("results/overhead.json"), json.dumps({"steps": steps, "rows": rows}, indent=1) + "\n")


def step_s(num_decodes: int, context: int, num_waiting: int, steps: int) -> float:
    """Return the median seconds of a step in which all requests decode and none enters."""
    engine = full_engine(num_decodes, context, num_waiting, max_output=steps + 2)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def full_engine(num_decodes: int, context: int, num_waiting: int, max_output: int) -> Engine:
    """Return an engine with a full lane, encoded prompts and further waiting requests."""
    blocks = num_decodes * -(-(context + max_output) // BLOCK_SIZE)
    model = family_of(SPEC)(SPEC)
    cache = KvCache(SPEC, blocks, BLOCK_SIZE, model.token_embedding.weight.dtype, model.token_embedding.weight.device)
    worker = ModelFree(Worker(model, cache, BACKENDS["reference"]()))
    rule = OneLane(LaneSettings(mix=True, max_batch=num_decodes), Pool(blocks, BLOCK_SIZE))
    engine = Engine(rule, worker)
    prompt = (0,) * context
    for id_ in range(num_decodes + num_waiting):
        engine.submit(Generation(id_, prompt, max_output))
    engine.step()
    assert len(engine.step() or ()) == num_decodes
    return engine


SPEC = ModelSpec(
    name="none",
    family="opt",
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=8,
    vocab_size=16,
    max_context=8192,
)
"""A model whose weights are never used."""


if __name__ == "__main__":
    main()
