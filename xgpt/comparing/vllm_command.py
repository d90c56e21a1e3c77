"""Read the settings of a deployment from a `vllm serve` command. Flags that change speed or memory in a way that xgpt
does not score are errors.
"""

from __future__ import annotations

import re
from math import inf

from xgpt.comparing.current import CurrentEngine, vllm_drafts
from xgpt.comparing.flags import (
    CAPTURED,
    DTYPES,
    NO_TABLES,
    VARIABLE,
    FlagTable,
    Given,
    count,
    judge,
    parts_of,
    share,
    tables,
    types_of,
    value_of,
)
from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec

DEFAULTS = ((160, 1024, 16384), (70, 1024, 8192), (0, 256, 2048))
"""Defaults of vLLM's server: (smallest device memory in GiB, requests, tokens in a step)."""
A100_LIMIT = 160
"""An A100 with less memory than this, in GiB, has the smallest defaults."""
CPU_DEFAULTS = (128, 2048)
"""Defaults on a CPU for each device of a replica: (requests, tokens in a step)."""
BLOCK_SIZE = 16
MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

TABLE = FlagTable.of("vllm", "vLLM")


def read_vllm(words: list[str], cluster: ClusterSpec) -> CurrentEngine:
    """Return the deployment that `vllm serve` starts with these words.

    Raises:
        InputError: vLLM does not know a flag or its value, or xgpt does not score the flag's effect.
    """
    if "--omni" in words:
        accepted = (
            "vLLM-Omni serves images, sound or video, which xgpt does not score: leave the flag out, or give a text "
            "deployment"
        )
        raise InputError("current", "--omni", accepted)
    given, free = TABLE.read(words)
    if "config" in given:
        path = value_of(given, "config", str, "")
        given = TABLE.read_config(path) | {name: value for name, value in given.items() if name != "config"}
    if len(free) > 1:
        why = VARIABLE if free[1].startswith("$") else "only flags and their values may follow the model"
        raise InputError("current", free[1], why)
    judged = judge(given, "vllm")
    on_gpu = cluster.device.type == "gpu"
    if on_gpu and given.get("enforce-eager") == "yes":
        raise InputError("current", "--enforce-eager", f"{CAPTURED}; leave the flag out to compare without it")
    stages = value_of(given, "pipeline-parallel-size", count, 1)
    degree = value_of(given, "tensor-parallel-size", count, 1)
    replicas = value_of(given, "data-parallel-size", count, 1)
    more = 2 if given.get("performance-mode") == "throughput" else 1
    default_seqs, default_tokens = (more * size for size in _defaults(cluster, degree * stages))
    tokens = value_of(given, "max-num-batched-tokens", _whole, default_tokens)
    seqs = value_of(given, "max-num-seqs", count, min(default_seqs, tokens))
    if seqs > tokens:
        accepted = f"vLLM requires at least the value of --max-num-seqs, {seqs}: raise it, or lower --max-num-seqs"
        raise InputError("current: --max-num-batched-tokens", tokens, accepted)
    if on_gpu and (largest := _largest_captured(given)) < seqs:
        accepted = f"{CAPTURED}, so of --max-num-seqs requests at least: give {seqs}, or a smaller --max-num-seqs"
        raise InputError("current: --max-cudagraph-capture-size", int(largest), accepted)
    longest, cuts_prompts = value_of(given, "max-model-len", _length, None), given.get("enable-chunked-prefill") != "no"
    if not cuts_prompts and "max-num-batched-tokens" in given and tokens < (longest or 0):
        accepted = (
            f"without chunked prefill, vLLM requires at least the value of --max-model-len, {longest}: raise it, or "
            "lower --max-model-len"
        )
        raise InputError("current: --max-num-batched-tokens", tokens, accepted)
    notes = [
        f"{name} {value}: vLLM's default on this device"
        for name, value in (("max-num-seqs", seqs), ("max-num-batched-tokens", tokens))
        if name not in given
    ] + judged
    if (size := value_of(given, "block-size", count, BLOCK_SIZE)) != BLOCK_SIZE:
        notes.append(f"block-size {size}: xgpt scores K/V in blocks of {BLOCK_SIZE} tokens")
    _check_quantization(value_of(given, "quantization", str, None))
    dtype, kv_dtype, quantization = types_of(given, "vllm", DTYPES)
    if not on_gpu and dtype is None:
        notes.append("dtype: assumed to be the plans'")
    model = next(iter(free), given.get("model"))
    servers = given.get("api-server-count", str(replicas))
    return CurrentEngine(
        tp_degree=degree,
        num_stages=stages,
        replicas=replicas,
        ep_degree=degree * replicas if given.get("enable-expert-parallel") == "yes" else 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        usable_memory=value_of(given, "gpu-memory-utilization", share, None),
        max_model_len=longest,
        shortens=given.get("max-model-len") in ("-1", "auto"),
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        notes=tuple(notes),
        model=model,
        drafts=vllm_drafts(given, model),
        cuts_prompts=cuts_prompts,
        drops_windows=given.get("disable-hybrid-kv-cache-manager") != "yes",
        text_only=given.get("language-model-only") == "yes",
        kept=_kept(given if longest is None else given | {"max-model-len": str(longest)}),
        state_copies=None if (caches := _switch(given, "enable-prefix-caching")) is None else 1 + caches,
        schedules_ahead=_switch(given, "async-scheduling"),
        caches_prompts=caches is not False,
        api_servers=int(servers) if servers.isdecimal() and int(servers) else None,
    )


def _switch(given: Given, name: str) -> bool | None:
    return {"yes": True, "no": False}.get(given.get(name, ""))


def _kept(given: Given) -> Given:
    planned = tables()["planned"]
    return {name: given[name] for name in given if name not in planned and not name.startswith("data-parallel-")}


def _largest_captured(given: Given) -> float:
    config = parts_of(given.get("compilation-config"))
    sizes = given.get("cudagraph-capture-sizes", "").split() or config.get("cudagraph_capture_sizes", [])
    sizes = [*sizes, given.get("max-cudagraph-capture-size", config.get("max_cudagraph_capture_size"))]
    return max((int(size) for size in sizes if str(size).isdecimal()), default=inf)


def _whole(text: str) -> int:
    """Return the number in text such as 8192, 8k (8,000), 8K (8,192) or 1.5k."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in MULTIPLES else (text, "")
    if unit and unit.islower() and re.fullmatch(r"\d+\.\d+", number):
        return int(float(number) * MULTIPLES[unit])
    return count(number) * (MULTIPLES[unit] if unit else 1)


def _length(text: str) -> int | None:
    return None if text in ("-1", "auto") else _whole(text)


def _check_quantization(weights: str | None) -> None:
    known = (*tables()["eight_bit_weights"]["vllm"], *tables()["stored"])
    if weights is not None and weights not in known:
        why = NO_TABLES if weights in tables()["quantizations"] else "vLLM has no such method"
        raise InputError("current: --quantization", weights, f"{why}; xgpt scores only {', '.join(known)}")


def _defaults(cluster: ClusterSpec, replica_devices: int) -> tuple[int, int]:
    device = cluster.device
    if device.type == "cpu":
        return CPU_DEFAULTS[0] * replica_devices, CPU_DEFAULTS[1] * replica_devices
    is_a100 = "a100" in device.name.lower()
    gibibytes = device.memory_bytes / 2**30
    for least, seqs, tokens in DEFAULTS:
        if gibibytes >= least and not (is_a100 and 0 < least < A100_LIMIT):
            return seqs, tokens
    raise AssertionError("the last entry must have no least memory")
