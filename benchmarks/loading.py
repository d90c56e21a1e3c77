"""Time the deployment of a plan and the change to another plan, until workers have loaded their weights from disk or
memory.

    python -m benchmarks.loading [--sizes 125m,1.3b,2.7b] [--placements "WAA 1+1"] [--work DIR] [--markdown FILE]

Random checkpoints of OPT's shapes in bfloat16 are written, and loaded on one device (a core) and on two in each
placement: first from disk, with the file removed from the page cache, then from memory, with the file in the cache.
Each worker reads its own part, memory-mapped, converts it and packs it for the CPU's matrix products. The time includes
K/V memory, process groups and a first step. The shortest of a few times counts, since other work only adds time.
`predicted` is the planner's time: the weights of the device with the most weights, at the rate in a profile of this
machine (`xprofiler.measure.loading_rate`). From disk, the time of a plain read of the file is added. Rows are stored in
results/loading, and checkpoints in --work, so that several calls can make a long table. Source of the table: ExeGPT
sec. 7.7, Table 4.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.lib.served_plans import one_lane, two_lanes
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import write_atomic
from xgpt.core.schema import DType, ModelSpec, Precision, Stage
from xgpt.resolve import load_cluster
from xprofiler.measure import fastest_layouts, loading_rate
from xrunner.build import WorkerSettings
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.cluster.workers import Workers
from xsimulator.memory import LaneMemory
from xsimulator.stages import Lane, lane_of

SIZES: dict[str, tuple[int, int, DType]] = {
    "125m": (12, 768, "float32"),
    "1.3b": (24, 2048, "float32"),
    "2.7b": (32, 2560, "int8"),
}
"""Layers, width, and the type that fits the memory of a small machine."""
REPEATS = {"125m": 3, "1.3b": 2, "2.7b": 1}
PLACES = ("one device", "TP 2", "PP 2", "WAA 1+1")
RESULTS = Path("results/loading")
MOST_BYTES = 12 << 30
"""Largest number of bytes of weights in all workers. Placements with more are left out."""
SHARD_BYTES = 1 << 30


@dataclass
class Row:
    """One placement's deployment. Seconds are those of the slowest worker."""

    model: str
    dtype: str
    placement: str
    source: str
    weight_bytes: float
    """Bytes of weights on the device with the most weights."""
    predicted_s: float
    measured_s: float


def placements(layers: int) -> dict[str, tuple[Stage, ...]]:
    stages = (one_lane([1], layers), one_lane([2], layers), one_lane([1, 1], layers), two_lanes([1], [1], layers))
    return dict(zip(PLACES, stages, strict=True))


def write_checkpoint(directory: Path, layers: int, hidden: int) -> None:
    import transformers

    config = transformers.OPTConfig(
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        dtype="bfloat16",
    )
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.OPTForCausalLM(config).state_dict().items()}
    shapes.pop("lm_head.weight")  # tied to the embedding
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, shape in shapes.items():
        tensor = (torch.rand(shape) * 0.02).to(torch.bfloat16)
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def drop_from_memory(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def lanes(stages: Sequence[Stage]) -> Iterator[Lane]:
    for name in dict.fromkeys(stage.lane for stage in stages):
        yield lane_of([stage for stage in stages if stage.lane == name], load_cluster("local"))


def weight_bytes(spec: ModelSpec, dtype: DType, stages: Sequence[Stage]) -> list[float]:
    precision = Precision.of(dtype, "cpu")
    memories = [(LaneMemory(spec, load_cluster("local"), precision, lane, 16), lane) for lane in lanes(stages)]
    return [
        float(num_bytes)
        for memory, lane in memories
        for num_bytes, stage in zip(memory.weight_bytes, lane, strict=True)
        for _ in range(stage.tp)
    ]


def disk_rate(directory: Path) -> float:
    """Return the bytes a second of a plain read without a cache."""
    drop_from_memory(directory)
    start, total = time.perf_counter(), 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while read := len(opened.read(16 << 20)):
                total += read
    return total / (time.perf_counter() - start)


def measure(name: str, directory: Path, places: Sequence[str]) -> Iterator[Row]:
    dtype = SIZES[name][2]
    spec = read_spec(directory)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    disk = disk_rate(directory)
    torch.set_num_threads(1)  # as in each worker
    for place, stages in placements(spec.num_layers).items():
        num_bytes = weight_bytes(spec, dtype, stages)
        if place not in places or sum(num_bytes) > MOST_BYTES:
            continue
        layouts = fastest_layouts(spec, dtype, (1, 2) if len(num_bytes) > 1 else (1,))
        rate = loading_rate(spec, dtype, directory, "cpu", layouts)
        from_memory_s = max(num_bytes) / rate
        from_disk_s = from_memory_s + size / disk  # lanes read the same file
        settings = WorkerSettings(spec=spec, dtype=dtype, checkpoint=directory, num_blocks=0, layouts=layouts)
        deployment = Deployment(settings=settings, stages=stages)
        with Workers(len(num_bytes)) as workers:
            for source, predicted_s in (("disk", from_disk_s), ("memory", from_memory_s)):
                seconds = min(_deploy_s(workers, deployment, source, directory) for _ in range(REPEATS[name]))
                row = Row(name, dtype, place, source, max(num_bytes), round(predicted_s, 2), round(seconds, 2))
                print("  ".join(str(value) for value in asdict(row).values()), flush=True)
                yield row


def _deploy_s(workers: Workers, deployment: Deployment, source: str, directory: Path) -> float:
    if source == "disk":
        drop_from_memory(directory)
    executor = RemoteExecutor(workers, deployment)
    seconds = max(executor.deploy().values())
    executor.disconnect()
    return seconds


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| model | type | placement | GB on the fullest device | from | predicted s | measured s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.model, row.dtype, row.placement, f"{row.weight_bytes / 1e9:.2f}", row.source]
        cells += [f"{row.predicted_s:.2f}", f"{row.measured_s:.2f}", f"{row.measured_s / row.predicted_s:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run(
    sizes: Sequence[str] = tuple(SIZES),
    places: Sequence[str] = PLACES,
    work: Path | None = None,
    *,
    again: bool = False,
) -> Iterator[Row]:
    for name in sizes:
        path = RESULTS / f"{name}.json"
        kept = [Row(**row) for row in json.loads(path.read_text())] if path.is_file() else []
        if again or not kept:
            with tempfile.TemporaryDirectory() as temporary:
                directory = (work or Path(temporary)) / name
                if not directory.is_dir():
                    layers, hidden, _ = SIZES[name]
                    write_checkpoint(directory, layers, hidden)
                found = list(measure(name, directory, places))
            kept = [row for row in kept if row.placement not in places] + found
            kept.sort(key=lambda row: PLACES.index(row.placement))
            write_atomic(path, json.dumps([asdict(row) for row in kept], indent=1) + "\n")
        yield from (row for row in kept if row.placement in places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="125m,1.3b,2.7b")
    parser.add_argument("--placements", default=",".join(PLACES), help=", ".join(PLACES))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = list(run(options.sizes.split(","), options.placements.split(","), options.work, again=True))
    if options.markdown:
        write_atomic(options.markdown, markdown(rows))


if __name__ == "__main__":
    main()
