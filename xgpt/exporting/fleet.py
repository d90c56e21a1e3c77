"""A fleet on Kubernetes: the objects of each kind of replica, and the controller with the rights that it needs."""

from __future__ import annotations

from xgpt.core.errors import InputError
from xgpt.core.io import dump_json
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.version import __version__
from xgpt.exporting.kubernetes import check_deployable, kustomization, replica_files
from xgpt.exporting.pods import MAX_CONFIG_BYTES, USER, Names, Object, to_yaml
from xgpt.operating.operating import fleet_name

PLACE = "/etc/xgpt/fleet"


def fleet_files(fleet: FleetPlan) -> dict[str, str]:
    """Return the objects of each kind in a directory of its own, those of the controller, and a kustomization of all.

    Raises:
        InputError: pods could not run one of the plans, a replica spans nodes, or the fleet is too large a file.
    """
    base = fleet_name(fleet)
    document = dump_json(fleet)
    if len(document.encode()) > MAX_CONFIG_BYTES:
        says = f"the fleet takes {len(document.encode())} bytes, a ConfigMap {MAX_CONFIG_BYTES}; give longer intervals"
        raise InputError("fleet.intervals", len(fleet.intervals), says)
    files = {"fleet.json": document, "controller.yaml": _comment(base) + to_yaml(_controller(base, document))}
    for number, kind in enumerate(fleet.kinds):
        check_deployable(kind.plan, "k8s")
        labels = {"app.kubernetes.io/part-of": base, "xgpt-kind": str(number)}
        names = Names(f"{base}-{number}", {"app.kubernetes.io/name": f"{base}-{number}", **labels})
        plan = kind.plan.model_copy(update={"replicas": max(1, fleet.intervals[0].replicas[number])})
        files |= {f"kind{number}/{name}": text for name, text in replica_files(plan, names).items()}
    resources = ["controller.yaml", *(f"kind{number}" for number in range(len(fleet.kinds)))]
    return {**files, "kustomization.yaml": kustomization(resources)}


def _comment(base: str) -> str:
    return (
        f"# The controller of a fleet by xgpt {__version__}. It reads the pods' metrics with an admin key:\n"
        f"#   kubectl create secret generic {base}-controller --from-literal=key=KEY\n"
        "# The directories next to this file are the kinds of replicas. Start: kubectl apply -k .\n"
    )


def _controller(base: str, document: str) -> list[Object]:
    name = f"{base}-controller"
    selector = {"app.kubernetes.io/name": name}
    meta = {"name": name, "labels": {**selector, "app.kubernetes.io/managed-by": "xgpt"}}
    rules = [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "list"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "patch"]},
    ]
    rights = "rbac.authorization.k8s.io"
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two controllers would each order what is missing
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": meta["labels"]}, "spec": _pod(name, base)},
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rights}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{rights}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rights, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"fleet.json": document}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec},
    ]


def _pod(name: str, base: str) -> Object:
    command = ["python3", "-m", "xgpt", "autoscale", f"{PLACE}/fleet.json", "--driver", "kubernetes"]
    key = {"secretKeyRef": {"name": name, "key": "key", "optional": True}}
    return {
        "serviceAccountName": name,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "controller",
                "image": f"xgpt:{__version__}",
                "command": [*command, "--name", base, "--day-begins", "00:00"],
                "env": [{"name": "XGPT_API_KEY", "valueFrom": key}, {"name": "HOME", "value": "/tmp"}],
                "resources": {
                    "requests": {"cpu": "100m", "memory": "512Mi"},
                    "limits": {"cpu": "2", "memory": "1Gi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "fleet", "mountPath": PLACE, "readOnly": True},
                    {"name": "scratch", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            {"name": "fleet", "configMap": {"name": name}},
            {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
        ],
    }
