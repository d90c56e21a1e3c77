"""Read measurements of served models with experts from AIConfigurator's wheel.

Rows of InferenceX are predicted with the settings of its scripts (`inferencex`). The sources do not state the routing
to experts, so the assumption of the tables' makers is used. Some rows are counted but not predicted: those that may use
speculative decoding, those of TensorRT-LLM with attention by data, those on several machines, and those whose degrees
of experts do not match their number of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.truth.inferencex import BLACKWELL, Started, started
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
)

MODELS: dict[str, tuple[str, Stored | None]] = {
    "MiniMaxAI/MiniMax-M2.5": ("minimax-m2", None),
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", "fp8_block"),
    "openai/gpt-oss-120b": ("gpt-oss-120b", None),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", None),
    "deepseek-ai/DeepSeek-R1": ("deepseek-v3", None),
    "moonshotai/Kimi-K2.5": ("kimi-k2.5", None),
    "Qwen/Qwen3.5-397B-A17B": ("qwen3.5-397b-a17b", None),
    "zhipuai/GLM-5": ("glm-5", None),
}
"""Each model as served, and the format of its weights if it is not the model's own."""
LAUNCHES_FITTED = ("gpt-oss-120b", "kimi-k2.5")
"""Models to whose rows vLLM's time of a launch was fitted."""
NVFP4: dict[str, Stored] = {
    "kimi-k2.5": "nvfp4_experts",
    "minimax-m2": "nvfp4_ffn",
    "deepseek-v3": "nvfp4_ffn",
    "glm-5": "nvfp4_ffn",
    "qwen3.5-397b-a17b": "nvfp4_experts",
}
"""The format of NVIDIA's 4-bit checkpoints (`exclude_modules` of their hf_quant_config.json)."""
TRTLLM_SPECULATES, SGLANG_SPECULATES, LAST_DAY = "2026-01-14", "2026-02-05", "9999"
"""First days of the scripts for DeepSeek with multi-token prediction."""
BY_DATA = re.compile(r"config_id=(707|727);")
"""Configurations of MiniMax in four bits in vLLM that InferenceX ran with attention by data (`dp-attn: true`, and a
script that reads it). The wheel states attention by data for all rows of vLLM with divided experts.
"""
DEVICES = 8
"""Number of devices of a machine. If a row with whole experts on each device has more, the same devices are counted
twice, for slices and for parts of the experts."""
ENGINES = {"vllm": "vllm-0.15", "trtllm": "tensorrt-llm-1.0", "sglang": "sglang-0.5"}


def served_rows(path: Path) -> Iterator[Row]:
    """Yield rows of clients in a closed loop, as for dense models. gpt-oss is listed as nvfp4, but served in its own
    mxfp4."""
    raws = [raw for raw in read(path) if raw["model_path"] in MODELS and raw["mode"] == "agg"]
    for raw in map(with_all_clients, raws):
        name, _ = MODELS[raw["model_path"]]
        stored = stored_in(raw)
        backend, clients = raw["backend"], count_of(raw["batch_size"])
        tp, slices, ep = degrees_of(raw)
        measured = {"TPOT": float(raw["silicon_tpot_ms"]) / 1e3, "TTFT": float(raw["silicon_ttft_ms"]) / 1e3}
        source = "silicon, DeepSeek" if name.startswith("deepseek") else "silicon, experts"
        group = f"{name} {raw['moe_quant_mode'] or 'bfloat16'} {raw['system']} {backend}"
        is_fitted = backend == "vllm" and name in LAUNCHES_FITTED
        row = Row(source, group, is_fitted, measured, note=raw["id"])
        if (why_not := _why_not(raw, name, tp, slices, ep)) is not None:
            yield replace(row, why_not=why_not)
            continue
        cluster, by_data = CLUSTERS[raw["system"]], BY_DATA.search(raw["silicon_data_source"]) is not None
        how = Started(ep, budget_of(raw), None, of_backend(raw)) if is_aligned(raw) else started(raw, name, tp, ep)
        served = Served(
            name,
            f"{cluster}/{tp}" if by_data else cluster,
            "bfloat16",
            1 if by_data else tp,
            ENGINES[backend],
            clients,
            how.token_budget,
            imported=not by_data,
            changes=how.changes,
            ep=how.ep,
            stored=stored,
            kv_dtype=how.kv_dtype,
            skew=skew_of(name),
        )
        yield of_clients(row, served, raw, "attention by data" if by_data else "closed loop")


def with_all_clients(raw: dict[str, str]) -> dict[str, str]:
    """Return the row with the number of clients of one replica: where the wheel states attention by data in error, it
    has divided them.
    """
    stated = re.search(r"silicon_concurrency=(\d+)", raw["silicon_data_source"])
    if raw["backend"] != "vllm" or stated is None or BY_DATA.search(raw["silicon_data_source"]):
        return raw
    return raw | {"batch_size": stated[1]}


def stored_in(raw: dict[str, str]) -> Stored | None:
    name, stored = MODELS[raw["model_path"]]
    if raw["moe_quant_mode"] == "nvfp4":
        return NVFP4.get(name, stored)
    return "fp8_block" if raw["moe_quant_mode"] == "fp8_block" and stored is None else stored


def degrees_of(raw: dict[str, str], lane: str = "") -> tuple[int, int, int]:
    """Return a row's number of devices, and the numbers of slices and of parts into which these divide the experts."""
    tp, slices, ep = (count_of(raw[f"{lane}{column}"]) for column in ("tp_size", "moe_tp_size", "moe_ep_size"))
    if raw["backend"] == "vllm" and ep == tp * count_of(raw[f"{lane}attention_dp_size"]):
        return tp, 1, tp
    if tp > DEVICES and slices == ep and tp == slices * ep:
        return slices, 1, ep
    return tp, slices, ep


def may_speculate(raw: dict[str, str], tp: int, ep: int) -> bool:
    """Return whether InferenceX ran this configuration with multi-token prediction on that day, even if it also ran
    without.

    Sources: its `.github/configs/nvidia-master.yaml`, and the first day of each script with `mtp` in its name.
    """
    found = re.search(r"measured=(\d{4}-\d\d-\d\d)", raw["silicon_data_source"])
    day = found[1] if found else LAST_DAY
    if MODELS[raw["model_path"]][0] == "deepseek-v3":
        if raw["backend"] == "trtllm":
            return day >= TRTLLM_SPECULATES and not is_aligned(raw)
        return raw["moe_quant_mode"] == "fp8_block" and raw["system"] in BLACKWELL and day >= SGLANG_SPECULATES
    is_qwen = raw["model_path"].startswith("Qwen/Qwen3.5") and raw["moe_quant_mode"] == "fp8_block"
    return is_qwen and raw["system"] == "b200_sxm" and (tp, ep) == (4, 1)


def _why_not(raw: dict[str, str], name: str, tp: int, slices: int, ep: int) -> str | None:
    if raw["system"] not in CLUSTERS:
        return f"no times of {raw['system']}"
    if count_of(raw["attention_dp_size"]) > 1 and raw["backend"] != "vllm":
        return "attention by data in TensorRT-LLM, which is not modelled"
    if tp > DEVICES:
        return "several machines"
    if may_speculate(raw, tp, ep):
        return "it may speculate, several tokens a step: its script has a twin that does, and the wheel does not tell"
    if tp != slices * ep:
        return "degrees of experts do not make up the devices"
    return None
