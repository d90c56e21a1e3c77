"""Write a plan as Kubernetes objects: a Deployment, or a LeaderWorkerSet if a replica spans several nodes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xgpt.core.version import __version__
from xgpt.exporting.pods import (
    DRAIN_S,
    ETC,
    LEAVE_S,
    PORT,
    Names,
    Object,
    PodSpec,
    config_map,
    disruption_budget,
    mounts_draft,
    network_policy,
    of_pod,
    of_secret,
    pod,
    service,
    to_yaml,
    vllm_dockerfile,
)
from xgpt.serving.checking import check_vllm_runs, nodes_of
from xprofiler.store import check_engine
from xrunner.vllm import TESTED_VERSION

RAY_PORT = 6379
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
GROUP = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
LEADER_LABELS = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}

MEET = ["--nnodes", "$(LWS_GROUP_SIZE)", "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
"""Options with which vLLM in a pod finds the other pods of the group."""
RAY_HEAD = f"ray start --head --port={RAY_PORT} --disable-usage-stats"
RAY_WORKER = ["ray", "start", f"--address=$(LWS_LEADER_ADDRESS):{RAY_PORT}", "--disable-usage-stats", "--block"]
"""The commands that make the pods of a group a Ray cluster for xgpt's own engine."""

TOLERANCE = 0.1
"""Relative deviation up to which Kubernetes' autoscaler does nothing by default."""


def kubernetes_files(plan: Plan) -> dict[str, str]:
    """Return contents by file name: the objects, a kustomization, an autoscaler and, for vLLM, the image's Dockerfile.

    Raises:
        InputError: pods cannot run the plan.
    """
    check_deployable(plan, "k8s")
    names = Names.of(plan)
    return replica_files(plan, names) | _autoscaler(plan, names)


def check_deployable(plan: Plan, target: str) -> None:
    """Check that a plan is for GPUs and has weights.

    Raises:
        InputError: the plan is not for GPUs, or has no weights.
    """
    if plan.cluster.device.type != "gpu":
        raise InputError(
            "to",
            target,
            f"the plan is for {plan.cluster.device.name}, but pods request GPUs: plan for a cluster of GPUs",
        )
    if plan.checkpoint is None:
        says = "pods need weights from a directory or the hub: plan with --model DIRECTORY or --model ORGANISATION/NAME"
        raise InputError("plan.checkpoint", None, says)


def num_nodes(plan: Plan) -> int:
    """Return the number of nodes that a replica spans.

    Raises:
        InputError: the replica's devices do not divide evenly among the nodes.
    """
    return nodes_of(plan, plan.devices_per_replica)


def replica_files(plan: Plan, names: Names) -> dict[str, str]:
    """Return the files of `kubernetes_files` except the autoscaler. The objects have the names in `names`.

    A Deployment has a pod for each replica. If a replica spans nodes, a LeaderWorkerSet instead has a group of pods for
    each replica: all pods compute, and the leader answers requests.
    """
    in_vllm, nodes = plan.profile.engine != "xgpt", num_nodes(plan)
    check_engine(plan, "vllm" if in_vllm else "xgpt")
    if in_vllm:
        check_vllm_runs(plan.deployed(replicas=1))
        if nodes > 1 and len(plan.policy.lanes) > 1:
            accepted = "its lanes need separate groups: use `--to llm-d` or `--to dynamo`"
            raise InputError("plan.policy", plan.policy.kind, accepted)
    image = f"xgpt-vllm:{__version__}-{TESTED_VERSION}" if in_vllm else f"xgpt:{__version__}"
    engine, instructions, env = f"vLLM {TESTED_VERSION}" if in_vllm else "its own engine", "", list[Object]()
    meet = ["--engine", "vllm", *(MEET if nodes > 1 else ())] if in_vllm else ["--ray", "auto"] if nodes > 1 else []
    leads, follows = serving_command(names, PORT, meet), follower_command(meet)
    if nodes > 1:
        engine += f", a replica on {nodes} nodes"
        instructions = "# The cluster needs the LeaderWorkerSet controller.\n"
    if nodes > 1 and not in_vllm:
        leads, follows = ["sh", "-c", f"{RAY_HEAD} && exec {shlex.join(leads)}"], RAY_WORKER
        env = [{"name": "RAY_AUTH_MODE", "value": "token"}, of_secret(TOKEN_VARIABLE, f"{names.name}-cluster", "token")]
        instructions = (
            f"# The pods of a group are a Ray cluster, whose members share a token:\n#   kubectl create secret generic "
            f"{names.name}-cluster --from-literal=token=$(openssl rand -hex 32)\n{instructions}"
        )
    namespace = of_pod("NAMESPACE", "metadata.namespace")
    devices, ports = plan.devices_per_replica // nodes, {"http": PORT}
    leader = pod(plan, names, PodSpec(image, leads, devices, ports=ports, probed="http", env=[namespace, *env]))
    if nodes > 1:
        worker = pod(plan, names, PodSpec(image, follows, devices, mounts_keys=False, env=env))
        replicas = group_of_pods(plan, names, nodes, leader, worker, names.meta())
    else:
        replicas = deployment(plan, names.selector, leader, names.meta())
    objects = [
        config_map(plan, names),
        replicas,
        service(names, LEADER_LABELS if nodes > 1 else None),
        disruption_budget(names),
        network_policy(plan, names, [{"protocol": "TCP", "port": "http"}], among=nodes > 1),
    ]
    origin = "next to this file" if in_vllm else "of xgpt's repository, built with PyTorch for CUDA"
    comment = (
        f"# A plan by xgpt {__version__} on {engine}. The image {image}\n# comes from the Dockerfile {origin};\n"
        f"# {weights_note(plan, names)};\n# the clients' keys come from a secret:\n"
        f"#   kubectl create secret generic {names.name}-keys --from-file=keys=keys.txt\n{instructions}"
        "# Only pods of this namespace may send requests (NetworkPolicy). Start: kubectl apply -k .\n"
    )
    files = {"xgpt.yaml": to_yaml(objects, comment), "kustomization.yaml": kustomization(["xgpt.yaml"])}
    return files | ({"Dockerfile": vllm_dockerfile(plan, image)} if in_vllm else {})


def deployment(plan: Plan, selector: Mapping[str, str], spec: Object, meta: Object) -> Object:
    template = {"metadata": {"labels": meta["labels"]}, "spec": spec}
    deployed = {"replicas": plan.replicas, "selector": {"matchLabels": selector}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": deployed}


def group_of_pods(plan: Plan, names: Names, size: int, leader: Object, worker: Object, meta: Object) -> Object:
    """Return a LeaderWorkerSet. Each replica has a leader and workers, which start and end together.

    Args:
        size: number of pods of a replica, leader included.
    """
    template = {
        "size": size,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": {"metadata": {"labels": meta["labels"]}, "spec": leader},
        "workerTemplate": {"metadata": {"labels": names.meta()["labels"]}, "spec": worker},
    }
    return {**GROUP, "metadata": meta, "spec": {"replicas": plan.replicas, "leaderWorkerTemplate": template}}


def serving_command(names: Names, port: int, more: Sequence[str]) -> list[str]:
    hosts = [names.name, *(f"{names.name}.$(NAMESPACE){end}" for end in ("", ".svc", ".svc.cluster.local"))]
    command = ["python3", "-m", "xgpt", "serve", f"{ETC}/plan/plan.json", *more]
    command += ["--host", "0.0.0.0", "--port", str(port), "--api-key-file", f"{ETC}/keys/keys"]
    command += [word for host in hosts for word in ("--allowed-host", host)]
    return [*command, "--shutdown-delay", str(LEAVE_S), "--drain-timeout", str(DRAIN_S)]


def follower_command(meet: Sequence[str]) -> list[str]:
    return ["python3", "-m", "xgpt", "serve", f"{ETC}/plan/plan.json", *meet]


def weights_note(plan: Plan, names: Names) -> str:
    draft = f";\n# the draft's weights come from a volume claim, {names.name}-draft" if mounts_draft(plan) else ""
    if (model_id := hub.id_of(plan.checkpoint)) is not None:
        token = f"a token for it: secret {names.name}-hub, key token"
        return f"weights are fetched by their id, {model_id} ({token}){draft}"
    return f"the weights come from a volume claim, {names.name}-model{draft}"


def _autoscaler(plan: Plan, names: Names) -> dict[str, str]:
    """Return an autoscaler that overlays can add.

    The autoscaler adds replicas when the arrival rate per replica exceeds the highest rate at which a replica keeps the
    plan's bounds.
    """
    if plan.estimate.capacity is None:
        return {}
    rate = plan.estimate.capacity.rate_per_s / plan.replicas / (1 + TOLERANCE)
    metric = {
        "metric": {"name": "xgpt_arrival_rate"},
        "target": {"type": "AverageValue", "averageValue": f"{1000 * rate:.0f}m"},
    }
    target = GROUP if num_nodes(plan) > 1 else {"apiVersion": "apps/v1", "kind": "Deployment"}
    spec = {
        "scaleTargetRef": {**target, "name": names.name},
        "minReplicas": 1,
        "maxReplicas": max(plan.replicas, plan.cluster.num_devices // plan.devices_per_replica),
        "metrics": [{"type": "Pods", "pods": metric}],
    }
    head = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    document = {**head, "metadata": names.meta(), "spec": spec}
    comment = (
        "# Add it to the resources of kustomization.yaml if no other controller sets the replicas. It needs an "
        "adapter\n# for Prometheus that offers the pods' xgpt_arrival_rate as a custom metric. The target is the "
        f"arrival rate at\n# which a replica keeps the plan's bounds, less {TOLERANCE:.0%}, since Kubernetes ignores "
        "smaller changes.\n"
    )
    return {"autoscaler.yaml": to_yaml([document], comment)}


def kustomization(resources: list[str]) -> str:
    """Return a kustomization of these resources. Overlays can add a namespace, images and autoscalers to it."""
    return to_yaml([{"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}])
