"""Make the one input of all exports: replicas of an engine command.

A `EngineReplicas` says what runs (a command, by whose scheduler, on which image), how often, and on how many devices and
machines. Templates in configs/templates turn it into files.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.io import configs_dir, dump_json, load_yaml
from xgpt.core.schema import LaneName, Plan
from xgpt.core.version import __version__
from xgpt.deciding.commands import engine_command, meeting, visible, vllm_draft
from xgpt.serving.checking import check_vllm_runs, nodes_of
from xprofiler.store import check_engine
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import SCHEDULER, launch, launch_lane, partition_of, runs_by_itself

Target = Literal["shell", "compose", "k8s", "llm-d", "dynamo"]
IN_PODS: tuple[Target, ...] = ("k8s", "llm-d", "dynamo")
ON_VLLM: tuple[Target, ...] = ("llm-d", "dynamo")
"""Targets that run only vLLM."""

MAX_NAME = 44
"""Largest length of an object's name without suffixes. A label can have 63 characters."""
MODEL_PATH, DRAFT_PATH, PLAN_PATH, KEY_PATH = "/model", "/draft", "/etc/xgpt/plan/plan.json", "/etc/xgpt/keys/key"
PORT, DECODE_PORT = 8000, 8200
"""Port of every replica, and of vLLM in a decode lane, behind llm-d's proxy at `PORT`."""
RAY_PORT = 6379
LEAVE_S, DRAIN_S, SPARE_S = 15, 60, 30
"""Lengths, in seconds, of three periods after SIGTERM: load balancers stop sending, running requests finish, and the
engine ends.
"""
ROLES: dict[LaneName, str] = {"encode": "prefill", "decode": "decode"}
BESIDE_VLLM = ("click", "jinja2", "optuna", "rich", "scipy")
"""Packages that serving needs and vLLM does not install."""
NIXL_PACKAGE = "nixl==1.5.1"
"""The package that sends K/V from GPU to GPU under WAA."""


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


@dataclass(frozen=True)
class EngineReplicas:
    """Copies of an engine command.

    Attributes:
        plan: the plan of one replica or, outside of pods, of all that xgpt serves behind its own front.
        scheduler: whether the engine's own scheduler runs, or xgpt's.
        rate_per_s: highest arrival rate of one replica within the bounds, or None if not known.
        schedule: numbers of replicas over the day, as (begin, end, number) in minutes of a UTC day. Empty: no forecast.
        least: number of replicas outside the schedule.
        takes_rest: whether these replicas take the load that exceeds what the other kinds of the fleet hold.
        lead_s, drain_s: seconds until an ordered replica serves, and until an ending one has finished its requests.
    """

    plan: Plan
    target: Target
    name: str
    count: int
    most: int
    scheduler: Literal["own", "xgpt"]
    groups: tuple[NodeGroup, ...]
    rate_per_s: float | None = None
    load_factor: float = 1.0
    schedule: tuple[tuple[int, int, int], ...] = ()
    least: int = 1
    takes_rest: bool = True
    lead_s: float = 60.0
    drain_s: float = 60.0

    @property
    def frontend(self) -> NodeGroup:
        """Dynamo's frontend."""
        return NodeGroup("both", 0, 1, ["python3", "-m", "dynamo.frontend", "--http-port", str(PORT)])

    @property
    def document(self) -> str:
        """The plan as pods read it: weights in their cache or at `MODEL_PATH`."""
        checkpoint = f"hf://{self.model_id}" if self.model_id else MODEL_PATH
        return dump_json(self.plan.deployed(checkpoint=checkpoint, recommendation=None))

    @property
    def group(self) -> NodeGroup:
        return self.groups[0]

    @property
    def framework(self) -> str:
        return framework_of(self.plan)

    @cached_property
    def engine_version(self) -> str:
        found = "" if self.plan.engine is None else self.plan.engine.version
        if self.framework == "vllm" and (not found or TESTED_VERSION.startswith(found) or self.scheduler == "xgpt"):
            return TESTED_VERSION
        return str(images().get(f"{self.framework} {found}", found if found.count(".") > 1 else f"{found}.0"))

    @cached_property
    def image(self) -> str:
        """The engine's own image, pinned by version, unless xgpt's scheduler runs."""
        if self.target == "dynamo":
            base = str(images()["dynamo"])
            return f"xgpt-dynamo:{__version__}-{base.rpartition(':')[2]}" if self.is_built else base
        if not self.is_built:
            return str(images()[self.framework]).format(version=self.engine_version)
        return f"xgpt-vllm:{__version__}-{TESTED_VERSION}" if self.framework == "vllm" else f"xgpt:{__version__}"

    @property
    def is_built(self) -> bool:
        return self.scheduler == "xgpt"

    @property
    def base(self) -> str:
        """The image on which the Dockerfile builds `image`."""
        return str(images()["dynamo" if self.target == "dynamo" else "vllm"]).format(version=TESTED_VERSION)

    @property
    def packages(self) -> list[str]:
        return [*map(pinned, BESIDE_VLLM), *[NIXL_PACKAGE] * (len(self.plan.policy.lanes) > 1)]

    @property
    def keyed(self) -> bool:
        """Whether requests need a key. The other engines have none, and Dynamo's frontend neither."""
        return self.target != "dynamo" and self.framework != "tensorrt-llm"

    @property
    def model_id(self) -> str | None:
        return model_id_of(self.plan)

    @property
    def served_name(self) -> str:
        return self.model_id or self.plan.model.name

    @property
    def draft(self) -> str | None:
        return None if self.plan.speculation is None else self.plan.speculation.draft

    @property
    def draft_id(self) -> str | None:
        return self.draft if self.draft and hub.is_id(self.draft) and not Path(self.draft).exists() else None

    @property
    def downloads(self) -> list[str]:
        return [each for each in (self.model_id, self.draft_id) if each]

    @property
    def weights_gib(self) -> int:
        return math.ceil(self.plan.model.weight_bytes(self.plan.dtype) / 2**30)

    @property
    def ready(self) -> str:
        return "/ready" if self.scheduler == "xgpt" and self.target != "dynamo" else "/health"

    @property
    def bounds(self) -> list[tuple[str, float, float]]:
        """The plan's bounds as (name, seconds, quantile)."""
        given = self.plan.constraint
        all_ = (
            ("ttft", given.ttft_s, given.ttft_quantile),
            ("tpot", given.tpot_s, given.tpot_quantile),
            ("latency", given.latency_bound_s, None),
        )
        return [(name, bound, quantile or given.quantile) for name, bound, quantile in all_ if bound is not None]

    @property
    def slowest_per_s(self) -> float | None:
        """The low end of one replica's saturated throughput, by the errors of earlier predictions."""
        low, _ = self.plan.estimate.ranges.get("throughput_rps", (None, None))
        return None if low is None else low / max(1, self.plan.replicas // self.plan.sharing_replicas)

    @property
    def addresses(self) -> list[str]:
        """Where the replicas answer, as HOST:PORT."""
        hosts = [
            f"replica-{i}:{PORT}" if self.target == "compose" else f"127.0.0.1:{PORT + 1 + i}"
            for i in range(len(self.devices_of))
        ]
        return [f"127.0.0.1:{PORT}"] if self.count == 1 and self.target == "shell" else hosts

    @property
    def visible(self) -> str:
        return visible(self.plan)

    @property
    def fetched(self) -> str | None:
        """The id of the weights that xgpt finds in the hub's cache, so that they must be there before."""
        return hub.id_of(self.plan.checkpoint)

    @property
    def follows_in_shell(self) -> bool:
        """Whether the machines other than the first run a command of their own; Ray starts xgpt's own engine there."""
        return self.group.nodes > 1 and self.framework != "xgpt"

    @property
    def front_policy(self) -> str:
        return "cache_aware" if self.plan.estimate.reuse is not None else "power_of_two"

    @property
    def devices_of(self) -> list[str]:
        """The numbers of the devices of each replica on one machine."""
        each = self.group.devices
        here = max(1, self.plan.cluster.devices_per_node // each) if self.group.nodes == 1 else 1
        numbers = [range(i * each, (i + 1) * each) for i in range(min(here, self.count))]
        return [",".join(map(str, each_range)) for each_range in numbers]


def replicas_of(plan: Plan, target: Target, name: str = "", count: int | None = None) -> EngineReplicas:
    """Return the replicas of a plan.

    Args:
        name: name of the objects. Empty means that the model's name gives it.
        count: number of replicas. None means the plan's.

    Raises:
        InputError: the target cannot run the plan.
    """
    engine_replicas = plan.replicas // plan.sharing_replicas
    scheduler = _scheduler(plan, target)
    capacity = plan.estimate.capacity
    rate = None if capacity is None else capacity.rate_per_s / engine_replicas
    if target in IN_PODS and plan.cluster.device.type != "gpu":
        accepted = f"the plan is for {plan.cluster.device.name}, but pods request GPUs: plan for a cluster of GPUs"
        raise InputError("to", target, accepted)
    if scheduler == "own" or target in IN_PODS:
        plan = plan.deployed(replicas=plan.sharing_replicas)
        number = count or engine_replicas
    else:
        plan, number = plan.deployed(replicas=count or plan.replicas), 1
    if target != "shell" and plan.checkpoint is None and model_id_of(plan) is None:
        says = "it needs weights from a directory or the hub: plan with --model DIRECTORY or --model ORGANISATION/NAME"
        raise InputError("plan.checkpoint", None, says)
    name = name or name_of(plan)
    groups = _groups(plan, target, scheduler, name)
    each = sum(group.devices * group.nodes for group in groups)
    if target == "compose" and each * number > plan.cluster.devices_per_node:
        says = f"a machine has {plan.cluster.devices_per_node} devices, not {each * number}: export `to=k8s`"
        raise InputError("to", target, says)
    most = max(number, plan.cluster.num_devices // each)
    return EngineReplicas(plan, target, name, number, most, scheduler, groups, rate)


def name_of(plan: Plan) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    return f"xgpt-{slug or 'model'}"[:MAX_NAME].rstrip("-")


def model_id_of(plan: Plan) -> str | None:
    """Return the hub id of a plan's weights, or None if they are in a directory or not known."""
    return hub.id_of(plan.checkpoint) if plan.checkpoint is not None else hub.id_of_shipped(plan.model.name)


def framework_of(plan: Plan) -> str:
    if plan.engine is not None and plan.engine.framework != "xgpt":
        return {"trtllm": "tensorrt-llm"}.get(plan.engine.framework, plan.engine.framework)
    in_vllm = plan.profile.engine == "vllm" or (plan.profile.engine is None and plan.cluster.device.type == "gpu")
    return "vllm" if plan.engine is None and in_vllm else "xgpt"


def pinned(name: str) -> str:
    """Return the requirement for a package at the installed version, or at any version if it is not installed."""
    try:
        return f"{name}=={version(name).partition('+')[0]}"
    except PackageNotFoundError:
        return name


def images() -> dict[str, str]:
    return dict(load_yaml(configs_dir() / "templates" / "images.yaml", "images"))


def _scheduler(plan: Plan, target: Target) -> Literal["own", "xgpt"]:
    """Return whose scheduler runs a plan, after checking that there is one and that the target starts its engine.

    In lanes of their own, vLLM's scheduler forms the batches: they have WAA's sizes, but not its steps.
    """
    framework = framework_of(plan)
    if target in ON_VLLM and framework != "vllm":
        others = [name for name in ("shell", "compose", "k8s") if name != "k8s" or plan.cluster.device.type == "gpu"]
        says = f"it runs vLLM, and the plan is for {framework}: export to {' or '.join(others)}"
        raise InputError("to", target, says)
    if framework != "xgpt" and engine_command(plan.deployed(replicas=plan.sharing_replicas)) is not None:
        return "own"
    if framework not in ("vllm", "xgpt") or runs_by_itself(plan):
        accepted = (
            f"no command starts this plan with {framework}'s own scheduler, which needs policy chunked, equal stages "
            "and GPUs, and vLLM or SGLang for drafts and for float8 from a checkpoint of another type: plan again "
            "with `policy=chunked`"
        )
        raise InputError("plan.policy", plan.policy.kind, accepted)
    check_engine(plan, framework)  # type: ignore[arg-type]
    if framework == "vllm":
        one = plan.deployed(replicas=1, checkpoint=plan.checkpoint or "weights")
        check_vllm_runs(one)
    return "own" if len(plan.policy.lanes) > 1 and target in ON_VLLM else "xgpt"


def _groups(plan: Plan, target: Target, scheduler: str, name: str) -> tuple[NodeGroup, ...]:
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
    if target != "shell":
        names = {"vllm": ["--served-model-name"], "sglang": ["--served-model-name"]}
        if model_id_of(plan) is None and framework in names:
            words += [*names[framework], plan.model.name]
        words += ["--host", "0.0.0.0", "--port", str(PORT)]
        words += ["--api-key", "$(API_KEY)"] if framework == "sglang" else []
    if (
        target in IN_PODS
        and framework == "vllm"
        and (plan.engine is None or TESTED_VERSION.startswith(plan.engine.version))
    ):
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
