"""Read the commands of SGLang and TensorRT-LLM as deployments that can be scored."""

from __future__ import annotations

import re

from xgpt.comparing.current import CurrentEngine
from xgpt.comparing.engine_flags import VERSIONS
from xgpt.comparing.flag_tables import aliases_of, flags_of
from xgpt.comparing.flags import FlagTable, Given, count, share, value_of
from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec, DType

SGLANG = FlagTable(f"SGLang {VERSIONS['sglang']}", flags_of("sglang"), aliases_of("sglang"))
TENSORRT_LLM = FlagTable(
    f"TensorRT-LLM {VERSIONS['tensorrt-llm']}", flags_of("tensorrt-llm"), aliases_of("tensorrt-llm"), abbreviates=False
)
DTYPES: dict[str, DType | None] = {
    "auto": None, "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32",
    "float32": "float32", "bf16": "bfloat16",
}  # fmt: skip
EIGHT_BIT_KV = ("fp8_e4m3", "fp8_e5m2", "fp8")
EIGHT_BIT_WEIGHTS = ("fp8", "w8a8_fp8", "modelopt", "modelopt_fp8")
SGLANG_CHUNKS = ((160, 16384), (60, 8192), (35, 4096), (0, 2048))
"""--chunked-prefill-size by default: (GiB of device memory from which it holds, tokens)."""
SGLANG_REQUESTS = 2048
"""Least --max-running-requests that SGLang sets by itself; K/V memory bounds it further."""
TENSORRT_REQUESTS, TENSORRT_TOKENS = 2048, 8192
"""--max_batch_size and --max_num_tokens by default."""

_DRAFTS = "how many tokens a step gives depends on the drafts that are accepted"
_TRANSFER = "traffic of K/V between engines is not scored"
_NO_TABLES = "no step times are known for it"
SGLANG_REFUSED = {
    r"speculative-.*|enable-multi-layer-eagle": _DRAFTS,
    r"disaggregation-mode": _TRANSFER,
    r"enable-dp-attention|attention-data-parallel-size|moe-data-parallel-size": "experts and attention divided among "
    "replicas are not scored",
    r"attention-context-parallel-size|decode-context-parallel-size|enable-prefill-cp": _NO_TABLES,
    r"disable-cuda-graph|disable-decode-cuda-graph|cuda-graph-max-bs": "step times are those of captured graphs",
    r"enable-torch-compile|enable-two-batch-overlap|enable-single-batch-overlap": _NO_TABLES,
    r"cpu-offload-gb|lora-paths|enable-lora": _NO_TABLES,
    r"enable-hierarchical-cache|enable-lmcache": _TRANSFER,
    r"disable-overlap-schedule": "step times are those of a loop that runs during the device's work",
    r"schedule-conservativeness|enable-priority-scheduling|max-total-tokens": "it changes which requests run together, "
    "in a way that is not scored",
    r"is-embedding": "only generation is scored",
}
"""Flags of SGLang that change speed or memory in a way that is not scored, and why."""
TENSORRT_REFUSED = {
    r"extra-llm-api-options": "its YAML may set anything: give its values as options",
    r"context-parallel-size|moe-cluster-parallel-size": _NO_TABLES,
    r"max-beam-width": "only sampling is scored",
    r"server-role|disagg-cluster-uri|metadata-server-config-file": _TRANSFER,
}


def read_sglang(words: list[str], cluster: ClusterSpec) -> CurrentEngine:
    """Return the deployment that the words after `python -m sglang.launch_server` ask for.

    Raises:
        InputError: a flag or its value is unknown to SGLang, or it changes the speed in a way that is not scored.
    """
    given, free = SGLANG.read(words)
    if "config" in given:
        given = SGLANG.read_config(given.pop("config")) | given
    _refuse(given, SGLANG_REFUSED)
    gibibytes = cluster.device.memory_bytes / 2**30
    chunk = next(tokens for least, tokens in SGLANG_CHUNKS if gibibytes >= least)
    tokens = value_of(given, "chunked-prefill-size", count, chunk)
    requests = value_of(given, "max-running-requests", count, SGLANG_REQUESTS)
    notes = []
    if "chunked-prefill-size" not in given:
        notes.append(f"chunked-prefill-size {tokens}: SGLang's default on this device")
    if "max-running-requests" not in given:
        notes.append(f"max-running-requests {requests}: SGLang's own bound, within what K/V memory holds")
    if "disable-radix-cache" not in given:
        notes.append("radix cache: no hits are counted, as the workload says lengths alone")
    dtype, kv_dtype, quantization = _dtypes(given, "kv-cache-dtype")
    degree = value_of(given, "tensor-parallel-size", count, 1)
    experts = value_of(given, "expert-parallel-size", count, 1)
    if experts not in (1, degree):
        accepted = f"experts are scored divided among all of a replica's {degree} devices, or not at all"
        raise InputError("current: --expert-parallel-size", experts, accepted)
    return CurrentEngine(
        tp_degree=degree,
        num_stages=value_of(given, "pipeline-parallel-size", count, 1),
        replicas=value_of(given, "data-parallel-size", count, 1),
        ep_degree=experts,
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        usable_memory=value_of(given, "mem-fraction-static", share, None),
        max_model_len=value_of(given, "context-length", count, None),
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        notes=tuple(notes),
        framework="sglang",
        model=given.get("model-path") or next(iter(free), None),
    )


def read_tensorrt_llm(words: list[str], cluster: ClusterSpec) -> CurrentEngine:
    """Return the deployment that the words after `trtllm-serve` ask for.

    Raises:
        InputError: an option or its value is unknown to TensorRT-LLM, or it changes the speed in a way that is not
            scored.
    """
    given, free = TENSORRT_LLM.read(words)
    _refuse(given, TENSORRT_REFUSED)
    requests = value_of(given, "max-batch-size", count, TENSORRT_REQUESTS)
    tokens = value_of(given, "max-num-tokens", count, TENSORRT_TOKENS)
    notes = [
        f"{name} {value}: TensorRT-LLM's default"
        for name, value in (("max_batch_size", requests), ("max_num_tokens", tokens))
        if name.replace("_", "-") not in given
    ]
    notes.append("types: those of the checkpoint")
    degree = value_of(given, "tensor-parallel-size", count, 1)
    return CurrentEngine(
        tp_degree=degree,
        num_stages=value_of(given, "pipeline-parallel-size", count, 1),
        replicas=1,
        ep_degree=value_of(given, "moe-expert-parallel-size", count, 1),
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        usable_memory=value_of(given, "kv-cache-free-gpu-memory-fraction", share, None),
        max_model_len=value_of(given, "max-seq-len", count, None),
        notes=tuple(notes),
        framework="tensorrt-llm",
        model=next(iter(free), None),
    )


def _refuse(given: Given, refused: dict[str, str]) -> None:
    for name, value in given.items():
        for pattern, why in refused.items():
            if re.fullmatch(pattern, name) and value != "no":
                raise InputError(f"current: --{name}", value, f"{why}; leave it out to compare without it")


def _dtypes(given: Given, kv_name: str) -> tuple[DType | None, DType | None, str | None]:
    """Return the types of weights and K/V (None: the model's), and how the checkpoint stores its weights."""
    weights = value_of(given, "quantization", str, "") or None
    kv, name = value_of(given, kv_name, str, "auto"), value_of(given, "dtype", str, "auto")
    for flag, value, known in ((kv_name, kv, (*DTYPES, *EIGHT_BIT_KV)), ("dtype", name, tuple(DTYPES))):
        if value not in known:
            raise InputError(f"current: --{flag}", value, f"known: {', '.join(known)}")
    kv_dtype: DType | None = "float8" if kv in EIGHT_BIT_KV else DTYPES[kv]
    if weights in EIGHT_BIT_WEIGHTS:
        return "float8", kv_dtype, None
    return DTYPES[name], kv_dtype, weights
