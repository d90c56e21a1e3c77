"""Deploying a plan and going over to another: seconds until its workers hold their weights, from disk and from memory.

    python -m benchmarks.loading [--layers 24] [--hidden 2048] [--json loading.json]

A random checkpoint of OPT's shape is written, 1.3 billion parameters in bfloat16 by default; two cores as two devices
load it for each placement in turn, each first with the file dropped from the page cache (from disk), then with the
file in it (from memory). Each worker reads its own part, memory-mapped, converts it to float32 and repacks it for the
CPU's products; K/V memory, groups and a first step are included. Source of the table: ExeGPT sec. 7.7, Table 4.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.lib.served_plans import one_lane, two_lanes
from xgpt.checkpoint import read_spec
from xgpt.schema import Stage
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.cluster.fleet import Fleet

SHARD_BYTES = 1 << 30


@dataclass
class Row:
    """One placement's deployment. Bytes as stored; the slowest worker's seconds."""

    placement: str
    source: str
    checkpoint_bytes: int
    read_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.seconds


def placements(layers: int) -> dict[str, tuple[Stage, ...]]:
    return {
        "TP 2": one_lane([2], layers),
        "PP 2": one_lane([1, 1], layers),
        "WAA 1+1": two_lanes([1], [1], layers),
    }


def write_checkpoint(directory: Path, layers: int, hidden: int) -> None:
    """A random model of OPT's shape, in shards, as `transformers` saves it."""
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
    """Have the system forget what it has read of these files."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(directory: Path) -> list[Row]:
    spec = read_spec(directory)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    rows = []
    with Fleet(2) as fleet:
        for name, stages in placements(spec.num_layers).items():
            deployment = Deployment(model=spec, dtype="float32", checkpoint=str(directory), stages=stages)
            for source in ("disk", "memory"):
                if source == "disk":
                    drop_from_memory(directory)
                executor = RemoteExecutor(fleet, deployment)
                seconds = max(executor.deploy().values())
                executor.disconnect()
                copies = 2 if name.startswith("WAA") else 1  # each lane of a decoder-only model holds all of it
                rows.append(Row(name, source, size, copies * size, round(seconds, 2)))
                row = rows[-1]
                print(f"{name:8} from {source:7} {row.seconds:6.2f} s, {row.bytes_per_s / 1e9:.2f} GB/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), options.layers, options.hidden)
        rows = measure(Path(directory))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
