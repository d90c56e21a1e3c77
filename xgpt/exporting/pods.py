"""Write the parts that several exports share: the pods that run a plan, other Kubernetes objects, and the packages in
images.

Pods run as a user without privileges on a read-only root file system. The plan comes from a ConfigMap, keys come from a
Secret, and weights come from a volume claim or, if the model has a Hugging Face id, from the hub.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan
from xgpt.core.version import __version__
from xrunner.vllm import TESTED_VERSION

Object = dict[str, Any]

ETC = "/etc/xgpt"
MODEL_PATH = "/model"
DRAFT_PATH = "/draft"
SCRATCH = "/tmp"
"""The only writable directory, for sockets and compiled code."""
USER = 10001
MAX_NAME = 48
"""Largest length of an object's name without suffixes. A label can have 63 characters."""
MAX_CONFIG_BYTES = 1_000_000
"""Largest size of a ConfigMap's data. The API server accepts 1 MiB, names included."""
LEAVE_S, DRAIN_S, SPARE_S = 15, 60, 30
"""Lengths, in seconds, of three periods after SIGTERM: load balancers stop sending, running requests finish, and the
engine ends.
"""
START_S = 1800
"""A pod must load weights and compile within this number of seconds."""
DOWNLOADS = {"protocol": "TCP", "port": 443}
NAMES = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
"""The ports of DNS."""


@dataclass(frozen=True)
class Names:
    """The names and labels of a plan's objects.

    Attributes:
        selector: labels that select only the plan's pods.
    """

    name: str
    selector: dict[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Names:
        slug = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
        name = f"xgpt-{slug or 'model'}"[:MAX_NAME].rstrip("-")
        return cls(name, {"app.kubernetes.io/name": name})

    def meta(self, end: str = "", labels: Mapping[str, str] | None = None) -> Object:
        all_labels = {**self.selector, "app.kubernetes.io/managed-by": "xgpt", **(labels or {})}
        return {"name": f"{self.name}{end}", "labels": all_labels}


@dataclass(frozen=True)
class PodSpec:
    """What a pod's main container runs, and what it needs.

    Attributes:
        probed: name of the port that answers probes. None means no probes: such a pod ends when its engine ends.
        alive, ready: paths of the two probes: whether the container runs, and whether it accepts requests.
        mounts_keys, mounts_plan: whether a file with the clients' keys is mounted, and whether the plan is mounted.
    """

    image: str
    command: Sequence[str]
    devices: int
    ports: Mapping[str, int] = field(default_factory=dict)
    probed: str | None = None
    alive: str = "/health"
    ready: str = "/ready"
    mounts_keys: bool = True
    mounts_plan: bool = True
    env: Sequence[Object] = ()
    name: str = "xgpt"


def config_map(plan: Plan, names: Names) -> Object:
    """Return a ConfigMap with the plan of one replica. The plan's checkpoint is replaced by the weights' directory in
    pods.

    Raises:
        InputError: the plan is too large for a ConfigMap.
    """
    document = dump_json(plan.deployed(replicas=1, checkpoint=MODEL_PATH))
    if len(document.encode()) > MAX_CONFIG_BYTES:
        says = (
            f"the plan has {len(document.encode())} bytes, but a ConfigMap holds {MAX_CONFIG_BYTES}; plan with fewer "
            "lengths"
        )
        raise InputError("plan.workload", plan.workload.name, says)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": names.meta(), "data": {"plan.json": document}}


def draft_directory(plan: Plan) -> str | None:
    """Return the directory of the draft's weights, or None if there is no draft model or if the engine downloads
    it.
    """
    draft = None if plan.speculation is None else plan.speculation.draft
    return None if draft is None or (hub.is_id(draft) and not Path(draft).exists()) else draft


def mounts_draft(plan: Plan) -> bool:
    """Return whether pods mount the draft's weights. They do if these are in a directory, or if the model's weights are
    mounted.
    """
    has_draft = plan.speculation is not None and plan.speculation.draft is not None
    return draft_directory(plan) is not None or (has_draft and hub.id_of(plan.checkpoint) is None)


def with_mounted_draft(plan: Plan) -> Plan:
    assert plan.speculation is not None
    return plan.deployed(speculation=plan.speculation.but(draft=DRAFT_PATH))


def pod(plan: Plan, names: Names, work: PodSpec, *, fetches: bool = True) -> Object:
    """Return a pod's specification.

    Args:
        fetches: if the model has a hub id, whether an init container downloads the weights to MODEL_PATH. Otherwise the
            main container downloads them.
    """
    model_id = hub.id_of(plan.checkpoint)
    shm = shared_memory_gib(work.devices)
    volumes: list[Object] = [{"name": "plan", "configMap": {"name": names.name}}] if work.mounts_plan else []
    if work.mounts_keys:
        secret = {"secretName": f"{names.name}-keys", "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": secret})
    if model_id is None:
        claim = {"claimName": f"{names.name}-model", "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    elif fetches:
        volumes.append({"name": "model", "emptyDir": {"sizeLimit": _gib(_weights_gib(plan) + 8)}})
    if work.devices and mounts_draft(plan):
        claim = {"claimName": f"{names.name}-draft", "readOnly": True}
        volumes.append({"name": "draft", "persistentVolumeClaim": claim})
    scratch = 16 + (_weights_gib(plan) + 8 if model_id is not None and not fetches else 0)
    volumes += [
        {"name": "scratch", "emptyDir": {"sizeLimit": _gib(scratch)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gib(shm)}},
    ]
    fetch = model_id is not None and fetches
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # Kubernetes' variables for services could have the same names as vLLM's
        "terminationGracePeriodSeconds": LEAVE_S + DRAIN_S + SPARE_S,
        "securityContext": pod_security() | {"fsGroup": USER},
        **({"initContainers": [_fetching(str(model_id), names, work.image)]} if fetch else {}),
        "containers": [_container(plan, names, work, has_model=model_id is None or fetches)],
        "volumes": volumes,
    }


def _container(plan: Plan, names: Names, work: PodSpec, *, has_model: bool) -> Object:
    mounts: list[Object] = []
    if work.mounts_plan:
        mounts.append({"name": "plan", "mountPath": f"{ETC}/plan", "readOnly": True})
    if work.mounts_keys:
        mounts.append({"name": "keys", "mountPath": f"{ETC}/keys", "readOnly": True})
    if has_model:
        mounts.append({"name": "model", "mountPath": MODEL_PATH, "readOnly": True})
    if work.devices and mounts_draft(plan):
        mounts.append({"name": "draft", "mountPath": DRAFT_PATH, "readOnly": True})
    mounts += [{"name": "scratch", "mountPath": SCRATCH}, {"name": "shm", "mountPath": "/dev/shm"}]
    probes: Object = {}
    if work.probed is not None:
        probes = {
            "startupProbe": _probe(work, work.alive, periodSeconds=10, failureThreshold=START_S // 10),
            "readinessProbe": _probe(work, work.ready, periodSeconds=5, failureThreshold=2),
            "livenessProbe": _probe(work, work.alive, periodSeconds=10, failureThreshold=6),
        }
    offline = [] if not has_model else [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    token = [] if has_model else [_hub_token(names)]
    return {
        "name": work.name,
        "image": work.image,
        "command": list(work.command),
        "env": [*work.env, *_own_variables(), *offline, *token],
        **({"ports": [{"name": n, "containerPort": p} for n, p in work.ports.items()]} if work.ports else {}),
        "resources": _resources(plan, work.devices),
        "securityContext": container_security(),
        **probes,
        "volumeMounts": mounts,
    }


def _fetching(model_id: str, names: Names, image: str) -> Object:
    return {
        "name": "fetch",
        "image": image,
        "command": ["hf", "download", model_id, "--local-dir", MODEL_PATH],
        "env": [*_own_variables(), _hub_token(names)],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_PATH},
            {"name": "scratch", "mountPath": SCRATCH},
        ],
    }


def pod_security() -> Object:
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER}
    return user | {"seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def of_secret(variable: str, secret: str, key: str, *, optional: bool = False) -> Object:
    ref = {"name": secret, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": ref}}


def of_pod(variable: str, path: str) -> Object:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _hub_token(names: Names) -> Object:
    return of_secret("HF_TOKEN", f"{names.name}-hub", "token", optional=True)


def _own_variables() -> list[Object]:
    variables = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), SCRATCH)
    return [{"name": key, "value": value} for key, value in (variables | {"USER": "xgpt"}).items()]


def network_policy(
    plan: Plan, names: Names, ports: Sequence[Object], *, among: bool = False, beyond: Sequence[Object] = ()
) -> Object:
    """Return a NetworkPolicy for a plan's pods. Pods of the namespace can reach them only on `ports`. They can reach
    only `beyond`, the hub if weights come from it and, with `among`, each other.
    """
    ingress: list[Object] = [{"from": [{"podSelector": {}}], "ports": list(ports)}]
    egress: list[Object] = []
    if among:
        peers = [{"podSelector": {"matchLabels": names.selector}}]
        ingress.append({"from": peers})
        egress.append({"to": peers})
    reached = [*beyond, *([DOWNLOADS] if hub.id_of(plan.checkpoint) is not None else [])]
    if among or reached:
        egress.append({"ports": [*NAMES, *reached]})
    spec = {
        "podSelector": {"matchLabels": names.selector},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": names.meta(), "spec": spec}


def disruption_budget(names: Names) -> Object:
    """Return a PodDisruptionBudget. When nodes are drained, 5% of the pods may be unavailable at the same time, but at
    least one.

    With one pod at a time, draining a thousand replicas would take hours. With 5%, requests still keep the bounds.
    """
    spec = {"maxUnavailable": "5%", "selector": {"matchLabels": names.selector}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": names.meta(), "spec": spec}


def service(names: Names, selector: Mapping[str, str] | None = None) -> Object:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    spec = {"selector": {**names.selector, **(selector or {})}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": names.meta(), "spec": spec}


def _probe(work: PodSpec, path: str, **settings: int) -> Object:
    return {"httpGet": {"path": path, "port": work.probed}, "timeoutSeconds": 5, **settings}


def _resources(plan: Plan, devices: int) -> Object:
    """Return a container's resources: its GPUs, a core for each, four more cores for the endpoint and the engine's
    loop, and memory that suffices to load weights.
    """
    memory_gib = 8 + 4 * devices + shared_memory_gib(devices)
    gpus = {"nvidia.com/gpu": str(devices)} if devices else {}
    passing = 8 + (_weights_gib(plan) if devices else 0)
    return {
        "requests": {"cpu": str(4 + devices), "memory": _gib(memory_gib), **gpus},
        "limits": {"cpu": str(2 * (4 + devices)), "memory": _gib(memory_gib + passing), **gpus},
    }


def _weights_gib(plan: Plan) -> int:
    return math.ceil(plan.model.weight_bytes(plan.dtype) / 2**30)


def shared_memory_gib(devices: int) -> int:
    """Return the size in GiB of the shared memory through which a pod's workers communicate."""
    return 2 + 2 * devices


def _gib(count: int) -> str:
    return f"{count}Gi"


def to_yaml(objects: Sequence[Object], comment: str = "") -> str:
    """Return a comment and objects as YAML documents.

    Names in a plan cannot inject YAML: the YAML library quotes texts, and every line of the comment begins with #.
    """

    class Dumper(yaml.SafeDumper):
        """Writes text of several lines as a block, and repeats values instead of using aliases."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    lines = (line if line.startswith("#") else f"# {line}" for line in comment.splitlines())
    documents = yaml.dump_all(json.loads(json.dumps(objects)), Dumper=Dumper, sort_keys=False)
    return "".join(f"{line}\n" for line in lines) + documents


WHEEL = f"xgpt_serve-{__version__}-py3-none-any.whl"
MAKE_WHEEL = "# (pip wheel --no-deps . makes it in xgpt's repository)\n"
BESIDE_VLLM = ("click", "optuna", "rich", "scipy")
"""Packages that serving needs and vLLM does not install."""
PORT = 8000
NIXL_PACKAGE = "nixl==1.5.1"
"""The package that sends K/V from GPU to GPU under WAA."""


def beside_vllm(plan: Plan) -> list[str]:
    moves_kv = plan.cluster.device.type == "gpu" and len(plan.policy.lanes) > 1
    return [*map(pinned, BESIDE_VLLM), *[NIXL_PACKAGE] * moves_kv]


def vllm_dockerfile(plan: Plan, image: str, base: str | None = None) -> str:
    """Return the Dockerfile of an image with xgpt next to vLLM.

    Args:
        base: an image that contains vLLM. The build then checks vLLM's version in it. None means vLLM's own image.
    """
    check = (
        f"RUN python3 -c \"import vllm; assert vllm.__version__.startswith('{TESTED_VERSION}'), vllm.__version__\"\n"
    )
    return (
        f"# docker build -t {image} . (with {WHEEL} in this directory)\n{MAKE_WHEEL}"
        f"FROM {base or f'vllm/vllm-openai:v{TESTED_VERSION}'}\n{'' if base is None else check}"
        f"COPY {WHEEL} /tmp/\n"
        f"RUN pip install {' '.join(beside_vllm(plan))} && pip install --no-deps /tmp/{WHEEL}\n"
        f"USER {USER}\n"
    )


def pinned(name: str) -> str:
    """Return the requirement for a package at the installed version, or at any version if the package is not
    installed.
    """
    try:
        return f"{name}=={version(name).partition('+')[0]}"
    except PackageNotFoundError:
        return name
