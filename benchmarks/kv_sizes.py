"""Compare K/V memory that vLLM logged at its start with the planner's prediction for the same settings.

    python -m benchmarks.kv_sizes

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

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.lib.results import record, table
from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import deployed, engine_name
from xgpt.core.errors import InfeasibleError
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_cluster, load_engine

FOLDER = Path(__file__).parent / "truth" / "kv"
HEADER = ("engine", "logs", "fitted", "not started, as predicted", "errors of the others", "models")
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


def rows() -> list[dict[str, str]]:
    with (FOLDER / "sizes.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sizes() -> Iterator[Size]:
    return map(size_of, rows())


def size_of(row: dict[str, str]) -> Size:
    logged = float(row["kv_tokens"] or row["kv_gib"])
    return Size(setting_of(row), row["engine"], logged, predicted(row), row["fitted"] == "yes", row["source"])


def setting_of(row: dict[str, str]) -> str:
    words = [row["model"], row["dtype"], f"TP {row['tp']}" + (f" PP {row['pp']}" if row["pp"] != "1" else "")]
    words[1:1] = [row["cluster"].rpartition("x")[0].strip("-")] if row["cluster"] != "h100x8" else []
    words += [f"{row['max_num_seqs']} x {row['max_num_batched_tokens']}", row["share"]]
    words += [row["runs"]] if row["runs"] else []
    return ", ".join(words)


def command_of(row: dict[str, str]) -> str:
    stem, _, version = row["engine"].rpartition("-")
    if stem == "sglang":
        return f"sglang serve m --tp {row['tp']} --mem-fraction-static {row['share']}"
    flags = {
        "tensor-parallel-size": row["tp"],
        "pipeline-parallel-size": row["pp"],
        "gpu-memory-utilization": row["share"],
        "max-num-seqs": row["max_num_seqs"],
        "max-num-batched-tokens": row["max_num_batched_tokens"],
        "max-model-len": row["context"],
        "kv-cache-dtype": "fp8" if row["kv_dtype"] == "float8" else "",
        "dtype": "" if row["dtype"] == "float8" else row["dtype"],
    }
    said = " ".join(f"--{name} {value}" for name, value in flags.items() if value)
    return f"docker run vllm/vllm-openai:v{version}.0 --model m {said}"


def predicted(row: dict[str, str]) -> float:
    """Return the K/V memory that `xgpt compare` predicts for a row's command, in tokens if the row has tokens, else in
    GiB. It is -1 if the server does not start.
    """
    cluster = load_cluster(row["cluster"])
    current, device = read_current(command_of(row), cluster), cluster.device
    if row["device_gib"]:
        device = device.but(memory_bytes=round(float(row["device_gib"]) * 2**30))
    if row["runs"] == "marlin":
        device = device.but(name="installed without kernels of its own")
    engine = load_engine(engine_name(current))
    if row["runs"] == "flashinfer":
        engine = engine.but(sampling_bytes=FLASHINFER_BYTES)
    path = FOLDER / "models" / f"{row['model']}.json"
    asked = {"model": str(path) if path.is_file() else row["model"], "cluster": cluster.but(device=device)}
    types = {"dtype": row["dtype"], "kv_dtype": row["kv_dtype"] or None}
    problem = resolve(plan_request(workload="orca", engine=engine, objective="saturated", **asked, **types))
    try:
        found = deployed(problem, current)
    except InfeasibleError:
        return -1.0
    memory, tokens = found.space.limits.memory, float(row["max_num_batched_tokens"])
    if not row["kv_tokens"]:
        return float(memory.free_bytes(tokens).min()) / 2**30
    if engine.framework != "vllm":
        return float(memory.blocks_beside(tokens)[0]) * engine.block_size
    return found.logged_tokens(current.max_model_len or problem.model.max_context)


def main() -> None:
    groups: dict[str, list[Size]] = {}
    for size in sizes():
        groups.setdefault(size.engine, []).append(size)
    rows, checked = [], list[float]()
    for engine, group in sorted(groups.items()):
        started = [size for size in group if size.logged > 0]
        errors = [100 * size.error for size in started if not size.is_fitted]
        checked += errors
        models = sorted({size.setting.partition(",")[0] for size in group})
        about = f"{min(errors):+.1f} to {max(errors):+.1f}%" if errors else "-"
        fitted = sum(size.is_fitted for size in group)
        rows.append((engine, len(group), fitted, len(group) - len(started), about, ", ".join(models)))
    figures = {"rows": len(checked), "median": f"{median(map(abs, checked)):.2f}"}
    figures |= {"least": f"{min(checked):+.1f}", "most": f"{max(checked):+.1f}"}
    claim = "{rows} logged sizes to which nothing was fitted: median error {median}%, from {least} to {most}%."
    record("memory/sizes", claim, table(HEADER, rows), **figures)


if __name__ == "__main__":
    main()
