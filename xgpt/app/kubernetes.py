"""Kubernetes objects of a plan: built as data, written by a YAML library, so no name in a plan can become YAML."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from xgpt import __version__
from xgpt.errors import InputError
from xgpt.schema import Plan

if TYPE_CHECKING:
    import yaml

Object = dict[str, Any]

ETC = "/etc/xgpt"
MODEL_PATH = "/model"
SCRATCH = "/tmp"
"""The only place that can be written to: sockets, and what is compiled."""
USER = 10001
MAX_NAME = 48
"""Characters of an object's name, which leaves room for what is added to it; a label holds 63."""
MAX_CONFIG_BYTES = 1_000_000
"""Of a ConfigMap: the API server takes 1 MiB, names included."""
LEAVE_S, DRAIN_S, SPARE_S = 15, 60, 30
"""After SIGTERM: until no balancer sends anything any more, for what runs, and for vLLM to end in."""
START_S = 1800
"""To load weights and compile in."""


def kubernetes_files(plan: Plan) -> dict[str, str]:
    """The objects, and the Dockerfile of their image, by file name.

    Raises:
        InputError: a pod could not run the plan.
    """
    import yaml

    from xgpt.app.checking import check_vllm_runs
    from xgpt.app.packages import MAKE_WHEEL, WHEEL, beside_vllm
    from xrunner.vllm import TESTED_VERSION

    if plan.cluster.device.type != "gpu":
        raise InputError("to", "k8s", f"the plan is for {plan.cluster.device.name}; its pods ask for GPUs")
    if plan.devices_per_replica > plan.cluster.devices_per_node:
        says = "a pod lives on one node; plan for fewer devices a replica"
        raise InputError("plan.stages", plan.devices_per_replica, says)
    check_vllm_runs(plan.model_copy(update={"replicas": 1}))
    image = f"xgpt-vllm:{__version__}-{TESTED_VERSION}"
    objects = _objects(plan, image)
    name = objects[0]["metadata"]["name"]
    comment = (
        f"# A plan by xgpt {__version__} on vLLM {TESTED_VERSION}. The image comes from the Dockerfile next to this\n"
        f"# file, the weights from a volume claim, {name}-model, the clients' keys from a secret:\n"
        f"#   kubectl create secret generic {name}-keys --from-file=keys=keys.txt\n"
        "# Pods of this namespace alone may ask it (NetworkPolicy). Start: kubectl apply -f xgpt.yaml\n"
    )
    dockerfile = (
        f"# docker build -t {image} . (with {WHEEL} in this directory)\n{MAKE_WHEEL}"
        f"FROM vllm/vllm-openai:v{TESTED_VERSION}\n"
        f"COPY {WHEEL} /tmp/\n"
        f"RUN pip install {' '.join(beside_vllm(plan))} && pip install --no-deps /tmp/{WHEEL}\n"
        f"USER {USER}\n"
    )
    return {
        "xgpt.yaml": comment + yaml.dump_all(objects, Dumper=_dumper(), sort_keys=False),
        "Dockerfile": dockerfile,
    }


def _objects(plan: Plan, image: str) -> list[Object]:
    """A Deployment whose replicas are the plan's, behind a Service, and what they need."""
    from xgpt.io import dump_json

    slug = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    name = f"xgpt-{slug or 'model'}"[:MAX_NAME].rstrip("-")
    selector = {"app.kubernetes.io/name": name}
    meta = {"name": name, "labels": {**selector, "app.kubernetes.io/managed-by": "xgpt"}}
    document = dump_json(plan.model_copy(update={"replicas": 1, "checkpoint": MODEL_PATH}))
    if len(document.encode()) > MAX_CONFIG_BYTES:
        says = f"the plan takes {len(document.encode())} bytes, a ConfigMap {MAX_CONFIG_BYTES}; plan with fewer lengths"
        raise InputError("plan.workload", plan.workload.name, says)
    spec = {
        "replicas": plan.replicas,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": meta["labels"]}, "spec": _pod(plan, name, image)},
    }
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    policy = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": "http"}]}],
        "egress": [],  # it fetches nothing
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"plan.json": document}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": selector, "ports": ports}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": policy},
    ]


def _pod(plan: Plan, name: str, image: str) -> Object:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a service's variables could be taken for vLLM's
        "terminationGracePeriodSeconds": LEAVE_S + DRAIN_S + SPARE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, name, image)],
        "volumes": [
            {"name": "plan", "configMap": {"name": name}},
            {"name": "keys", "secret": {"secretName": f"{name}-keys", "defaultMode": 0o440}},
            {"name": "model", "persistentVolumeClaim": {"claimName": f"{name}-model", "readOnly": True}},
            {"name": "scratch", "emptyDir": {"sizeLimit": "16Gi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gib(_shm_gib(plan))}},
        ],
    }


def _container(plan: Plan, name: str, image: str) -> Object:
    from xgpt.app.packages import PORT

    hosts = [name, *(f"{name}.$(NAMESPACE){end}" for end in ("", ".svc", ".svc.cluster.local"))]
    command = ["python3", "-m", "xgpt", "serve", f"{ETC}/plan/plan.json", "--engine", "vllm"]
    command += ["--host", "0.0.0.0", "--port", str(PORT), "--api-key-file", f"{ETC}/keys/keys"]
    command += [word for host in hosts for word in ("--allowed-host", host)]
    command += ["--shutdown-delay", str(LEAVE_S), "--drain-timeout", str(DRAIN_S)]
    return {
        "name": "xgpt",
        "image": image,
        "command": command,
        "env": [
            {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            *({"name": key, "value": value} for key, value in _variables().items()),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": _resources(plan),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": _probe("/health", periodSeconds=10, failureThreshold=START_S // 10),
        "readinessProbe": _probe("/ready", periodSeconds=5, failureThreshold=2),
        "livenessProbe": _probe("/health", periodSeconds=10, failureThreshold=6),
        "volumeMounts": [
            {"name": "plan", "mountPath": f"{ETC}/plan", "readOnly": True},
            {"name": "keys", "mountPath": f"{ETC}/keys", "readOnly": True},
            {"name": "model", "mountPath": MODEL_PATH, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _probe(path: str, **settings: int) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5, **settings}


def _variables() -> dict[str, str]:
    """A user without a home of its own, whose files go where it may write; and no network."""
    own = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), SCRATCH)
    return own | {"USER": "xgpt", "HF_HUB_OFFLINE": "1"}


def _resources(plan: Plan) -> Object:
    """A core for each GPU's worker, and four for the endpoint and vLLM's loop; weights pass through memory once."""
    devices = plan.devices_per_replica
    weights_gib = math.ceil(plan.model.weight_bytes(plan.dtype) / 2**30)
    memory_gib = 8 + 4 * devices + _shm_gib(plan)
    gpus = {"nvidia.com/gpu": str(devices)}
    return {
        "requests": {"cpu": str(4 + devices), "memory": _gib(memory_gib), **gpus},
        "limits": {"cpu": str(2 * (4 + devices)), "memory": _gib(memory_gib + 8 + weights_gib), **gpus},
    }


def _shm_gib(plan: Plan) -> int:
    """Shared memory, through which the workers of a replica speak."""
    return 2 + 2 * plan.devices_per_replica


def _gib(count: int) -> str:
    return f"{count}Gi"


def _dumper() -> type[yaml.SafeDumper]:
    """Writes texts of several lines as they are, and what occurs twice twice."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper
