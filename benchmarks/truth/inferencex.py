"""How InferenceX started the engines whose rows stand in AIConfigurator's wheel, models with experts alone.

Read off its own scripts at the day of each row (SemiAnalysisAI/InferenceX, Apache-2.0: `benchmarks/`, at 79a42e20a of
2026-03-28 and 41ed82dc1 of 2026-04-21, unless said otherwise). Lengths are drawn from 80% to 100% of what is stated,
ten requests a client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from xgpt.core.schema import DType

Changes = tuple[tuple[str, Any], ...]
VLLM_GRAPHS = 2048
"""Largest captured batch that the scripts of gpt-oss and, since April 2026, of MiniMax ask vLLM for."""
APRIL = "2026-04-01"
"""MiniMax on B200: from the first script of this month on, settings are others (pull request 947)."""
EP_CHOSEN = "2025-11-03"
"""First day on which scripts of TensorRT-LLM took the parts of experts from a row's configuration; before it they gave
each device whole experts (`--ep_size=$TP`), but those of gpt-oss on B200."""
FLASHINFER = "0.24"
"""Version of vLLM whose tables on Blackwell are those of FlashInfer's kernels, which MiniMax's scripts of B200 turned
off until April 2026; earlier tables are Triton's."""


@dataclass(frozen=True)
class Started:
    """What a row's engine was told.

    Attributes:
        ep: parts into which the devices divide the experts.
        token_budget: tokens of a step at most.
        changes: what was set otherwise than the engine does by itself.
    """

    ep: int
    token_budget: int
    kv_dtype: DType | None
    changes: Changes


def started(raw: dict[str, str], model: str, tp: int, ep: int) -> Started:
    """Return how the engine of a row was started.

    Args:
        ep: what the row says. Where a script gave each device whole experts whatever that said, it does here, too.
    """
    found = re.search(r"measured=(\d{4}-\d\d-\d\d)", raw["silicon_data_source"])
    day, is_blackwell = found[1] if found else "", raw["system"] == "b200_sxm"
    if raw["backend"] == "trtllm":
        return _of_trtllm(raw, model, tp, ep, day)
    version = re.match(r"\d+\.\d+\.\d+", raw["backend_version"])
    changes: dict[str, Any] = {"version": version[0]} if version else {}
    if model == "gpt-oss-120b":
        changes |= {"captured_tokens": VLLM_GRAPHS, "rounds_activations": is_blackwell}
        return Started(ep, 8192, "float8" if is_blackwell else None, tuple(changes.items()))
    if is_blackwell and day >= APRIL:
        changes |= {"version": FLASHINFER, "captured_tokens": VLLM_GRAPHS, "block_size": 32}
        return Started(ep, 2 * int(raw["isl"]), "float8", tuple(changes.items()))
    if raw["system"] == "h100_sxm":
        return Started(ep, 8192, None, tuple(changes.items()))
    changes |= {"memory_share": 0.95} | ({"block_size": 32} if is_blackwell else {})
    return Started(tp, 8192, None, tuple(changes.items()))  # --enable-expert-parallel, whatever the row's own EP_SIZE


def _of_trtllm(raw: dict[str, str], model: str, tp: int, ep: int, day: str) -> Started:
    clients = int(float(raw["batch_size"]))
    is_hopper = raw["system"] == "h200_sxm"
    if model != "gpt-oss-120b":  # DeepSeek, 2025-11-02 (e06929c70): room for one prompt and a decode of each client
        budget = -(-(clients + int(raw["isl"]) + 64) // 64) * 64
        kept = (("memory_share", 0.75 if is_hopper else 0.8), ("captured_tokens", 128 if is_hopper else 256))
        return Started(tp if day < EP_CHOSEN else ep, budget, "float8", kept)
    changes = (("memory_share", 0.85), ("captured_tokens", clients))
    return Started(tp if is_hopper and day < EP_CHOSEN else ep, 20000, None if is_hopper else "float8", changes)
