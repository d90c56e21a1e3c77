"""Read the settings of a deployment from a `vllm serve` command. Flags that change speed or memory in a way that xgpt
does not score are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from xgpt.comparing.current import CurrentEngine, vllm_drafts
from xgpt.comparing.flags import (
    CAPTURED,
    DRAFTS,
    DTYPES,
    NO_TABLES,
    SCHEDULE,
    TRANSFER,
    VARIABLE,
    FlagTable,
    Given,
    count,
    share,
    tables,
    types_of,
    value_of,
)  # fmt: skip
from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec

_MEMORY = "xgpt computes the memory for K/V from --gpu-memory-utilization"
_STATES = (
    "xgpt scores the states of linear layers in float32, and the inputs of their convolutions in the model's dtype"
)
_COPIES = "xgpt assumes that experts are equally busy, and each on one device"
_STREAM = "it sends tokens in groups, and xgpt does not score the gaps between groups"
_REJECTS = "vLLM rejects requests beyond this number, which xgpt does not score"
_KERNELS = "xgpt has step times only for the kernels that vLLM chooses by default"
_COMPILED = "xgpt has step times only for vLLM's own compilation settings"
_MODEL = "it changes the model: give its config.json as `config`"
_GENERATES = "xgpt scores only models that generate tokens"
_OFFLOAD = "xgpt has no step times for weights in the host's memory"
_ADAPTERS = "xgpt has no step times with adapters"
_CONTEXT = "xgpt does not score attention that is divided by context"

_REFUSED: dict[str, dict[str, list[str]]] = {
    NO_TABLES: {
        "calculate-kv-scales": ["no"],
        "enable-lora-bias": ["no"],
        "additional-config": ["{}"],
        "diffusion-config": [],
        "enable-batch-sharded-sampling": [],
        "enable-hc-sp": ["no"],
        "enable-layerwise-nvtx-tracing": ["no"],
        "enable-trace-replay": ["no"],
        "engram-config": [],
        "kv-cache-dtype-skip-layers": [],
        "kv-sharing-fast-prefill": ["no"],
        "logits-processors": [],
        "model-impl": ["auto", "vllm"],
        "profiler-config": [],
        "use-fp64-gumbel": ["no"],
        "worker-cls": ["auto"],
    },
    _KERNELS: {
        "all2all-backend": ["allgather_reducescatter"],
        "attention-backend": [],
        "attention-config": [],
        "disable-custom-all-reduce": ["no"],
        "enable-flashinfer-autotune": ["yes"],
        "ir-op-priority": [],
        "kernel-config": [],
        "linear-backend": ["auto"],
        "moe-backend": ["auto"],
        "sparse-indexer-topk-backend": ["auto"],
    },
    _COMPILED: {
        "compilation-config": ['{"cudagraph_mode": "FULL_AND_PIECEWISE"}', '{"mode": 3}', "3"],
        "cudagraph-capture-sizes": [],
        "dbo-decode-token-threshold": ["32"],
        "dbo-prefill-token-threshold": ["512"],
        "enable-dbo": ["no"],
        "max-cudagraph-capture-size": [],
        "optimization-level": ["2", "3"],
        "performance-mode": ["balanced"],
        "ubatch-size": ["0"],
    },
    _MODEL: {"hf-overrides": ["{}"], "model-class-overrides": [], "quantization-config": []},
    _GENERATES: {"convert": ["auto", "none"], "runner": ["auto", "generate"]},
    _OFFLOAD: {"cpu-offload-gb": ["0"], "cpu-offload-params": [], "offload-group-size": ["0"], "offload-params": []},
    _ADAPTERS: {"default-mm-loras": [], "enable-lora": ["no"], "lora-modules": []},
    _CONTEXT: {"decode-context-parallel-size": ["1"], "prefill-context-parallel-size": ["1"]},
    SCHEDULE: {
        "long-prefill-token-threshold": ["0"],
        "long-prefill-token-threshold-adaptive": ["no"],
        "max-num-active-seqs": [],
        "max-num-scheduled-tokens": [],
        "max-long-partial-prefills": ["1"],
        "max-num-partial-prefills": ["1"],
        "num-scheduler-steps": ["1"],
        "scheduler-delay-factor": ["0", "0.0"],
        "prefill-schedule-interval": ["1"],
        "scheduler-cls": [],
        "scheduler-reserve-full-isl": ["yes"],
        "scheduling-policy": ["fcfs"],
        "watermark": ["0", "0.0"],
        "watermark-config": [],
    },
    _STATES: {"mamba-cache-dtype": ["auto"], "mamba-ssm-cache-dtype": ["auto", "float32"]},
    _COPIES: {"enable-eplb": ["no"]},
    _STREAM: {"stream-interval": ["1"]},
    _REJECTS: {"max-num-queued-reqs": [], "max-num-queued-tokens": []},
    _MEMORY: {"kv-cache-memory-bytes": [], "num-gpu-blocks-override": []},
    CAPTURED: {"cuda-graph-sizes": [], "max-seq-len-to-capture": []},
    DRAFTS: {"num-lookahead-slots": ["0"]},
    TRANSFER: {"ec-transfer-config": [], "kv-offloading-size": [], "kv-transfer-config": []},
}

REFUSED = {name: (why, tuple(neutral)) for why, flags in _REFUSED.items() for name, neutral in flags.items()}
"""For each such flag, the reason and the values without effect ("yes" or "no" for a switch)."""

NEUTRAL_PARTS: dict[str, dict[str, tuple[object, ...]]] = {
    "compilation-config": {"mode": (3, "3"), "level": (3, "3"), "cudagraph_mode": ("FULL_AND_PIECEWISE",)},
    "hf-overrides": {
        **dict.fromkeys(("max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"), ()),
        "num_nextn_predict_layers": (),  # only drafts use them
    },
}
"""Fields of JSON values, with the values that change neither speed nor memory; () means all values. (--max-model-len
sets the context length.)
"""


DEFAULTS = ((160, 1024, 16384), (70, 1024, 8192), (0, 256, 2048))
"""Defaults of vLLM's server: (smallest device memory in GiB, requests, tokens in a step)."""
A100_LIMIT = 160
"""An A100 with less memory than this, in GiB, has the smallest defaults."""
CPU_DEFAULTS = (128, 2048)
"""Defaults on a CPU for each device of a replica: (requests, tokens in a step)."""
BLOCK_SIZE = 16
EIGHT_BIT_KV = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")
EIGHT_BIT_WEIGHTS = ("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt")
STORED = (
    "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "compressed-tensors", "mxfp4",
    "gpt_oss_mxfp4", "modelopt_fp4", "modelopt_mixed", "quark", "deepseek_v4_fp8",
)  # fmt: skip
"""Names of quantisations that a checkpoint's config also states."""
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
    for name, value in given.items():
        value = _as_json(name, value)
        why, neutral = REFUSED.get(name, ("", ()))
        if why and value not in neutral and value != "{}":
            raise InputError(f"current: --{name}", value, f"{why}; leave the flag out to compare without it")
    on_gpu = cluster.device.type == "gpu"
    if on_gpu and given.get("enforce-eager") == "yes":
        raise InputError("current", "--enforce-eager", f"{CAPTURED}; leave the flag out to compare without it")
    stages = value_of(given, "pipeline-parallel-size", count, 1)
    degree = value_of(given, "tensor-parallel-size", count, 1)
    replicas = value_of(given, "data-parallel-size", count, 1)
    default_seqs, default_tokens = _defaults(cluster, degree * stages)
    tokens = value_of(given, "max-num-batched-tokens", _whole, default_tokens)
    seqs = value_of(given, "max-num-seqs", count, min(default_seqs, tokens))
    if seqs > tokens:
        accepted = f"vLLM requires at least the value of --max-num-seqs, {seqs}: raise it, or lower --max-num-seqs"
        raise InputError("current: --max-num-batched-tokens", tokens, accepted)
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
    ]
    if given.get("enable-prefix-caching") != "no":
        notes.append("prefix caching: no hits are counted, since the workload contains only lengths")
    if (size := value_of(given, "block-size", count, BLOCK_SIZE)) != BLOCK_SIZE:
        notes.append(f"block-size {size}: xgpt scores K/V in blocks of {BLOCK_SIZE} tokens")
    _check_quantization(value_of(given, "quantization", str, None))
    dtype, kv_dtype, quantization = types_of(given, DTYPES, EIGHT_BIT_KV, EIGHT_BIT_WEIGHTS)
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
        schedules_ahead={"yes": True, "no": False}.get(given.get("async-scheduling", "")),
        api_servers=int(servers) if servers.isdecimal() and int(servers) else None,
    )


PLANNED = {
    "tensor-parallel-size", "pipeline-parallel-size", "enable-expert-parallel",
    "max-num-batched-tokens", "max-num-seqs", "gpu-memory-utilization", "quantization", "kv-cache-dtype",
    "async-scheduling", "speculative-config", "api-server-count", "block-size", "enable-chunked-prefill",
    "spec-method", "spec-model", "spec-tokens", "nnodes", "node-rank", "master-addr", "master-port", "headless",
    "model",
}  # fmt: skip
"""Options that a plan's command sets itself, or that depend on the plan's placement."""


def _kept(given: Given) -> Given:
    """Return the options that a plan's command repeats, such as --max-model-len."""
    return {name: given[name] for name in given if name not in PLANNED and not name.startswith("data-parallel-")}


def _as_json(name: str, text: str) -> str:
    """Return a JSON value in a normal form, without fields that have no effect. Return other text unchanged."""
    if not text.startswith("{"):
        return text
    try:
        return json.dumps(_without_neutral(read_json(text), NEUTRAL_PARTS.get(name, {})), sort_keys=True)
    except ValueError:
        return text


def _without_neutral(value: dict[str, object], neutral: Mapping[str, tuple[object, ...]]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, part in value.items():
        if name in neutral and (not neutral[name] or part in neutral[name]):
            continue
        inner = _without_neutral(part, neutral) if neutral and isinstance(part, dict) else part
        if inner != {} or part == {}:
            kept[name] = inner
    return kept


def _whole(text: str) -> int:
    """Return the number in text such as 8192, 8k (8,000), 8K (8,192) or 1.5k."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in MULTIPLES else (text, "")
    if unit and unit.islower() and re.fullmatch(r"\d+\.\d+", number):
        return int(float(number) * MULTIPLES[unit])
    return count(number) * (MULTIPLES[unit] if unit else 1)


def _length(text: str) -> int | None:
    return None if text in ("-1", "auto") else _whole(text)


def _check_quantization(weights: str | None) -> None:
    if weights is not None and weights not in (*EIGHT_BIT_WEIGHTS, *STORED):
        scored = f"xgpt scores only {', '.join((*EIGHT_BIT_WEIGHTS, *STORED))}"
        why = NO_TABLES if weights in tables()["quantizations"] else "vLLM has no such method"
        raise InputError("current: --quantization", weights, f"{why}; {scored}")


def _defaults(cluster: ClusterSpec, replica_devices: int) -> tuple[int, int]:
    """Return the defaults of vLLM's server: (max_num_seqs, max_num_batched_tokens)."""
    device = cluster.device
    if device.type == "cpu":
        return CPU_DEFAULTS[0] * replica_devices, CPU_DEFAULTS[1] * replica_devices
    is_a100 = "a100" in device.name.lower()
    gibibytes = device.memory_bytes / 2**30
    for least, seqs, tokens in DEFAULTS:
        if gibibytes >= least and not (is_a100 and 0 < least < A100_LIMIT):
            return seqs, tokens
    raise AssertionError("the last entry must have no least memory")
