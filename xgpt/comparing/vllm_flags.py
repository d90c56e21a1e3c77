"""List the flags of `vllm serve` that change speed or memory in a way that xgpt does not score."""

from __future__ import annotations

from xgpt.comparing.flags import CAPTURED, DRAFTS, NO_TABLES, SCHEDULE, TRANSFER

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
