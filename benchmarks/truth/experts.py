"""Measurements of models with experts that were served, of AIConfigurator's wheel.

Rows of InferenceX are predicted as its scripts started the engine (`inferencex`). What the sources leave open is
assumed once: K/V in half precision, routing to experts as the tables' makers take it to be. DeepSeek's rows are counted
apart: some speculate, several tokens a step, and the wheel does not say which. Rows whose degrees of experts do not
make up their devices are counted and not predicted, as are those with attention by data parallelism, which is not
planned for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.truth.inferencex import Started, started
from benchmarks.truth.loads import Served, Stored
from benchmarks.truth.sources import (
    CLUSTERS,
    Row,
    budget_of,
    count_of,
    is_aligned,
    of_backend,
    of_clients,
    read,
    skew_of,
    thinned,
)

MODELS: dict[str, tuple[str, Stored | None]] = {
    "MiniMaxAI/MiniMax-M2.5": ("minimax-m2", None),
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", "fp8_block"),
    "openai/gpt-oss-120b": ("gpt-oss-120b", None),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", None),
    "deepseek-ai/DeepSeek-R1": ("deepseek-v3", None),
}
"""Each as it is served, and the format of its weights where it is not the model's own."""
FOUR_BITS = ("nvfp4", "int4_wo")
ENGINES = {"vllm": "vllm-0.15", "trtllm": "tensorrt-llm-1.0", "sglang": "sglang-0.5"}


def served_rows(path: Path, most: int | None) -> Iterator[Row]:
    """Clients in a closed loop, as for dense models. gpt-oss stands there as nvfp4, and is served in its own mxfp4."""
    raws = [raw for raw in read(path) if raw["model_path"] in MODELS and raw["mode"] == "agg"]
    for raw in thinned(raws, most):
        name, stored = MODELS[raw["model_path"]]
        backend, clients = raw["backend"], count_of(raw["batch_size"])
        tp, slices, ep = (count_of(raw[column]) for column in ("tp_size", "moe_tp_size", "moe_ep_size"))
        measured = {"TPOT": float(raw["silicon_tpot_ms"]) / 1e3, "TTFT": float(raw["silicon_ttft_ms"]) / 1e3}
        source = "silicon, DeepSeek" if name.startswith("deepseek") else "silicon, experts"
        row = Row(source, f"{name} {raw['system']} {backend}", False, measured, note=raw["id"])
        if (why_not := _why_not(raw, name, tp, slices, ep)) is not None:
            yield replace(row, why_not=why_not)
            continue
        cluster = CLUSTERS[raw["system"]]
        how = Started(ep, budget_of(raw), None, of_backend(raw)) if is_aligned(raw) else started(raw, name, tp, ep)
        served = Served(
            name,
            cluster,
            "bfloat16",
            tp,
            ENGINES[backend],
            clients,
            how.token_budget,
            changes=how.changes,
            ep=how.ep,
            stored=stored,
            kv_dtype=how.kv_dtype,
            skew=skew_of(name),
        )
        yield of_clients(row, served, raw)


def _why_not(raw: dict[str, str], name: str, tp: int, slices: int, ep: int) -> str | None:
    if raw["system"] not in CLUSTERS:
        return f"no times of {raw['system']}"
    if count_of(raw["attention_dp_size"]) > 1:
        return "attention by data parallelism"
    if raw["moe_quant_mode"] in FOUR_BITS and name != "gpt-oss-120b":
        return f"{raw['moe_quant_mode']} is no type that is planned for"
    if tp != slices * ep:
        return "degrees of experts do not make up the devices"
    return None
