"""Compare K/V memory that vLLM logged at its start with the planner's prediction for the same settings.

    python -m benchmarks.kv_sizes [--markdown]

Sources of the rows in benchmarks/truth/kv/sizes.csv: "report" is llm-d-planner's accuracy report on vLLM 0.19
(pull request 205). There, "error" means that the size was computed from the published error of llm-d-planner's
prediction, and "parts" that it was computed from the published weights, activations and other memory. "table" is its
docs/empirical-vllm-memory-results.md on vLLM 0.11. "inference-sim" is published by inference-sim
(sim-to-real-accuracy-validation, and testdata of inference-sim). "vLLM-benchmarking" are logs of
dennislee22/vLLM-benchmarking. "myoceane" is a page of myoceane.fr. Numbers are issues. Figures of configs/engines were
fitted only to the rows that are marked so. Column "runs" has properties that a log shows and flags do not: FlashInfer's
sampler, or Marlin's kernels on a device that has better ones.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from xgpt.checkpoints.files import spec_of
from xgpt.core.schema import ModelSpec, Precision
from xgpt.resolve import load_cluster, load_engine, load_model
from xsimulator.memory import LaneMemory
from xsimulator.stages import lane, spread

FOLDER = Path(__file__).parent / "truth" / "kv"
FLASHINFER_BYTES = 10.0
"""Bytes that FlashInfer's sampling takes for a request and a token of the vocabulary: logits in two bytes and in four,
and probabilities in four. PyTorch's sampler also sorts them."""


class Size(NamedTuple):
    """One logged size of K/V memory, on one device.

    Attributes:
        logged, predicted: K/V memory in GiB, or in tokens if these were logged. Negative if weights and buffers do not
            fit.
        is_fitted: whether figures of the engine were fitted to this size.
    """

    setting: str
    engine: str
    logged: float
    predicted: float
    is_fitted: bool
    source: str

    @property
    def error(self) -> float:
        """Relative error, positive if the prediction is too high."""
        return self.predicted / self.logged - 1


cluster_of, engine_of = cache(load_cluster), cache(load_engine)


@cache
def model(name: str) -> ModelSpec:
    """Return a shipped model, or one of models.json."""
    configs = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
    return spec_of(configs[name], name) if name in configs else load_model(name)[0]


def sizes() -> Iterator[Size]:
    """Yield all rows with their predictions."""
    with (FOLDER / "sizes.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            memory = memory_of(row)
            tokens = float(row["max_num_batched_tokens"])
            if row["kv_tokens"]:
                logged, predicted = float(row["kv_tokens"]), float(memory.blocks_beside(tokens)[0])
                predicted *= engine_of(row["engine"]).block_size
            else:
                logged, predicted = float(row["kv_gib"]), float(memory.free_bytes(tokens).min()) / 2**30
            words = [row["model"], row["dtype"], f"TP {row['tp']}" + (f" PP {row['pp']}" if row["pp"] != "1" else "")]
            words[1:1] = [row["cluster"].rpartition("x")[0].strip("-")] if row["cluster"] != "h100x8" else []
            words += [f"{row['max_num_seqs']} x {row['max_num_batched_tokens']}", row["share"]]
            words += [row["runs"]] if row["runs"] else []
            yield Size(", ".join(words), row["engine"], logged, predicted, row["fitted"] == "yes", row["source"])


def memory_of(row: dict[str, str]) -> LaneMemory:
    """Return the memory of a row's devices, whether or not the model fits."""
    spec, cluster, engine = model(row["model"]), cluster_of(row["cluster"]), engine_of(row["engine"])
    device = cluster.device.model_copy(update={"usable_memory": float(row["share"])})
    if row["device_gib"]:
        device = device.model_copy(update={"memory_bytes": round(float(row["device_gib"]) * 2**30)})
    if row["runs"] == "marlin":
        device = device.model_copy(update={"name": "installed without kernels of its own"})
    if row["runs"] == "flashinfer":
        engine = engine.model_copy(update={"sampling_bytes": FLASHINFER_BYTES})
    precision = Precision.of(row["dtype"], "gpu", engine.framework, row["kv_dtype"] or None)
    tp, pp = int(row["tp"]), int(row["pp"])
    stages = lane((tp,) * pp, spread(spec.num_layers, [1.0] * pp))
    cluster = cluster.model_copy(update={"device": device})
    slots = int(row["max_num_seqs"])
    return LaneMemory(spec, cluster, precision, stages, engine.block_size, engine, slots=slots, must_fit=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    edge = "| " if parser.parse_args().markdown else ""
    for size in sizes():
        used = "fitted" if size.is_fitted else "verifies"
        error = f"{100 * size.error:+.1f}%" if size.logged > 0 else f"{size.predicted - size.logged:+.2f} GiB"
        cells = (size.setting, size.engine, f"{size.logged:.6g}", f"{size.predicted:.6g}", error, used, size.source)
        print(f"{edge}{' | '.join(cells)}{' |' if edge else ''}")


if __name__ == "__main__":
    main()
