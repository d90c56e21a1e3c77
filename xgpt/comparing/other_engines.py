"""Read the settings of a deployment from a command of SGLang or TensorRT-LLM."""

from __future__ import annotations

from xgpt.comparing.current import CurrentEngine, sglang_drafts
from xgpt.comparing.flags import DTYPES, FlagTable, Given, count, judge, share, tables, types_of, value_of
from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec

SGLANG = FlagTable.of("sglang", "SGLang")
TENSORRT_LLM = FlagTable.of("tensorrt-llm", "TensorRT-LLM", abbreviates=False)
SGLANG_CHUNKS = ((160, 16384), (60, 8192), (35, 4096), (0, 2048))
"""Defaults of --chunked-prefill-size: (smallest device memory in GiB, tokens)."""
SGLANG_REQUESTS = 2048
"""Default of --max-running-requests. K/V memory limits the number further."""
SGLANG_STATES = 3
"""States of recurrent layers that a request takes if states of prefixes are kept. With extra_buffer, the default if the
overlap schedule is on, it takes one or two more (MAMBA_CACHE_V2_ADDITIONAL_RATIO).
"""
SGLANG_DRAFTING = 48
"""The same default with --speculative-algorithm (server_args.py)."""
TENSORRT_REQUESTS, TENSORRT_TOKENS = 2048, 8192
"""Defaults of --max_batch_size and --max_num_tokens."""


def read_sglang(words: list[str], cluster: ClusterSpec) -> CurrentEngine:
    """Return the deployment that `python -m sglang.launch_server` starts with these words.

    Raises:
        InputError: SGLang does not know a flag or its value, or xgpt does not score the flag's effect.
    """
    given, free = SGLANG.read(words)
    if "config" in given:
        given = SGLANG.read_config(given.pop("config")) | given
    caches = given.get("disable-radix-cache") != "yes"
    states = given.get("mamba-radix-cache-strategy") or given.get("mamba-scheduler-strategy")
    waits = given.get("disable-overlap-schedule") == "yes" or (caches and states == "no_buffer")
    buffers = (1 if waits else 2) if states == "extra_buffer" or not waits else 0
    notes = judge(given, "sglang")
    gibibytes = cluster.device.memory_bytes / 2**30
    chunk = next(tokens for least, tokens in SGLANG_CHUNKS if gibibytes >= least)
    tokens = value_of(given, "chunked-prefill-size", count, chunk)
    drafts = sglang_drafts(given)
    most = SGLANG_REQUESTS if drafts is None else SGLANG_DRAFTING
    requests = value_of(given, "max-running-requests", count, most)
    if "chunked-prefill-size" not in given:
        notes.append(f"chunked-prefill-size {tokens}: SGLang's default on this device")
    if "max-running-requests" not in given:
        notes.append(f"max-running-requests {requests}: SGLang's default, further limited by K/V memory")
    if (largest := value_of(given, "cuda-graph-max-bs", count, requests)) < requests:
        notes.append(f"cuda-graph-max-bs {largest}: steps with more requests are scored as if they were captured, too")
    dtype, kv_dtype, quantization = types_of(given, "sglang", DTYPES | {"bf16": "bfloat16"})
    degree, replicas, experts = (value_of(given, f"{kind}-size", count, 1) for kind in ("tp", "dp", "ep"))
    if experts not in (1, degree):
        if degree % experts:
            raise InputError("current: --ep-size", experts, f"give one that divides {degree}")
        near = degree if experts * experts >= degree else 1
        notes.append(f"ep-size {experts}: scored as {near}, the nearest way to divide experts whose times are known")
        experts = near
    if given.get("enable-dp-attention") == "yes" and replicas > 1:  # several replicas of attention share these devices
        if degree % replicas:
            raise InputError("current: --enable-dp-attention", f"--dp {replicas}", f"give a --dp that divides {degree}")
        if experts != degree:
            notes.append(f"enable-dp-attention: each expert is scored as if it were whole on a device (--ep {degree})")
            experts = degree
        # SGLang divides the numbers of tokens and requests among these replicas.
        degree, tokens, requests = degree // replicas, tokens // replicas, requests // replicas
    return CurrentEngine(
        tp_degree=degree,
        num_stages=value_of(given, "pp-size", count, 1),
        replicas=replicas,
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
        state_copies=SGLANG_STATES + buffers if caches else 1,
        schedules_ahead=False if waits else None,
        mixes=True if given.get("enable-mixed-chunk") == "yes" and drafts is None else None,
        caches_prompts=caches,
        model=given.get("model-path") or next(iter(free), None),
        shortens=True,
        kept=_kept(given),
        drafts=drafts,
    )


def read_tensorrt_llm(words: list[str], cluster: ClusterSpec) -> CurrentEngine:
    """Return the deployment that `trtllm-serve` starts with these words.

    Raises:
        InputError: TensorRT-LLM does not know an option or its value, or xgpt does not score the option's effect.
    """
    given, free = TENSORRT_LLM.read(words)
    judge(given, "tensorrt-llm")
    requests = value_of(given, "max-batch-size", count, TENSORRT_REQUESTS)
    tokens = value_of(given, "max-num-tokens", count, TENSORRT_TOKENS)
    notes = [
        f"{name} {value}: TensorRT-LLM's default"
        for name, value in (("max_batch_size", requests), ("max_num_tokens", tokens))
        if name.replace("_", "-") not in given
    ]
    return CurrentEngine(
        tp_degree=value_of(given, "tensor-parallel-size", count, 1),
        num_stages=value_of(given, "pipeline-parallel-size", count, 1),
        replicas=1,
        ep_degree=value_of(given, "moe-expert-parallel-size", count, 1),
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        usable_memory=value_of(given, "kv-cache-free-gpu-memory-fraction", share, None),
        max_model_len=value_of(given, "max-seq-len", count, None),
        shortens=True,
        notes=(*notes, "data types: assumed to be the checkpoint's"),
        framework="tensorrt-llm",
        model=next(iter(free), None),
        kept=_kept(given),
    )


def _kept(given: Given) -> Given:
    """Return the options that a plan's command repeats: all that neither the plan decides nor its placement."""
    planned = tables()["planned_of_others"]
    return {name: value for name, value in given.items() if name not in planned and not name.startswith("speculative-")}
