"""Turn a plan into the command line and the environment that start vLLM."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xgpt.core.errors import InputError
from xgpt.core.machine import num_cores
from xgpt.core.schema import ChunkedSettings, ClusterSpec, LaneName, Plan, Precision, Stage, WaaSettings
from xgpt.core.schema.engine import CPU_BLOCK_SIZE
from xrunner.vllm.lane import LEAST_KV, settings_of

SCHEDULER = "xrunner.vllm.scheduler.XgptScheduler"
CPU_PIPELINE = "xrunner.vllm.cpu_pipeline.CpuPipelineWorker"
GPU_BLOCK_SIZE = 16
MAX_RUNNING = 1024
"""Largest number of concurrent requests for which vLLM prepares batches, even if more would fit in the plan's
memory."""
NIXL_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""The variable with the port at which a lane's NixlConnector describes how to reach the lane's K/V. Lanes on one
machine have different ports.
"""
HOST = "xrunner.vllm.host"
ANOTHER_LOOP = (
    "the plan is for vLLM's own scheduler, which xgpt's scheduler would replace: run the `vllm serve` command that "
    "`xgpt plan` prints, export the plan with `xgpt export --to llm-d` or `--to dynamo`, or plan with "
    "`--engine xgpt-vllm`"
)


@dataclass(frozen=True)
class Launch:
    """The model, arguments and environment variables with which the vLLM of a lane, or of one of its groups, starts."""

    lane: LaneName
    model: str
    arguments: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    kv_blocks: int = 0
    block_size: int = 0
    group: int = 0

    def command(self, python: str, directory: str) -> list[str]:
        return [python, "-m", HOST, f"--model={self.model}", *self.arguments, directory, self.lane, str(self.group)]


def block_size_of(cluster: ClusterSpec) -> int:
    return CPU_BLOCK_SIZE if cluster.device.type == "cpu" else GPU_BLOCK_SIZE


def computing_cores(cluster: ClusterSpec) -> int:
    """Return how many cores of this machine compute for each CPU device of the cluster.

    If a device is a whole machine, one core is left to the loop of vLLM's engine, as in vLLM itself.
    """
    cores = num_cores() // cluster.devices_per_node
    return max(1, cores - 1) if cluster.devices_per_node == 1 else cores


def variables(cluster: ClusterSpec, devices: Sequence[int], threads: int | None = None) -> dict[str, str]:
    """Return vLLM's environment variables for these devices of the cluster.

    On this machine's CPUs, the variables set which cores compute. By default, vLLM leaves one core to the engine's
    loop, and another if there is a K/V connector. Profiles are measured with a connector, so without these variables
    they would be measured on other cores than the server uses.
    """
    if cluster.device.type == "gpu" or not cluster.is_local:
        return {}
    cores = min(threads or computing_cores(cluster), num_cores() // cluster.devices_per_node)
    if cluster.devices_per_node == 1:
        return {"VLLM_CPU_NUM_OF_RESERVED_CPU": str(num_cores() - cores)}
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(f"{cores * d}-{cores * (d + 1) - 1}" for d in devices)}


def devices_of(plan: Plan, stages: Sequence[Stage]) -> list[int]:
    devices = [device for stage in stages for device in stage.devices]
    return [replica * plan.devices_per_replica + device for replica in range(plan.replicas) for device in devices]


def cache_bytes(plan: Plan, stages: Sequence[Stage], tokens: int) -> int:
    layers = max(last - first for first, last in (stage.decode_layers for stage in stages))
    heads = max(1.0, plan.model.num_kv_heads / stages[0].tp)
    share = layers / plan.model.num_layers * (heads / plan.model.num_kv_heads if plan.model.latent is None else 1)
    return math.ceil(tokens * plan.model.kv_bytes_per_token(plan.kv_dtype or plan.dtype) * share)


def launch(plan: Plan, *, plan_path: str, config: dict[str, Any] | None = None, reuse: bool = True) -> Launch:
    """Return how to start vLLM for a plan whose policy has one lane."""
    settings_of(plan)  # raises InputError if vLLM cannot run the plan
    if runs_by_itself(plan):
        raise InputError("plan.engine", plan.engine and plan.engine.name, ANOTHER_LOOP)
    caching = "--enable-prefix-caching" if reuse and plan.vllm_shares_prompts else "--no-enable-prefix-caching"
    started = _launch(plan, "both", plan.stages, SCHEDULER, {"plan": plan_path, **(config or {})})
    return replace(started, arguments=(*started.arguments, caching))


def runs_by_itself(plan: Plan) -> bool:
    return plan.engine is not None and plan.engine.framework == "vllm" and plan.engine.scheduler == "own"


def own_sizes(plan: Plan, policy: ChunkedSettings) -> tuple[int, int]:
    tokens = plan.step_tokens(policy.token_budget) // policy.microbatches
    return tokens, policy.most_running


def own_arguments(plan: Plan) -> list[str]:
    """Return the arguments of `vllm serve` that run one replica of a plan with vLLM's own scheduler.

    Raises:
        InputError: vLLM cannot run the plan.
    """
    settings_of(plan)
    return list(_launch(plan, "both", plan.stages, "", {}).sizes)


def launch_lane(
    plan: Plan, lane: LaneName, connector: dict[str, Any], group: int = 0, *, config: dict[str, Any] | None = None
) -> Launch:
    """Return how to start vLLM for one lane of a WAA plan, or for a group of its encode lane, with vLLM's own
    scheduler.
    """
    stages = tuple(stage for stage in plan.stages if stage.lane == lane)
    if lane == "encode" and plan.prefill_groups > 1:
        stages = stages[group : group + 1]
    role = {"encode": "kv_producer", "decode": "kv_consumer"}[lane]
    started = _launch(plan, lane, stages, "xrunner.vllm.logged.LoggedScheduler", config or {})
    transfer = json.dumps({**connector, "kv_role": role})
    extra = ("--kv-transfer-config", transfer, "--disable-hybrid-kv-cache-manager", "--no-enable-prefix-caching")
    environment = {}
    if plan.cluster.device.type == "gpu":  # by default, both lanes would use the first devices
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices_of(plan, stages)))}
    variables_ = started.variables | environment
    return replace(started, arguments=started.arguments + extra, variables=variables_, group=group)


def _launch(plan: Plan, lane: LaneName, stages: tuple[Stage, ...], scheduler: str, config: dict[str, Any]) -> Launch:
    if plan.checkpoint is None:
        raise InputError("plan.checkpoint", None, "vLLM reads weights from a directory; plan with --model DIRECTORY")
    if plan.model.is_encoder_decoder:
        accepted = "it is an encoder-decoder, which xgpt does not run in vLLM: serve it with `engine=xgpt`"
        raise InputError("plan.model", plan.model.name, accepted)
    state = Precision.of(plan.dtype, plan.cluster.device.type, "vllm").state
    if plan.kv_dtype not in (None, state, "float8"):
        says = f"vLLM stores keys and values only in {state} or float8: plan with one of these"
        raise InputError("plan.kv_dtype", plan.kv_dtype, says)
    degrees = {stage.tp for stage in stages}
    if len(degrees) > 1:
        says = "vLLM needs the same tensor-parallel degree in all stages: plan with `engine=xgpt-vllm`"
        raise InputError("plan.stages.tp", sorted(degrees), says)
    if stages[0].ep > 1 and (plan.replicas > 1 or stages[0].ep != stages[0].tp):
        accepted = "vLLM puts either whole experts or slices of all experts on each device of a replica"
        raise InputError("plan.stages.ep", stages[0].ep, accepted)
    environment = partition_of(stages)
    cluster = plan.cluster
    block_size = block_size_of(cluster)
    blocks = _num_blocks(plan, stages)
    environment |= variables(cluster, devices_of(plan, stages), plan.profile.num_threads)
    step, most = step_tokens(plan), min(MAX_RUNNING, max_running(plan, blocks, block_size))
    if runs_by_itself(plan) and isinstance(plan.policy, ChunkedSettings):
        step, most = own_sizes(plan, plan.policy)
    sizes = [
        *("--dtype", state),
        *("--max-model-len", str(context_of(plan, stages))),
        *("--block-size", str(block_size)),
        *options(plan, stages, plan.replicas, max(step, most), most),
        "--async-scheduling" if plan.engine is not None and plan.engine.schedules_ahead else "--no-async-scheduling",
    ]
    if cluster.device.type != "gpu":
        # vLLM checks that this amount of memory is free. By default it would use nine tenths of the machine's memory.
        room = cache_bytes(plan, stages, (blocks + 1) * block_size)  # vLLM reserves one block
        sizes += ["--enforce-eager", "--kv-cache-memory-bytes", str(room)]
        sizes += ["--worker-cls", CPU_PIPELINE] if len(stages) > 1 else []
    words = [
        "--skip-tokenizer-init",  # the front decodes text
        "--disable-log-stats",
        *("--generation-config", "vllm"),
        *("--scheduler-cls", scheduler),
        *("--additional-config", json.dumps({"xgpt": config})),
    ]
    arguments = (*sizes, *words)
    return Launch(lane, plan.checkpoint, arguments, tuple(sizes), environment, blocks, block_size)


def options(plan: Plan, stages: Sequence[Stage], replicas: int, tokens: int, most: int) -> list[str]:
    degrees, device = {"tensor": stages[0].tp, "pipeline": len(stages), "data": replicas}, plan.cluster.device
    return [
        *(word for kind, degree in degrees.items() if degree > 1 for word in (f"--{kind}-parallel-size", str(degree))),
        *(["--enable-expert-parallel"] if stages[0].ep > 1 else []),
        *("--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(most)),
        *(["--gpu-memory-utilization", f"{device.usable_memory:g}"] if device.type == "gpu" else []),
        *(["--quantization", "fp8"] if quantizes(plan) else []),
        *(["--kv-cache-dtype", "fp8"] if (plan.kv_dtype or plan.dtype) == "float8" else []),
    ]


def quantizes(plan: Plan) -> bool:
    return plan.dtype == "float8" and plan.model.quantization is None


def context_of(plan: Plan, stages: Sequence[Stage]) -> int:
    """Return the length, in tokens, of the longest request that vLLM may accept: vLLM starts only if its K/V memory can
    hold one such request.
    """
    return min(plan.model.max_context, int(LEAST_KV * _num_blocks(plan, stages)) * block_size_of(plan.cluster))


def partition_of(stages: Sequence[Stage]) -> dict[str, str]:
    layers = [last - first for first, last in (stage.decode_layers for stage in stages)]
    return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers))} if len(set(layers)) > 1 else {}


def _num_blocks(plan: Plan, stages: Sequence[Stage]) -> int:
    return min(stage.kv_blocks for stage in stages) * plan.block_size // block_size_of(plan.cluster)


def step_tokens(plan: Plan) -> int:
    policy, estimate, longest = plan.policy, plan.estimate, plan.workload.input.lengths[-1]
    if policy.kind == "chunked":
        return policy.token_budget if policy.slack is None else policy.max_batch + policy.slack.most_tokens
    usual = 1.1 * estimate.encode_tokens + longest
    return max(2048, round(usual + estimate.decode_batch) if policy.kind == "orca" else round(usual))


def max_running(plan: Plan, blocks: int, block_size: int) -> int:
    """Return the largest number of concurrent requests under this plan, or any plan that may replace it at run time."""
    if plan.admission.max_running is not None:
        return plan.admission.max_running
    if isinstance(plan.policy, WaaSettings):
        return plan.policy.max_decode_batch
    shortest = plan.workload.input.lengths[0] + plan.workload.output.lengths[-1]
    return max(1, blocks // -(-shortest // block_size))
