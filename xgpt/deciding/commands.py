"""Write the commands with which an engine runs a plan."""

from __future__ import annotations

import json
import shlex

from xgpt.checkpoints import hub
from xgpt.comparing.flags import Given
from xgpt.comparing.other_engines import SGLANG, TENSORRT_LLM
from xgpt.comparing.vllm_command import TABLE
from xgpt.core.schema import ChunkedSettings, Plan, Speculation
from xgpt.core.schema.recommendation import Process
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

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "trtllm": "TensorRT-LLM"}
SPECULATES = ("vllm", "sglang")
"""Engines for which xgpt can write the options of speculative decoding."""
QUANTIZES = ("vllm", "sglang")
"""Engines that convert a checkpoint's weights to float8 at the start. Other engines need a checkpoint in float8."""


PORT, PORTS = 8000, {"sglang": 30000}
"""Port of the first process, by the engine's default. Further processes of a machine have the next ports."""
DEVICES = {"mi3": "HIP_VISIBLE_DEVICES", "arc": "ZE_AFFINITY_MASK"}
"""Environment variable that selects devices, by the beginning of their name. For others, CUDA_VISIBLE_DEVICES."""


def processes_of(plan: Plan, kept: Given | None = None, path: str | None = "plan.json") -> tuple[Process, ...]:
    """Return the processes that run a plan: the engine's, or xgpt's if the engine cannot run the plan by itself. There
    are none if xgpt neither knows the engine's command nor runs in it.

    Replicas of a machine are one command with data parallelism if the engine has it, apart from mixtures of experts,
    whose experts vLLM would then divide.

    Args:
        path: path of the plan, for xgpt's own commands. None: no file has the plan, so there are none.
    """
    if engine_command(plan) is None:
        if path is None or not (plan.engine is None or plan.engine.takes_ours):
            return ()
        in_vllm = plan.engine is not None and plan.engine.framework == "vllm" and plan.cluster.device.type == "gpu"
        in_vllm |= plan.prefill_groups > 1  # only vLLM runs them
        command = shlex.join(["xgpt", "serve", path, *(["--engine", "vllm"] if in_vllm else [])])
        return (Process(command=f"{command} --port {PORT}", port=PORT, devices=_numbers(plan)),)
    each, on_node = plan.devices_per_replica * plan.sharing_replicas, plan.cluster.devices_per_node
    groups = plan.replicas // plan.sharing_replicas
    framework = "vllm" if plan.engine is None else plan.engine.framework
    if each > on_node:
        return _over_nodes(plan, kept, framework, groups)
    of_node, base = max(1, on_node // each), port_of(plan, kept)
    together = framework in ("vllm", "sglang") and plan.sharing_replicas == 1 and plan.model.experts is None
    found = []
    for start in range(0, groups, of_node):
        on_this = min(of_node, groups - start)
        size = on_this if together else 1
        for i in range(0, on_this, size):
            first, port = i * each, base + i // size
            shown = port if on_this > size or (kept or {}).get("port") else None
            command = str(engine_command(plan, kept, size, shown))
            devices = tuple(range(first, first + size * each))
            if on_this > size:
                command = f"{visible(plan)}={','.join(map(str, devices))} {command}"
            found.append(Process(command=command, port=port, devices=devices, node=start // of_node))
    return tuple(found)


def port_of(plan: Plan, kept: Given | None = None) -> int:
    """Return the port on which a plan's first process answers: the one in `kept`, or its engine's default."""
    framework = "" if plan.engine is None else plan.engine.framework
    given = (kept or {}).get("port", "")
    return int(given) if given.isdecimal() else PORTS.get(framework, PORT)


def _over_nodes(plan: Plan, kept: Given | None, framework: str, groups: int) -> tuple[Process, ...]:
    each, on_node = plan.devices_per_replica * plan.sharing_replicas, plan.cluster.devices_per_node
    nodes, base = -(-each // on_node), port_of(plan, kept)
    found = []
    for node in range(groups * nodes):
        group, rank = divmod(node, nodes)
        words = meeting(framework, nodes, str(rank), f"NODE{group * nodes}")
        words += ["--headless"] if rank and framework == "vllm" else []
        command = " ".join([str(engine_command(plan, kept, port=base)), *words])
        found.append(Process(command=command, port=base, devices=tuple(range(min(each, on_node))), node=node))
    return tuple(found)


def meeting(framework: str, nodes: int, rank: str, head: str) -> list[str]:
    """Return the options with which an engine's process on one of several machines finds the others."""
    names = {"vllm": ["--master-addr", head], "sglang": ["--dist-init-addr", f"{head}:20000"]}
    return ["--nnodes", str(nodes), "--node-rank", rank, *names[framework]] if framework in names else []


def _numbers(plan: Plan) -> tuple[int, ...]:
    return tuple(range(plan.num_devices)) if plan.cluster.device.type == "gpu" else ()


def visible(plan: Plan) -> str:
    """Return the environment variable that selects devices of a plan's kind."""
    name = plan.cluster.device.name
    return next((variable for start, variable in DEVICES.items() if name.startswith(start)), "CUDA_VISIBLE_DEVICES")


def engine_label(plan: Plan) -> str:
    """Return the engine of a plan with its version, as in "vLLM 0.32", or "" if only a measured profile names it."""
    engine = plan.engine
    if engine is None and plan.profile.source == "measured":
        return ""
    if engine is None or engine.framework == "xgpt":
        return "xgpt's engine" if engine_command(plan) is None else "vLLM without its own times"
    name = ENGINES.get(engine.framework, engine.framework)
    return f"{name} {engine.version}" + (" with xgpt's scheduler" if engine.scheduler == "xgpt" else "")


def engine_command(plan: Plan, kept: Given | None = None, replicas: int = 1, port: int | None = None) -> str | None:
    """Return the command that starts one replica of a plan in its engine. Return None if the engine's own scheduler
    cannot run the plan.

    The engines' own schedulers run only the policy chunked, in order of arrival, on equal stages. If a plan for GPUs
    names no engine, the command is for vLLM. On CPUs, the command starts vLLM as its profile was measured: with the
    same threads.

    Args:
        kept: further options for the command, such as those of the current deployment.
        replicas: number of replicas that one command starts (vLLM, SGLang).
        port: port on which the engine answers. None means its default, or the one in `kept`.
    """
    policy, stages = plan.policy, plan.stages
    if not isinstance(policy, ChunkedSettings) or plan.admission.order != "fcfs":
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
        words = ["vllm", "serve", model, *options(plan, stages, sharing * replicas, tokens, most)]
        words += ["--no-async-scheduling"] if plan.engine is not None and not plan.engine.schedules_ahead else []
        words += [*_flag("--api-server-count", plan.api_servers), *vllm_draft(plan.speculation)]
        kept, context = kept or {}, context_of(plan, stages)
        longest = kept.get("max-model-len", str(plan.model.max_context))
        if longest.isdecimal() and int(longest) > context:
            kept = {**kept, "max-model-len": str(context)}
        kept = kept if port is None else {**kept, "port": str(port)}
        words += TABLE.words(kept)
        if variables := partition_of(stages):
            words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
    elif framework == "sglang":
        words = ["python3", "-m", "sglang.launch_server", "--model-path", model, *_flag("--tp-size", tp * sharing)]
        words += ["--dp-size", str(sharing), "--enable-dp-attention"] if sharing > 1 else _flag("--dp-size", replicas)
        # SGLang divides both numbers among the groups that share the experts.
        words += [*_flag("--pp-size", pp), *_flag("--ep-size", ep), "--chunked-prefill-size", str(tokens * sharing)]
        words += ["--max-running-requests", str(policy.max_batch * sharing), "--mem-fraction-static", f"{share:g}"]
        words += ["--quantization", "fp8"] if in_eight else []
        words += ["--kv-cache-dtype", "fp8_e4m3"] if kv_in_eight else []
        words += _sglang_draft(plan.speculation)
        words += SGLANG.words({**(kept or {}), **({} if port is None else {"port": str(port)})})
    else:
        words = ["trtllm-serve", model, *_flag("--tp_size", tp), *_flag("--pp_size", pp), *_flag("--ep_size", ep)]
        words += ["--max_num_tokens", str(tokens), "--max_batch_size", str(policy.max_batch)]
        words += ["--kv_cache_dtype", "fp8"] if kv_in_eight else []
        words += TENSORRT_LLM.words({**(kept or {}), **({} if port is None else {"port": str(port)})})
    return shlex.join(words)


def _on_cpus(plan: Plan, kept: Given) -> str | None:
    if not runs_by_itself(plan) or plan.checkpoint is None or plan.replicas > 1:
        return None
    devices, own = devices_of(plan, plan.stages), own_arguments(plan)
    threads = [f"{name}={n}" for name, n in variables(plan.cluster, devices, plan.profile.num_threads).items()]
    given = {name: value for name, value in kept.items() if f"--{name}" not in own}
    return shlex.join(["env", *threads, "vllm", "serve", plan.checkpoint, *own, *TABLE.words(given)])


def vllm_draft(speculation: Speculation | None) -> list[str]:
    if speculation is None:
        return []
    config: dict[str, object] = {"method": speculation.method, "num_speculative_tokens": speculation.tokens}
    if speculation.draft is not None:
        config["model"] = speculation.draft
    if speculation.method == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return ["--speculative-config", json.dumps(config)]


def _sglang_draft(speculation: Speculation | None) -> list[str]:
    if speculation is None:
        return []
    # SGLang calls multi-token prediction EAGLE, too.
    name = {"mtp": "EAGLE"}.get(speculation.method, speculation.method.upper())
    words = ["--speculative-algorithm", name, "--speculative-num-draft-tokens", str(speculation.verified)]
    if speculation.method != "ngram":
        words += ["--speculative-num-steps", str(speculation.tokens), "--speculative-eagle-topk", "1"]
    return words if speculation.draft is None else [*words, "--speculative-draft-model-path", speculation.draft]


def _flag(name: str, value: int) -> list[str]:
    return [name, str(value)] if value > 1 else []
