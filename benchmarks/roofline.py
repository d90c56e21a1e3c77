"""Time a model's steps against batch, context and prompt, and compare them with the device's limits.

    python -m benchmarks.roofline [--model opt-125m] [--device cuda] [--dtype int8] [--seconds 120]

Steps of the serving worker are timed without the engine's loop: decodes with rising batch size, decodes with rising
context, and prompts. The floor of a step is the longer of two times: reading its weights and K/V at the memory's rate,
and computing its products at the rate of one large matrix product. Both rates are measured in the same rounds as the
steps. Each round includes all points, and a point's time is the mean of its calls in all rounds. Weights are random.
Writes results/roofline.MODEL.DEVICE.DTYPE.json.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import torch

from xgpt.core.io import write_atomic
from xgpt.core.schema import BYTES_PER_ELEMENT, SLICE_TOKENS, ModelSpec, Precision, RunDType
from xgpt.resolve import load_cluster, load_model
from xprofiler.bench import Bench, timed
from xprofiler.measure import fastest_layouts
from xrunner.build import WorkerSettings, build_worker
from xrunner.cores import own_cores
from xrunner.models.layers import Linear
from xrunner.packing.choice import fastest
from xrunner.weights import state_dtype
from xrunner.worker import Worker
from xsimulator.memory import LaneMemory
from xsimulator.stages import whole

BLOCK_SIZE = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096)
PROMPTS = (16, 64, 256, 512, 1024, 2048)
ROUNDS = 8
READ = {"cpu": 2**28, "cuda": 2**29}
"""Number of float32 elements that are read and copied to measure the memory's rate, far more than fit in caches."""
PRODUCT = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices whose product gives the rate of products."""


@dataclass
class Point:
    """One kind of step.

    Attributes:
        what: the table to which the point belongs.
        bytes, flops: the least bytes and FLOPs of a step. Points that measure the machine's rates have only one of the
            two.
    """

    what: str
    batch: int
    context: int
    bytes: float
    flops: float
    run: Callable[[], object]
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.times) / len(self.times)


@click.command()
@click.option("--model", default="opt-125m", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Device.  [default: the GPU, if there is one]")
@click.option(
    "--dtype", type=click.Choice(get_args(RunDType)), help="Data type.  [default: float32 on a CPU, otherwise bfloat16]"
)
@click.option(
    "--seconds", default=120.0, show_default=True, help="Duration of all rounds; the first round always finishes."
)
@click.option("--context", default=128, show_default=True, help="Context of the decodes with rising batch size.")
@click.option("--batch", default=16, show_default=True, help="Batch size of the decodes with rising context.")
def main(model: str, device: str | None, dtype: RunDType | None, seconds: float, context: int, batch: int) -> None:
    """Measure all points, print a table for each kind of step, and write all results."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    spec, _ = load_model(model)
    document = measure(spec, device, dtype, seconds, context, batch)
    click.echo(tables(document))
    write_atomic(Path(f"results/roofline.{model}.{device}.{dtype}.json"), json.dumps(document, indent=1) + "\n")


def measure(
    spec: ModelSpec, device: str, dtype: RunDType, seconds: float, context: int = 128, batch: int = 16
) -> dict[str, Any]:
    sizes = [("decode by batch", n, context) for n in BATCHES]
    sizes += [("decode by context", batch, n) for n in CONTEXTS if n <= spec.max_context]
    sizes = [size for size in sizes if size[1] * size[2] <= most_tokens(spec, device, dtype)]
    num_blocks = max(n * -(-length // BLOCK_SIZE) for _, n, length in sizes)
    layouts = fastest_layouts(spec, dtype, (1,)) if device == "cpu" else {}
    worker = build_worker(
        WorkerSettings(
            spec=spec, dtype=dtype, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device, layouts=layouts
        )
    )
    for layer in worker.cache.layers:
        layer.fill_(0.01)  # memory that was never written is read faster than other memory
    points = machine(device, dtype)
    points += [decode(worker, dtype, what, n, length) for what, n, length in sizes]
    points += [prompt(worker, dtype, n) for n in PROMPTS if n <= spec.max_context]
    with torch.inference_mode(), own_cores() if device == "cpu" else nullcontext():
        in_rounds(points, seconds)
    found = rates(points)
    steps = [row(point, found) for point in points if point.what not in ("memory", "product")]
    return {
        "model": spec.name,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "backend": type(worker.backend).__name__,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        **found,
        "steps": steps,
    }


def most_tokens(spec: ModelSpec, device: str, dtype: RunDType) -> float:
    """Return the number of tokens whose K/V fits on a GPU beside the weights and the arrays for the memory's rate."""
    if device == "cpu":
        return math.inf
    memory = LaneMemory(spec, load_cluster("local"), Precision.of(dtype, "gpu"), whole(spec), BLOCK_SIZE)
    (blocks,) = memory.blocks_beside(SLICE_TOKENS)
    return float(blocks) * BLOCK_SIZE - 2 * 4 * READ[device] / spec.kv_bytes_per_token(dtype)


def rates(points: list[Point]) -> dict[str, float]:
    return {
        "bytes_per_s": max(p.bytes / p.seconds for p in points if p.what == "memory"),
        "flops_per_s": max(p.flops / p.seconds for p in points if p.what == "product"),
    }


def in_rounds(points: list[Point], seconds: float) -> None:
    """Give all points equal time, until `seconds` have passed. One call of each point is warm-up."""
    for point in points:
        timed(point.run)
    end, share = time.perf_counter() + seconds, seconds / ROUNDS / len(points)
    while not all(point.times for point in points) or time.perf_counter() < end:
        for point in points:
            if point.times and time.perf_counter() > end:
                return
            spent = 0.0
            while not spent or spent < share:
                seconds_of_call = timed(point.run)
                point.times.append(seconds_of_call)
                spent += seconds_of_call


def machine(device: str, dtype: RunDType) -> list[Point]:
    source = torch.ones(READ[device], dtype=torch.float32, device=device)
    target, size = torch.empty_like(source), PRODUCT[device]
    state = state_dtype(dtype, device)
    linear = Linear(partial(torch.randn, dtype=state, device=device), size, size, bias=False)
    if device == "cpu":
        linear.prepack(dtype, fastest([(size, size)], dtype))
    x = torch.randn(size, size, dtype=state, device=device)
    return [
        Point("memory", 0, 0, 4 * source.numel(), 0, source.sum),
        Point("memory", 0, 0, 8 * source.numel(), 0, lambda: target.copy_(source)),
        Point("product", 0, 0, 0, 2 * size**3, lambda: linear(x)),
    ]


def decode(worker: Worker, dtype: RunDType, what: str, batch: int, context: int) -> Point:
    """Return a step in which `batch` requests decode. `context` includes the decoded token."""
    spec = worker.model.spec
    step = Bench(worker, no_progress).batch([(context - 1, 1)] * batch)
    num_bytes = matrix_bytes(spec, dtype) + batch * context * kv_bytes(worker)
    flops = batch * (2 * (layer_params(spec) + head_params(spec)) + attention_flops(spec, context))
    return Point(what, batch, context, num_bytes, flops, partial(worker.next_tokens, step))


def prompt(worker: Worker, dtype: RunDType, length: int) -> Point:
    assert length <= SLICE_TOKENS
    spec = worker.model.spec
    step = Bench(worker, no_progress).batch([(0, length)])
    num_bytes = matrix_bytes(spec, dtype) + length * kv_bytes(worker)
    return Point("prompt", 1, length, num_bytes, prompt_flops(spec, length), partial(worker.next_tokens, step))


def layer_params(spec: ModelSpec) -> int:
    return spec.num_layers * spec.decoder_layer_params


def head_params(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def matrix_bytes(spec: ModelSpec, dtype: RunDType) -> float:
    """Return the bytes of weights that every step reads: all except an embedding that is not also the head."""
    return (layer_params(spec) + head_params(spec)) * BYTES_PER_ELEMENT[dtype]


def kv_bytes(worker: Worker) -> float:
    """Return the K/V bytes of one token over all layers, as stored in the cache."""
    cache = worker.cache
    return sum(layer.nbytes for layer in cache.layers) / (cache.num_blocks * cache.block_size)


def prompt_flops(spec: ModelSpec, length: int) -> float:
    """Return the FLOPs of a prompt with logits for the last token. For other tokens, the last layer computes only
    K/V."""
    of_token = 2 * layer_params(spec) + attention_flops(spec, (length + 1) / 2)
    keys_and_values = 2 * spec.hidden_size * spec.kv_bytes_of(spec.kinds[0], "float32") / BYTES_PER_ELEMENT["float32"]
    saved = of_token / spec.num_layers - keys_and_values
    return length * of_token - (length - 1) * saved + 2 * head_params(spec)


def attention_flops(spec: ModelSpec, context: float) -> float:
    """Return the FLOPs of one token's attention over all layers: scores and weighted sums."""
    return 4 * spec.num_layers * spec.num_heads * spec.head_dim * context


def row(point: Point, rates: dict[str, float]) -> dict[str, Any]:
    floors = {"memory": point.bytes / rates["bytes_per_s"], "products": point.flops / rates["flops_per_s"]}
    limit = max(floors, key=floors.__getitem__)
    return {
        "what": point.what,
        "batch": point.batch,
        "context": point.context,
        "seconds": point.seconds,
        "least_s": min(point.times),
        "calls": len(point.times),
        "gb_per_s": point.bytes / point.seconds / 1e9,
        "gflop_per_s": point.flops / point.seconds / 1e9,
        "limit": limit,
        "share": floors[limit] / point.seconds,
    }


def tables(document: dict[str, Any]) -> str:
    """Return a table for each kind of step. The exponent states how time grows from the previous row: 1 is
    proportional."""
    lines = [
        f"{document['model']}, {document['dtype']}, {document['device']}, {document['backend']}, "
        f"{document['threads']} threads, torch {document['torch']}, {document['date']}: "
        f"{document['bytes_per_s'] / 1e9:.1f} GB/s, {document['flops_per_s'] / 1e9:.0f} GFLOP/s"
    ]
    for what in dict.fromkeys(step["what"] for step in document["steps"]):
        size = "batch" if what == "decode by batch" else "context"
        lines += ["", f"| {what} | ms | exponent | GB/s | GFLOP/s | limit | share of it |", f"|{'---|' * 7}"]
        above: dict[str, Any] | None = None
        for step in document["steps"]:
            if step["what"] != what:
                continue
            exponent = "-"
            if above is not None:
                grown = math.log(step["seconds"] / above["seconds"]) / math.log(step[size] / above[size])
                exponent = f"{grown:.2f}"
            lines.append(
                f"| {step['batch']} x {step['context']} | {1e3 * step['seconds']:.2f} | {exponent} "
                f"| {step['gb_per_s']:.1f} | {step['gflop_per_s']:.0f} | {step['limit']} | {100 * step['share']:.0f}% |"
            )
            above = step
    return "\n".join(lines)


def no_progress(done: int, total: int, what: str) -> None:
    """Report nothing."""


if __name__ == "__main__":
    main()
