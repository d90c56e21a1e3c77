"""The flags of `vllm serve`: the values that each takes, and those whose effect on speed is not modelled.

tests/vllm compares them with vLLM's own parser.
"""

from __future__ import annotations

from typing import Literal

VERSION = "0.32.0"

Takes = Literal["nothing", "switch", "value", "optional", "many"]
"""A switch also has a form that begins with --no-."""

_TAKES: dict[Takes, str] = {
    "nothing": """
        headless grpc data-parallel-multi-port-external-lb disable-log-stats aggregate-engine-logging
    """,
    "value": """
        api-server-count config chat-template chat-template-content-format default-chat-template-kwargs
        response-role tool-call-parser tool-parser-plugin tool-strict-level tool-server max-log-len
        sse-keep-alive-interval cohere-format anthropic-disabled-thinking-effort fingerprint-mode
        fingerprint-value host port grpc-port data-parallel-supervisor-port dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold uds uvicorn-log-level
        disable-access-log-for-endpoints allowed-origins allowed-methods allowed-headers ssl-keyfile
        ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers root-path middleware h11-max-incomplete-event-size
        h11-max-header-count model runner convert tokenizer tokenizer-mode dtype seed hf-config-path
        allowed-local-media-path revision code-revision tokenizer-revision max-model-len quantization
        quantization-config max-logprobs logprobs-mode config-format hf-overrides model-class-overrides
        pooler-config generation-config override-generation-config model-impl io-processor-plugin
        renderer-num-workers load-format download-dir safetensors-load-strategy safetensors-prefetch-num-threads
        safetensors-prefetch-block-size model-loader-extra-config pt-load-map-location attention-backend
        mamba-backend mamba-ssu-algorithm mamba-cache-philox-rounds reasoning-parser reasoning-parser-plugin
        distributed-executor-backend pipeline-parallel-size master-addr master-port nnodes node-rank
        distributed-timeout-seconds cpu-distributed-timeout-seconds device-ids tensor-parallel-size
        decode-context-parallel-size dcp-comm-backend dcp-kv-cache-interleave-size cp-kv-cache-interleave-size
        prefill-context-parallel-size data-parallel-size data-parallel-rank data-parallel-start-rank
        data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
        all2all-backend ubatch-size elastic-ep-max-dp-size dbo-decode-token-threshold dp-sync-interval
        dbo-prefill-token-threshold eplb-config expert-placement-strategy max-parallel-loading-workers
        worker-cls worker-extension-cls fault-tolerance-config block-size gpu-memory-utilization
        kv-cache-memory-bytes kv-cache-dtype num-gpu-blocks-override prefix-caching-hash-algo
        prefix-cache-retention-interval mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size
        prefix-match-unit mamba-cache-mode replayssm-buffer-len kv-offloading-size kv-offloading-backend
        offload-backend cpu-offload-gb offload-group-size offload-num-in-group offload-prefetch-step
        limit-mm-per-prompt media-io-kwargs mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type
        mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend
        mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path
        mm-encoder-fp8-scale-save-margin video-pruning-rate video-pruning-method mm-tensor-ipc
        mm-processor-device mm-ipc-gpu-memory-gb max-loras max-lora-rank lora-dtype max-cpu-loras
        default-mm-loras max-lora-cls-labels logging-config log-level log-config-file
        show-hidden-metrics-for-version otlp-traces-endpoint per-request-spec-decode-metrics
        kv-cache-metrics-sample custom-histogram-buckets jit-monitor-mode max-num-batched-tokens
        max-num-scheduled-tokens max-num-seqs max-num-active-seqs max-num-queued-reqs max-num-queued-tokens
        long-prefill-token-threshold scheduling-policy scheduler-cls watermark prefill-schedule-interval
        stream-interval max-cudagraph-capture-size ir-op-priority moe-backend linear-backend
        sparse-indexer-topk-backend speculative-config spec-method spec-model spec-tokens watermark-config
        diffusion-config kv-transfer-config kv-events-config ec-transfer-config ec-manager-config
        compilation-config attention-config engram-config reasoning-config kernel-config additional-config
        structured-outputs-config aux-output-config profiler-config optimization-level performance-mode
        weight-transfer-config shutdown-timeout gdn-prefill-backend kda-prefill-backend kda-decode-backend
    """,
    "many": """
        lora-modules api-key allowed-media-domains served-model-name sleep-preserve-parameter-names
        logits-processors ignore-patterns numa-bind-nodes numa-bind-cpus kv-cache-dtype-skip-layers
        cpu-offload-params offload-params lora-target-modules collect-detailed-traces cudagraph-capture-sizes
    """,
    "switch": """
        trust-request-chat-template trust-request-mm-kwargs return-tokens-as-token-ids enable-auto-tool-choice
        exclude-tools-when-tool-choice-none enable-prompt-tokens-details enable-per-request-metrics
        enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint enable-log-outputs
        enable-log-deltas cohere-is-reasoning-model log-error-stack tokens-only enable-scale-out
        disable-uvicorn-access-log allow-credentials enable-ssl-refresh enable-request-id-headers
        disable-fastapi-docs enable-offline-docs enable-flash-late-interaction trust-remote-code
        allow-deprecated-quantization enforce-eager enable-return-routed-experts return-sampling-mask
        use-fp64-gumbel enable-trace-replay disable-sliding-window disable-cascade-attn skip-tokenizer-init
        enable-prompt-embeds enable-sleep-mode sleep-mode-offload-cudagraph enable-cumem-allocator
        enable-nccl-comm-suspend use-tqdm-on-load enable-mamba-cache-stochastic-rounding numa-bind
        dcp-q-replicate data-parallel-hybrid-lb data-parallel-external-lb enable-hc-sp enable-expert-parallel
        enable-batch-sharded-sampling enable-ep-weight-filter enable-dbo enable-shm-tensor-arena
        enable-elastic-ep disable-nccl-for-dp-synchronization enable-eplb ray-workers-use-nsight
        disable-custom-all-reduce enable-fault-tolerance enable-prefix-caching kv-sharing-fast-prefill
        swa-bounded-replay enable-mamba-shared-prefix-checkpoint use-replayssm language-model-only
        enable-mm-embeds mm-encoder-only interleave-mm-strings skip-mm-profiling mm-device-do-normalize
        enable-lora enable-tower-connector-lora fully-sharded-loras specialize-active-lora
        enable-mixed-moe-lora-format enable-moe-shared-loras kv-cache-metrics cudagraph-metrics
        enable-layerwise-nvtx-tracing enable-mfu-metrics enable-logging-iteration-details jit-monitor-verbose
        long-prefill-token-threshold-adaptive enable-chunked-prefill disable-chunked-mm-input
        scheduler-reserve-full-isl disable-hybrid-kv-cache-manager async-scheduling enable-flashinfer-autotune
        fail-on-environ-validation enable-log-requests
    """,
    "optional": """
        hf-token
    """,
}

TAKES: dict[str, Takes] = {name: takes for takes, names in _TAKES.items() for name in names.split()}

_ALIASES = """
    -ac=attention-config -asc=api-server-count -cc=compilation-config -dc=diffusion-config
    -dcp=decode-context-parallel-size --device-memory-utilization=gpu-memory-utilization
    -dp=data-parallel-size -dpa=data-parallel-address -dpb=data-parallel-backend
    -dpe=data-parallel-external-lb -dph=data-parallel-hybrid-lb -dpl=data-parallel-size-local
    -dpm=data-parallel-multi-port-external-lb -dpn=data-parallel-rank -dpp=data-parallel-rpc-port
    -dpr=data-parallel-start-rank -ep=enable-expert-parallel -n=nnodes -pcp=prefill-context-parallel-size
    -pp=pipeline-parallel-size -q=quantization -r=node-rank -sc=speculative-config -tp=tensor-parallel-size
"""

ALIASES = dict(pair.split("=") for pair in _ALIASES.split())
"""Other names, with their dashes."""

_NO_TABLES = "no step times are known for it"
_SCHEDULE = "it changes which requests run together, in a way that is not scored"
_MEMORY = "the memory for K/V is scored by --gpu-memory-utilization"
_DRAFTS = "how many tokens a step gives depends on the drafts that are accepted"
_TRANSFER = "traffic of K/V between engines is not scored"
_KERNELS = "step times are those of the kernels that vLLM chooses by itself"
_COMPILED = "step times are those of vLLM's own compilation settings"
_MODEL = "it changes the model: give its config.json as `config`"
_GENERATES = "only models that generate tokens are scored"
_OFFLOAD = "no step times are known of weights that stay in the host's memory"
_ADAPTERS = "adapters add work that no step times are known for"
_CONTEXT = "attention divided by context is not scored"

_REFUSED: dict[str, dict[str, list[str]]] = {
    _NO_TABLES: {
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
        "attention-backend": [],
        "attention-config": [],
        "disable-custom-all-reduce": ["no"],
        "enable-flashinfer-autotune": ["yes"],
        "ir-op-priority": [],
        "kernel-config": [],
        "linear-backend": ["auto"],
    },
    _COMPILED: {
        "compilation-config": ['{"cudagraph_mode": "FULL_AND_PIECEWISE"}', '{"mode": 3}', "3"],
        "cudagraph-capture-sizes": [],
        "dbo-decode-token-threshold": ["32"],
        "dbo-prefill-token-threshold": ["512"],
        "enable-dbo": ["no"],
        "max-cudagraph-capture-size": [],
        "optimization-level": ["2"],
        "performance-mode": ["balanced"],
        "ubatch-size": ["0"],
    },
    _MODEL: {"hf-overrides": ["{}"], "model-class-overrides": [], "quantization-config": []},
    _GENERATES: {"convert": ["auto", "none"], "runner": ["auto", "generate"]},
    _OFFLOAD: {"cpu-offload-gb": ["0"], "cpu-offload-params": [], "offload-group-size": ["0"], "offload-params": []},
    _ADAPTERS: {"default-mm-loras": [], "enable-lora": ["no"], "lora-modules": []},
    _CONTEXT: {"decode-context-parallel-size": ["1"], "prefill-context-parallel-size": ["1"]},
    _SCHEDULE: {
        "long-prefill-token-threshold": ["0"],
        "long-prefill-token-threshold-adaptive": ["no"],
        "max-num-active-seqs": [],
        "max-num-queued-reqs": [],
        "max-num-queued-tokens": [],
        "max-num-scheduled-tokens": [],
        "prefill-schedule-interval": ["1"],
        "scheduler-cls": [],
        "scheduler-reserve-full-isl": ["yes"],
        "scheduling-policy": ["fcfs"],
        "stream-interval": ["1"],
        "watermark": ["0", "0.0"],
        "watermark-config": [],
    },
    _MEMORY: {"kv-cache-memory-bytes": [], "num-gpu-blocks-override": []},
    _DRAFTS: {"spec-method": [], "spec-model": [], "spec-tokens": [], "speculative-config": []},
    _TRANSFER: {"ec-transfer-config": [], "kv-offloading-size": [], "kv-transfer-config": []},
}

REFUSED = {name: (why, tuple(neutral)) for why, flags in _REFUSED.items() for name, neutral in flags.items()}
"""Why each is refused, and the values that change nothing: "yes" and "no" of a switch."""

NEUTRAL_PARTS: dict[str, dict[str, tuple[object, ...]]] = {
    "compilation-config": {"mode": (3, "3"), "level": (3, "3"), "cudagraph_mode": ("FULL_AND_PIECEWISE",)},
    "hf-overrides": {"max_position_embeddings": (), "rope_parameters": (), "rope_scaling": (), "rope_theta": ()},
}
"""Parts of a JSON value that change neither speed nor memory, and at which values; (): at any. The length of the
context is --max-model-len's."""

_QUANTIZATIONS = """
    awq awq_marlin auto_round bitsandbytes compressed-tensors cpu_awq deepspeedfp experts_int8 fbgemm_fp8 fp_quant fp8
    fp8_per_block fp8_per_tensor gguf gpt_oss_mxfp4 gptq gptq_marlin humming inc int8_per_channel_weight_only modelopt
    modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 mxfp8 nvfp4 online petit_nvfp4 ptpc_fp8 quark torchao
"""

QUANTIZATIONS = frozenset(_QUANTIZATIONS.split())
"""Names that --quantization takes."""
