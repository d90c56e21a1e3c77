"""Yield rows of AIConfigurator's wheel in which some devices encode and others decode (`disagg`).

Each group of devices runs the single-lane rule. Prompts arrive at the encoding groups as often as requests end, and
decoding groups get prompts whose K/V is computed. If the number of groups is not published (gpt-oss, InferenceX), one
decoding group is assumed, and only the time between tokens is predicted. Then the measured TTFT is the time that a
client spends outside of this group. The transfer of K/V is left out, since the rows do not state how K/V is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.truth import experts, sources
from benchmarks.truth.loads import Served, closed_loop, open_loop
from benchmarks.truth.sources import Figures, Row, cell_of, count_of, predicted, read, skew_of

MODELS = {name: (model, stored) for name, (model, stored) in experts.MODELS.items()} | {
    name: (model, None) for name, model in sources.MODELS.items()
}
ROUNDS = 4
DEVICES = {"h100_sxm": 8, "h200_sxm": 8, "b200_sxm": 8, "b300_sxm": 8, "gb200": 4, "gb300": 4}
"""Number of devices of a machine."""


def rows(path: Path) -> Iterator[Row]:
    """Yield a row for each deployment. Rows of unsupported models or types state why they are not predicted."""
    raws = [raw for raw in read(path) if raw["mode"] == "disagg"]
    for raw in raws:
        measured = {"TPOT": float(raw["silicon_tpot_ms"]) / 1e3, "TTFT": float(raw["silicon_ttft_ms"]) / 1e3}
        group = f"{raw['model_path']} {raw['system']} {raw['backend']}"
        row = Row("disaggregated", group, False, measured, note=raw["id"])
        if (why_not := _why_not(raw)) is not None:
            yield replace(row, why_not=why_not)
            continue
        encode, decode = (_served(raw, lane) for lane in ("prefill", "decode"))
        found, why_not = predicted(partial(_predict, raw, encode, decode, measured["TTFT"]))
        cell, document = cell_of(decode, "disaggregated", _own_clients(raw)), f"{decode.model}, disaggregated"
        yield replace(row, predicted=found, why_not=why_not, cell=cell, document=document)


def _why_not(raw: dict[str, str]) -> str | None:
    if raw["model_path"] not in MODELS:
        return f"{raw['model_path']}: no imported times of its blocks"
    if raw["system"] not in sources.CLUSTERS:
        return f"no times of {raw['system']}"
    if not raw["prefill_num_workers"] and "gpt-oss" not in raw["model_path"]:
        return "its numbers of workers and how they divide attention are not published"
    if max(count_of(raw[f"{lane}_attention_dp_size"]) for lane in ("prefill", "decode")) > 1:
        return "attention by data parallelism"
    if max(experts.degrees_of(raw, f"{lane}_")[0] for lane in ("prefill", "decode")) > DEVICES[raw["system"]]:
        return "several machines"
    return None


def _served(raw: dict[str, str], lane: str) -> Served:
    model, _ = MODELS[raw["model_path"]]
    tp, _, ep = experts.degrees_of(raw, f"{lane}_")
    stored = experts.stored_in(raw) if raw["model_path"] in experts.MODELS else None
    if raw["gemm_quant_mode"] == "nvfp4" and model == "qwen3-32b":
        stored = "nvfp4"
    elif model == "qwen3-32b":
        stored = "fp8_block" if raw["gemm_quant_mode"] == "fp8_block" else "fp8_unscaled"
    return Served(
        model,
        sources.CLUSTERS[raw["system"]],
        "float8" if stored == "fp8_unscaled" else "bfloat16",
        tp,
        experts.ENGINES[raw["backend"]],
        2048,
        max(8192, count_of(raw["isl"])),
        ep=max(1, ep),
        stored=stored,
        kv_dtype="float8" if raw["gemm_quant_mode"] in ("nvfp4", "fp8") and model != "qwen3-32b" else None,
        skew=skew_of(model),
    )


def _predict(raw: dict[str, str], encode: Served, decode: Served, measured_first_s: float) -> Figures:
    num_clients = _clients(raw)
    own = _own_clients(raw)
    inputs, outputs = [count_of(raw["isl"])] * 4 * own, [count_of(raw["osl"])] * 4 * own
    cached = [length - 1 for length in inputs]
    is_known = bool(raw["prefill_num_workers"])
    first_s = _alone_s(encode, inputs[0]) if is_known else measured_first_s
    gap_s = 0.0
    for _ in range(ROUNDS if is_known else 1):
        times, _ = closed_loop(decode, own, inputs, outputs, cached, path_s=first_s)
        gap_s = float(np.mean(times.tpot_s))
        if is_known:  # requests arrive at the encoding groups as often as they end
            rate = num_clients / (first_s + outputs[0] * gap_s) / count_of(raw["prefill_num_workers"])
            most = 0.98 / _alone_s(encode, inputs[0])
            waits = open_loop(encode, min(rate, most), (inputs[0], 1), [0] * 400, seed=0)
            first_s = float(np.mean(waits.ttft_s))
            if rate > most:  # the encoding groups are full, and all other clients wait for them
                first_s = max(first_s, num_clients / (most * count_of(raw["prefill_num_workers"])) - outputs[0] * gap_s)
    return {"TPOT": gap_s, "TTFT": first_s} if is_known else {"TPOT": gap_s}


def _clients(raw: dict[str, str]) -> int:
    stated = re.search(r"silicon_concurrency=(\d+)", raw["silicon_data_source"])
    return int(stated[1]) if stated else count_of(raw["decode_num_workers"]) * count_of(raw["decode_batch_size"])


def _own_clients(raw: dict[str, str]) -> int:
    return max(1, round(_clients(raw) / count_of(raw["decode_num_workers"])))


def _alone_s(encode: Served, length: int) -> float:
    return float(np.mean(closed_loop(encode, 1, [length] * 3, [1] * 3)[0].ttft_s))
