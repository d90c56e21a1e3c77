"""Write the command with which vLLM, SGLang or TensorRT-LLM runs a plan."""

from __future__ import annotations

import json
import shlex

from xgpt.checkpoints import hub
from xgpt.comparing.flags import Given
from xgpt.comparing.vllm_command import TABLE
from xgpt.core.schema import ChunkedSettings, Plan, Speculation
from xrunner.vllm.command import (
    context_of,
    devices_of,
    options,
    own_arguments,
    own_sizes,
    partition_of,
    quantizes,
    runs_by_itself,
    variables,
)
from xsimulator.front import most_rate

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "trtllm": "TensorRT-LLM"}
SPECULATES = ("vllm", "sglang")
"""Engines for which xgpt can write the options of speculative decoding."""
QUANTIZES = ("vllm", "sglang")
"""Engines that convert a checkpoint's weights to float8 at the start. Other engines need a checkpoint in float8."""


def engine_command(plan: Plan, kept: Given | None = None) -> str | None:
    """Return the command that starts one replica of a plan in its engine. Return None if the engine's own scheduler
    cannot run the plan.

    The engines' own schedulers run only the policy chunked, on equal stages. If a plan for GPUs names no engine, the
    command is for vLLM. On CPUs, the command starts vLLM as its profile was measured: with the same threads.

    Args:
        kept: further options for vLLM's command, such as those of the current deployment.
    """
    policy, stages = plan.policy, plan.stages
    if not isinstance(policy, ChunkedSettings):
        return None
    if plan.cluster.device.type != "gpu":
        return _on_cpus(plan, kept or {})
    if len({(stage.tp, stage.ep) for stage in stages}) > 1 or plan.model.is_encoder_decoder:
        return None
    if plan.engine is not None and plan.engine.scheduler == "xgpt":
        return None
    framework = "vllm" if plan.engine is None else plan.engine.framework
    if framework not in ENGINES:
        return None
    tokens, most = own_sizes(plan, policy)
    if plan.speculation is not None and framework not in SPECULATES:
        return None
    in_eight = quantizes(plan)
    if in_eight and framework not in QUANTIZES:
        return None
    tp, pp, ep = stages[0].tp, len(stages), stages[0].ep
    model = hub.id_of(plan.checkpoint) or plan.checkpoint or hub.id_of_shipped(plan.model.name) or plan.model.name
    share, sharing = plan.cluster.device.usable_memory, plan.sharing_replicas
    kv_in_eight = (plan.kv_dtype or plan.dtype) == "float8"
    if framework == "vllm":
        words = ["vllm", "serve", model, *options(plan, stages, sharing, tokens, most)]
        words += ["--no-async-scheduling"] if plan.engine is not None and not plan.engine.schedules_ahead else []
        words += [*_flag("--api-server-count", plan.api_servers), *vllm_draft(plan.speculation)]
        kept, context = kept or {}, context_of(plan, stages)
        longest = kept.get("max-model-len", str(plan.model.max_context))
        if longest.isdecimal() and int(longest) > context:
            kept = {**kept, "max-model-len": str(context)}
        words += TABLE.words(kept)
        if variables := partition_of(stages):
            words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
    elif framework == "sglang":
        words = ["python3", "-m", "sglang.launch_server", "--model-path", model, *_flag("--tp-size", tp * sharing)]
        words += ["--dp-size", str(sharing), "--enable-dp-attention"] if sharing > 1 else []
        # SGLang divides both numbers among the groups that share the experts.
        words += [*_flag("--pp-size", pp), *_flag("--ep-size", ep), "--chunked-prefill-size", str(tokens * sharing)]
        words += ["--max-running-requests", str(policy.max_batch * sharing), "--mem-fraction-static", f"{share:g}"]
        words += ["--quantization", "fp8"] if in_eight else []
        words += ["--kv-cache-dtype", "fp8_e4m3"] if kv_in_eight else []
        words += _sglang_draft(plan.speculation)
    else:
        words = ["trtllm-serve", model, *_flag("--tp_size", tp), *_flag("--pp_size", pp), *_flag("--ep_size", ep)]
        words += ["--max_num_tokens", str(tokens), "--max_batch_size", str(policy.max_batch)]
        words += ["--kv_cache_dtype", "fp8"] if kv_in_eight else []
    return shlex.join(words)


def _on_cpus(plan: Plan, kept: Given) -> str | None:
    if not runs_by_itself(plan) or plan.checkpoint is None or plan.replicas > 1:
        return None
    devices, own = devices_of(plan, plan.stages), own_arguments(plan)
    threads = [f"{name}={n}" for name, n in variables(plan.cluster, devices, plan.profile.num_threads).items()]
    given = {name: value for name, value in kept.items() if f"--{name}" not in own}
    return shlex.join(["env", *threads, "vllm", "serve", plan.checkpoint, *own, *TABLE.words(given)])


def vllm_draft(speculation: Speculation | None) -> list[str]:
    """Return vLLM's option for speculative decoding, or nothing without drafts."""
    if speculation is None:
        return []
    config: dict[str, object] = {"method": speculation.method, "num_speculative_tokens": speculation.tokens}
    if speculation.draft is not None:
        config["model"] = speculation.draft
    if speculation.method == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return ["--speculative-config", json.dumps(config)]


def _sglang_draft(speculation: Speculation | None) -> list[str]:
    """Return SGLang's options for drafts without branches, or nothing without drafts. SGLang calls multi-token
    prediction EAGLE, too.
    """
    if speculation is None:
        return []
    name = {"mtp": "EAGLE"}.get(speculation.method, speculation.method.upper())
    words = ["--speculative-algorithm", name, "--speculative-num-draft-tokens", str(speculation.verified)]
    if speculation.method != "ngram":
        words += ["--speculative-num-steps", str(speculation.tokens), "--speculative-eagle-topk", "1"]
    return words if speculation.draft is None else [*words, "--speculative-draft-model-path", speculation.draft]


def command_in_words(plans: dict[str, Plan], kept: Given | None = None) -> list[str]:
    """Return lines of text with the command that runs a plan in the engine, and with remarks about the command.

    Args:
        plans: each policy's best plan, the best of all first.
        kept: see `engine_command`.
    """
    best = next(iter(plans.values()))
    runs = next((plan for plan in plans.values() if engine_command(plan) is not None), None)
    if runs is None:
        return []
    name = ENGINES["vllm" if runs.engine is None else runs.engine.framework]
    times = runs.replicas // runs.sharing_replicas
    each = f" (start it {times} times)" if times > 1 else ""
    lines = [f"run in {name} itself{each}: {engine_command(runs, kept)}"]
    if runs.api_servers > 1:
        rate = most_rate(runs, 1)
        lines.append(f"each command has {runs.api_servers} API servers: one handles about {rate:.0f} such requests/s")
    if runs.engine is None:
        lines.append(f"{name}'s overhead for each step is not included; plan with `--engine vllm` to include it")
    if runs is not best:
        lines.append(f"{name}'s own scheduler cannot run {best.policy.kind}: `xgpt export` adds xgpt's scheduler")
    return lines


def _flag(name: str, value: int) -> list[str]:
    return [name, str(value)] if value > 1 else []
