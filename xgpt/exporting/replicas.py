"""Make the one input of all exports: replicas of an engine command.

`EngineReplicas` says what runs (a command, by whose scheduler, on which image), how often, and on how many devices.
Templates in configs/templates turn it into files.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.io import configs_dir, dump_json, load_yaml
from xgpt.core.schema import Plan
from xgpt.core.version import __version__
from xgpt.deciding.commands import engine_command
from xgpt.exporting.groups import (
    IN_PODS,
    MODEL_PATH,
    ON_VLLM,
    PORT,
    NodeGroup,
    Target,
    framework_of,
    groups_of,
    model_id_of,
)
from xgpt.serving.checking import check_vllm_runs
from xprofiler.store import check_engine
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import runs_by_itself, variables

MAX_NAME = 44
"""Largest length of an object's name without suffixes. A label can have 63 characters."""
BESIDE_VLLM = ("click", "jinja2", "optuna", "rich", "scipy")
"""Packages that serving needs and vLLM does not install."""
NIXL_PACKAGE = "nixl==1.5.1"
"""The package that sends K/V from GPU to GPU under WAA."""


@dataclass(frozen=True)
class EngineReplicas:
    """Copies of an engine command.

    Attributes:
        plan: the plan of one replica or, outside of pods, of all that xgpt serves behind its own front.
        scheduler: whether the engine's own scheduler runs, or xgpt's.
        rate_per_s: highest arrival rate of one replica within the bounds, or None if not known.
        slowest_per_s: low end of one replica's saturated throughput, by the errors of earlier predictions, or None.
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
    slowest_per_s: float | None = None
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
        built = self.scheduler == "xgpt"
        if self.target == "dynamo":
            base = str(images()["dynamo"])
            return f"xgpt-dynamo:{__version__}-{base.rpartition(':')[2]}" if built else base
        if not built:
            on_cpus = self.framework == "vllm" and self.plan.cluster.device.type != "gpu"
            return str(images()["vllm on CPUs" if on_cpus else self.framework]).format(version=self.engine_version)
        return f"xgpt-vllm:{__version__}-{TESTED_VERSION}" if self.framework == "vllm" else f"xgpt:{__version__}"

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
        names = {"ttft_s": "ttft", "tpot_s": "tpot", "latency_bound_s": "latency"}
        goals = [(goal.quantile, goal._asdict()) for goal in self.plan.constraint.goals]
        return [(name, goal[key], quantile) for key, name in names.items() for quantile, goal in goals if goal[key]]

    @property
    def addresses(self) -> list[str]:
        """Where the replicas answer, as HOST:PORT."""
        numbers = range(len(self.devices_of))
        if self.target == "compose":
            return [f"replica-{i}:{PORT}" for i in numbers]
        return [f"127.0.0.1:{PORT + (self.count > 1) + i}" for i in numbers]

    def variables_of(self, number: int) -> dict[str, str]:
        """Return the environment of a replica. Replicas on this machine have cores of their own."""
        each = self.group.devices
        devices = range(number * each, (number + 1) * each)
        return {**self.group.env, **variables(self.plan.cluster, devices, self.plan.profile.num_threads)}

    @property
    def fetched(self) -> str | None:
        """The id of the weights that xgpt finds in the hub's cache, so that they must be there before."""
        return hub.id_of(self.plan.checkpoint)

    @property
    def front(self) -> list[str]:
        """The command of vLLM's router, but for its host and workers.

        By its defaults a request is sent five times and a replica avoided after ten failures. A lost replica has the
        least work, so that all five could go to it; with fewer failures than attempts, one reaches another replica. A
        replica that is back counts within 5 s, not a minute or two: else the next one that leaves takes all with it.
        """
        policy = "cache_aware" if self.plan.estimate.reuse is not None else "power_of_two"
        tried = ["--cb-failure-threshold", "5", "--retry-max-retries", "7", "--cb-timeout-duration-secs", "5"]
        tried += ["--health-check-interval-secs", "5", "--health-success-threshold", "1"]
        return ["vllm-router", "--port", str(PORT), "--policy", policy, *tried, "--worker-startup-timeout-secs", "1800"]

    @property
    def devices_of(self) -> list[str]:
        """The numbers of the devices of each replica on one machine."""
        each = self.group.devices
        here = max(1, self.plan.cluster.devices_per_node // each) if self.group.nodes == 1 else 1
        return [",".join(map(str, range(i * each, (i + 1) * each))) for i in range(min(here, self.count))]


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
    low, _ = plan.estimate.ranges.get("throughput_rps", (None, None))
    slowest = None if low is None else low / engine_replicas
    if target in IN_PODS and plan.cluster.device.type != "gpu":
        accepted = f"the plan is for {plan.cluster.device.name}, but pods request GPUs: plan for a cluster of GPUs"
        raise InputError("to", target, accepted)
    if scheduler == "own" or target in IN_PODS:
        plan = plan.deployed(replicas=plan.sharing_replicas)
        number = count or engine_replicas
    else:
        plan, number = plan.deployed(replicas=count or plan.replicas), 1
    if target != "shell" and plan.checkpoint is None and model_id_of(plan) is None:
        says = "it needs weights from a directory or the hub: plan with `model=DIRECTORY` or `model=ORGANISATION/NAME`"
        raise InputError("plan.checkpoint", None, says)
    name = name or name_of(plan)
    groups = groups_of(plan, target, scheduler, name)
    each = sum(group.devices * group.nodes * group.count for group in groups)
    if target == "compose" and each * number > plan.cluster.devices_per_node:
        says = f"a machine has {plan.cluster.devices_per_node} devices, not {each * number}: export `to=k8s`"
        raise InputError("to", target, says)
    most = max(number, plan.cluster.num_devices // each)
    return EngineReplicas(plan, target, name, number, most, scheduler, groups, rate, slowest)


def name_of(plan: Plan) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    return f"xgpt-{slug or 'model'}"[:MAX_NAME].rstrip("-")


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
    check_engine(plan, framework)
    if framework == "vllm":
        one = plan.deployed(replicas=1, checkpoint=plan.checkpoint or "weights")
        check_vllm_runs(one)
    return "own" if len(plan.policy.lanes) > 1 and target in ON_VLLM else "xgpt"
