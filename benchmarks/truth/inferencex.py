"""State how InferenceX started the engines of the rows with experts in AIConfigurator's wheel.

The settings are those of its scripts on the day of each row (SemiAnalysisAI/InferenceX, Apache-2.0: `benchmarks/`, at
79a42e20a of 2026-03-28 and 41ed82dc1 of 2026-04-21, unless said otherwise). Lengths are drawn from 80% to 100% of the
stated length, with ten requests for each client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from xgpt.core.schema import DType

Changes = tuple[tuple[str, Any], ...]
VLLM_GRAPHS = 2048
"""Largest batch that vLLM captures with the scripts for gpt-oss and, since April 2026, for MiniMax."""
APRIL = "2026-04-01"
"""From this day on, the settings for MiniMax on B200 differ (pull request 947)."""
EP_CHOSEN = "2025-11-03"
"""First day on which scripts of TensorRT-LLM took the parts of experts from a row's configuration. Earlier scripts gave
each device whole experts (`--ep_size=$TP`), except for gpt-oss on B200."""
BLACKWELL = ("b200_sxm", "b300_sxm")
FLASHINFER = "0.24"
"""Version of vLLM whose tables on Blackwell were measured with FlashInfer's kernels. The scripts for MiniMax on B200
did not use these until April 2026. Earlier tables were measured with Triton's kernels."""


@dataclass(frozen=True)
class Started:
    """The settings of a row's engine.

    Attributes:
        ep: number of parts into which the devices divide the experts.
        token_budget: largest number of tokens in a step.
        changes: the settings that differ from the engine's defaults.
    """

    ep: int
    token_budget: int
    kv_dtype: DType | None
    changes: Changes


def started(raw: dict[str, str], model: str, tp: int, ep: int) -> Started:
    """Return the settings with which the engine of a row was started.

    Args:
        ep: the parts that the row states. If a script ignored them and gave each device whole experts, the result does
            the same.
    """
    found = re.search(r"measured=(\d{4}-\d\d-\d\d)", raw["silicon_data_source"])
    day, is_blackwell = found[1] if found else "", raw["system"] in BLACKWELL
    if raw["backend"] == "trtllm":
        return _of_trtllm(raw, model, tp, ep, day)
    if raw["backend"] == "sglang":
        return _of_sglang(raw, model, tp, ep)
    version = re.match(r"\d+\.\d+\.\d+", raw["backend_version"])
    changes: dict[str, Any] = {"version": version[0]} if version else {}
    if model == "gpt-oss-120b":
        changes |= {"captured_tokens": VLLM_GRAPHS, "rounds_activations": is_blackwell}
        return Started(ep, 8192, "float8" if is_blackwell else None, tuple(changes.items()))
    if model == "kimi-k2.5":
        return _of_kimi(raw, ep, day, changes)
    if is_blackwell and (day >= APRIL or raw["moe_quant_mode"] == "nvfp4"):
        changes |= {"version": FLASHINFER, "captured_tokens": VLLM_GRAPHS, "block_size": 32}
        return Started(ep, 2 * int(raw["isl"]), "float8", tuple(changes.items()))
    if raw["system"] == "h100_sxm":
        return Started(ep, 8192, None, tuple(changes.items()))
    changes |= {"memory_share": 0.95} | ({"block_size": 32} if is_blackwell else {})
    return Started(tp, 8192, None, tuple(changes.items()))  # --enable-expert-parallel, whatever the row's EP_SIZE


def _of_kimi(raw: dict[str, str], ep: int, day: str, changes: dict[str, Any]) -> Started:
    if raw["moe_quant_mode"] != "nvfp4":
        return Started(ep, 8192, None, tuple((changes | {"memory_share": 0.95}).items()))
    if raw["system"] == "b200_sxm" and day >= APRIL:
        return Started(ep, 2 * int(raw["isl"]), "float8", tuple((changes | {"captured_tokens": VLLM_GRAPHS}).items()))
    return Started(ep, 8192, "float8", tuple(changes.items()))  # the checkpoint asks for K/V in eight bits


def _of_sglang(raw: dict[str, str], model: str, tp: int, ep: int) -> Started:
    """Return the settings of SGLang's scripts since November 2025. On Blackwell, nearly all let the engine check for
    new requests only once in ten decode steps, or in thirty with 16 or more clients (--scheduler-recv-interval)."""
    is_hopper, stored = raw["system"] not in BLACKWELL, raw["moe_quant_mode"]
    seldom = 30 if int(float(raw["batch_size"])) >= 16 else 10
    budget, receives, kv_dtype = 32768, seldom, cast("DType | None", "float8")
    if model == "glm-5":
        budget, receives = 8192 if is_hopper else 32768, 10 if stored == "nvfp4" else 1
        kv_dtype = None if is_hopper else kv_dtype
    elif model.startswith("qwen3.5"):
        if is_hopper or (raw["system"] == "b300_sxm" and stored == "fp8_block"):
            budget, receives = 16384, 1 if is_hopper else 10
        kv_dtype = None if not stored else kv_dtype
    elif is_hopper:
        receives, kv_dtype = 1, None
    elif stored == "nvfp4":
        budget = 16384
    elif tp == 4:
        budget, receives = 8192, 10
    version = re.match(r"\d+\.\d+\.\d+", raw["backend_version"])
    named = (("version", version[0]),) if version else ()
    # --disable-radix-cache: no states of prefixes are kept.
    return Started(ep, budget, kv_dtype, (*named, ("receive_steps", receives), ("state_copies", 1)))


def _of_trtllm(raw: dict[str, str], model: str, tp: int, ep: int, day: str) -> Started:
    clients = int(float(raw["batch_size"]))
    is_hopper = raw["system"] == "h200_sxm"
    if model != "gpt-oss-120b":  # DeepSeek, 2025-11-02 (e06929c70): one prompt and a decode of each client
        budget = -(-(clients + int(raw["isl"]) + 64) // 64) * 64
        kept = (("memory_share", 0.75 if is_hopper else 0.8), ("captured_tokens", 128 if is_hopper else 256))
        return Started(tp if day < EP_CHOSEN else ep, budget, "float8", kept)
    changes = (("memory_share", 0.85), ("captured_tokens", clients))
    return Started(tp if is_hopper and day < EP_CHOSEN else ep, 20000, None if is_hopper else "float8", changes)
