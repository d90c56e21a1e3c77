"""Write a fleet as Kubernetes objects: replicas, the recommender, and autoscalers that follow the recommender."""

from __future__ import annotations

from xgpt.autoscaling.recommend import WANTED, fleet_name
from xgpt.core.errors import InputError
from xgpt.core.io import dump_json
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.version import __version__
from xgpt.exporting.kubernetes import (
    GROUP,
    LEADER_LABELS,
    check_deployable,
    kustomization,
    num_nodes,
    replica_files,
)
from xgpt.exporting.pods import (
    MAX_CONFIG_BYTES,
    PORT,
    Names,
    Object,
    container_security,
    of_secret,
    pod_security,
    to_yaml,
)

PLACE = "/etc/xgpt/fleet"
METRIC_PORT = 8471
PROMETHEUS = "http://prometheus-server.monitoring"
"""Address of Prometheus in the exported ScaledObjects. Users replace this address with their own."""
TOLERATED = 10
"""Up to this number of replicas, one replica more is a change by at least 10%, which Kubernetes' autoscaler notices."""


def fleet_files(fleet: FleetPlan) -> dict[str, str]:
    """Return the files of a fleet: a directory for each kind of replica, the recommender, autoscalers, and a
    kustomization.

    Raises:
        InputError: pods cannot run one of the plans, or fleet.json is too large for a ConfigMap.
    """
    base = fleet_name(fleet)
    document = dump_json(fleet)
    if len(document.encode()) > MAX_CONFIG_BYTES:
        says = (
            f"fleet.json has {len(document.encode())} bytes, but a ConfigMap holds at most {MAX_CONFIG_BYTES}: plan "
            "the fleet again with a longer --interval"
        )
        raise InputError("fleet.intervals", len(fleet.intervals), says)
    numbers = range(len(fleet.kinds))
    files = {
        "fleet.json": document,
        "recommender.yaml": to_yaml(_recommender(fleet, base, document), _comment(base)),
        "hpa.yaml": to_yaml([_hpa(fleet, base, number) for number in numbers], HPA_COMMENT),
        "keda.yaml": to_yaml([_scaled_object(fleet, base, number) for number in numbers], KEDA_COMMENT),
    }
    for number, kind in enumerate(fleet.kinds):
        check_deployable(kind.plan, "k8s")
        names = _names(base, number)
        plan = kind.plan.deployed(replicas=max(1, fleet.intervals[0].replicas[number]))
        files |= {f"kind{number}/{name}": text for name, text in replica_files(plan, names).items()}
    resources = ["recommender.yaml", *(f"kind{number}" for number in numbers)]
    return {**files, "kustomization.yaml": kustomization(resources)}


def _names(base: str, number: int) -> Names:
    labels = {"app.kubernetes.io/part-of": base, "xgpt-kind": str(number)}
    return Names(f"{base}-{number}", {"app.kubernetes.io/name": f"{base}-{number}", **labels})


def _comment(base: str) -> str:
    return (
        f"# The recommender of a fleet by xgpt {__version__}. It reads the pods' metrics with an admin key:\n"
        f"#   kubectl create secret generic {base}-recommender --from-literal=key=KEY\n"
        f"# It publishes {WANTED} and changes nothing itself: add either hpa.yaml or keda.yaml to the\n"
        "# resources of kustomization.yaml. Each directory next to this file is a kind of replica.\n"
        "# Start: kubectl apply -k .\n"
    )


HPA_COMMENT = f"""# Needs {WANTED} as an external metric: Prometheus scrapes the recommender's Service, and the
# configuration of Prometheus' adapter has the rule
#   externalRules:
#   - {{seriesQuery: {WANTED}, metricsQuery: max(<<.Series>>{{<<.LabelMatchers>>}}), resources: {{namespaced: false}}}}
# Kubernetes runs at least one replica of each kind, and ignores changes by less than a tenth unless `tolerance` is 0,
# which takes version 1.35 or newer.
"""
KEDA_COMMENT = """# Needs KEDA, and a Prometheus that scrapes the recommender's Service: change serverAddress to its
# address. Kinds may go down to zero replicas.
"""


def _recommender(fleet: FleetPlan, base: str, document: str) -> list[Object]:
    name = f"{base}-recommender"
    selector = {"app.kubernetes.io/name": name}
    meta = {"name": name, "labels": {**selector, "app.kubernetes.io/managed-by": "xgpt"}}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # only one process may record the load
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": meta["labels"]}, "spec": _pod(fleet, name, base)},
    }
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRIC_PORT)}
    ports = [{"name": "metrics", "port": METRIC_PORT, "targetPort": "metrics"}]
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"fleet.json": document}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**meta, "annotations": scraped},
            "spec": {"selector": selector, "ports": ports},
        },
        *(_pods_of(fleet, base, number) for number in range(len(fleet.kinds))),
    ]


def _pods_of(fleet: FleetPlan, base: str, number: int) -> Object:
    """Return a headless Service: its name resolves to the addresses of all ready pods of a kind that answer
    requests.
    """
    names = _names(base, number)
    leaders = LEADER_LABELS if num_nodes(fleet.kinds[number].plan) > 1 else {}
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    spec = {"clusterIP": "None", "selector": {**names.selector, **leaders}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": names.meta("-pods"), "spec": spec}


def _pod(fleet: FleetPlan, name: str, base: str) -> Object:
    command = ["python3", "-m", "xgpt", "autoscale", f"{PLACE}/fleet.json", "--day-begins", "00:00"]
    command += ["--host", "0.0.0.0", "--port", str(METRIC_PORT)]
    for number, kind in enumerate(fleet.kinds):
        command += ["--scrape", f"{kind.name}=http://{base}-{number}-pods:{PORT}"]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": [
            {
                "name": "recommender",
                "image": f"xgpt:{__version__}",
                "command": command,
                "env": [of_secret("XGPT_API_KEY", name, "key", optional=True), {"name": "HOME", "value": "/tmp"}],
                "ports": [{"name": "metrics", "containerPort": METRIC_PORT}],
                "resources": {
                    "requests": {"cpu": "100m", "memory": "512Mi"},
                    "limits": {"cpu": "2", "memory": "1Gi"},
                },
                "securityContext": container_security(),
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


def _scaled(fleet: FleetPlan, base: str, number: int) -> tuple[Object, int]:
    """Return a reference to the object that a kind's autoscaler scales, and the kind's largest number of
    replicas.
    """
    kind = fleet.kinds[number]
    target = GROUP if num_nodes(kind.plan) > 1 else {"apiVersion": "apps/v1", "kind": "Deployment"}
    planned = max(interval.replicas[number] for interval in fleet.intervals)
    most = max(1, 2 * planned, kind.plan.cluster.num_devices // kind.num_devices)
    return {**target, "name": _names(base, number).name}, most


DOWN: Object = {"stabilizationWindowSeconds": 0}
"""How autoscalers remove replicas: at once, since the recommender itself waits before it recommends fewer."""


def _hpa(fleet: FleetPlan, base: str, number: int) -> Object:
    target, most = _scaled(fleet, base, number)
    metric = {"name": WANTED, "selector": {"matchLabels": {"fleet": base, "kind": str(number)}}}
    each = {"type": "AverageValue", "averageValue": "1"}
    exact = {"tolerance": "0"} if most > TOLERATED else {}
    behavior = {"scaleDown": {**DOWN, **exact}, **({"scaleUp": exact} if exact else {})}
    spec = {
        "scaleTargetRef": target,
        "minReplicas": 1,
        "maxReplicas": most,
        "metrics": [{"type": "External", "external": {"metric": metric, "target": each}}],
        "behavior": behavior,
    }
    meta = _names(base, number).meta()
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": meta, "spec": spec}


def _scaled_object(fleet: FleetPlan, base: str, number: int) -> Object:
    target, most = _scaled(fleet, base, number)
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": PROMETHEUS,
            "query": f'max({WANTED}{{fleet="{base}",kind="{number}"}})',
            "threshold": "1",
        },
    }
    spec = {
        "scaleTargetRef": target,
        "minReplicaCount": 0,
        "maxReplicaCount": most,
        "pollingInterval": 15,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": DOWN}}},
        "triggers": [trigger],
    }
    meta = _names(base, number).meta()
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": meta, "spec": spec}
