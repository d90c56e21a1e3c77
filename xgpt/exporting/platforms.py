"""Write a plan for vLLM as deployment objects of Dynamo or llm-d.

A plan with one lane runs with its own schedule: Dynamo loads xgpt's scheduler class into vLLM, and llm-d's pods run
`xgpt serve`. The two lanes of WAA become prefill workers and decode workers. Their sizes and numbers are the plan's.
vLLM's own scheduler then forms batches, and the platform's router replaces xgpt's front.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from xgpt.checkpoints import hub
from xgpt.core.schema import LaneName, Plan
from xgpt.core.version import __version__
from xgpt.deciding.commands import vllm_draft
from xgpt.exporting import pods
from xgpt.exporting.kubernetes import (
    MEET,
    check_deployable,
    deployment,
    follower_command,
    group_of_pods,
    kustomization,
    nodes_of,
    serving_command,
    weights_note,
)
from xgpt.exporting.pods import ETC, MODEL_PATH, Names, Object, PodSpec, of_pod, of_secret, vllm_dockerfile
from xgpt.serving.checking import check_vllm_runs
from xprofiler.store import check_engine
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import SCHEDULER, launch, launch_lane, own_arguments, partition_of, runs_by_itself

DYNAMO = "1.5.0"
DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime"
SIDECAR = "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.10.0"
ROUTER_CHART = "oci://ghcr.io/llm-d/charts/llm-d-router-standalone --version v0.10.0"
ROLES: dict[LaneName, str] = {"encode": "prefill", "decode": "decode"}
NIXL_PORT, DECODE_PORT, FRONT_PORT = 5600, 8200, 8000
"""llm-d's proxy listens on `FRONT_PORT` and connects to vLLM in the decode lane at `DECODE_PORT`."""
API_SERVER: list[Object] = [{"protocol": "TCP", "port": port} for port in (443, 6443)]
ANSWERS = {"llm-d.ai/inference-serving": "true"}
"""Label of the pods that answer requests."""
SYSTEM_PORT = 9090
"""Port on which Dynamo's workers answer probes."""
ROUTER_PORT = 8081
"""Port on which llm-d's router accepts requests."""


def dynamo_files(plan: Plan) -> dict[str, str]:
    """Return the files of a DynamoGraphDeployment.

    Raises:
        InputError: vLLM, or pods, cannot run the plan.
    """
    names = _checked(plan, "dynamo")
    image = f"xgpt-dynamo:{__version__}-{DYNAMO}"
    command = ["python3", "-m", "dynamo.frontend", "--http-port", str(FRONT_PORT)]
    front = PodSpec(
        image,
        command,
        0,
        ports={"http": FRONT_PORT},
        probed="http",
        alive="/live",
        ready="/health",
        mounts_keys=False,
        mounts_plan=False,
        name="main",
    )
    components = [_component(plan, names, front, "Frontend", "frontend", 1)]
    for lane, type_ in _lanes(plan, "worker"):
        nodes = nodes_of(plan, _devices(plan, lane))
        arguments = ["--model", _model(plan), "--served-model-name", _served_name(plan), *_arguments(plan, lane)]
        if lane != "both":
            arguments += ["--disaggregation-mode", type_, "--kv-transfer-config", json.dumps(_nixl("kv_both"))]
        worker = PodSpec(
            image,
            ["python3", "-m", "dynamo.vllm", *arguments],
            _devices(plan, lane) // nodes,
            ports={"system": SYSTEM_PORT},
            probed="system",
            alive="/live",
            ready="/health",
            mounts_keys=False,
            mounts_plan=_reads_plan(plan),
            env=[
                {"name": "DYN_SYSTEM_PORT", "value": str(SYSTEM_PORT)},
                of_pod("VLLM_NIXL_SIDE_CHANNEL_HOST", "status.podIP"),
                *_partition(plan, lane),
            ],
            name="main",
        )
        component = _component(plan, names, worker, type_.capitalize(), type_, plan.replicas)
        # Dynamo's operator passes a worker's nodes to vLLM in flags.
        components.append(component | ({"multinode": {"nodeCount": nodes}} if nodes > 1 else {}))
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": names.meta(),
        "spec": {"backendFramework": "vllm", "components": components},
    }
    objects = [
        *([pods.config_map(plan, names)] if _reads_plan(plan) else []),
        graph,
        pods.disruption_budget(names),
        # Components find each other through the API server.
        pods.network_policy(plan, names, [{"protocol": "TCP", "port": FRONT_PORT}], among=True, beyond=API_SERVER),
    ]
    comment = (
        f"# A plan by xgpt {__version__} for Dynamo {DYNAMO} with vLLM {TESTED_VERSION}. The image comes from the\n"
        f"# Dockerfile next to this file, which does not build if Dynamo's image has another vLLM;\n"
        f"# {weights_note(plan, names)}. The frontend requires no keys: only pods of this namespace\n"
        f"# may send requests (NetworkPolicy).{_lanes_note(plan)}\n"
    )
    return {
        "dynamo.yaml": pods.to_yaml(objects, comment),
        "kustomization.yaml": kustomization(["dynamo.yaml"]),
        "Dockerfile": vllm_dockerfile(plan, image, f"{DYNAMO_IMAGE}:{DYNAMO}"),
    }


def llmd_files(plan: Plan) -> dict[str, str]:
    """Return the files of deployments behind llm-d's router, and the values for the router's Helm chart.

    Raises:
        InputError: vLLM, or pods, cannot run the plan.
    """
    names = _checked(plan, "llm-d")
    with_xgpt = _reads_plan(plan)
    image = f"xgpt-vllm:{__version__}-{TESTED_VERSION}"
    objects = [pods.config_map(plan, names)] if with_xgpt else []
    objects += [_llmd_lane(plan, names, image, *lane) for lane in _lanes(plan, "both")]
    spans = any(item["kind"] == "LeaderWorkerSet" for item in objects)
    objects += [
        pods.disruption_budget(names),
        pods.network_policy(plan, names, [{"protocol": "TCP", "port": FRONT_PORT}], among=True),
    ]
    values = {"router": _router(names, is_split=len(plan.policy.lanes) > 1)}
    keys = "--from-file=keys=keys.txt" if with_xgpt else "--from-literal=key=KEY"
    comment = (
        f"# A plan by xgpt {__version__} on vLLM {TESTED_VERSION} behind llm-d's router, whose chart takes\n"
        f"# router.values.yaml:\n"
        f"#   helm install {names.name} {ROUTER_CHART} -f router.values.yaml\n"
        f"# {weights_note(plan, names)}; clients' keys come from a secret:\n"
        f"#   kubectl create secret generic {names.name}-keys {keys}\n"
        f"# Start: kubectl apply -k .{_lanes_note(plan)}\n"
        f"{'# The cluster needs the LeaderWorkerSet controller.' * spans}\n"
    )
    return {
        "llm-d.yaml": pods.to_yaml(objects, comment),
        "kustomization.yaml": kustomization(["llm-d.yaml"]),
        "router.values.yaml": pods.to_yaml([values]),
        "Dockerfile": vllm_dockerfile(plan, image),
    }


def _checked(plan: Plan, target: str) -> Names:
    check_deployable(plan, target)
    check_engine(plan, "vllm")
    one = plan.deployed(replicas=1)
    if runs_by_itself(plan):
        own_arguments(one)
    else:
        check_vllm_runs(one)
    return Names.of(plan)


def _reads_plan(plan: Plan) -> bool:
    """Return whether pods need plan.json: whether xgpt's scheduler runs the plan. On these platforms it runs only plans
    with one lane.
    """
    return len(plan.policy.lanes) == 1 and not runs_by_itself(plan)


def _lanes(plan: Plan, alone: str) -> list[tuple[LaneName, str]]:
    return list(ROLES.items()) if len(plan.policy.lanes) > 1 else [("both", alone)]


def _devices(plan: Plan, lane: LaneName) -> int:
    stages = [stage for stage in plan.stages if lane in ("both", stage.lane)]
    return len({device for stage in stages for device in stage.devices})


def _model(plan: Plan) -> str:
    return hub.id_of(plan.checkpoint) or MODEL_PATH


def _served_name(plan: Plan) -> str:
    """Return the name that clients send as `model`: the hub id, as with `vllm serve ID`, or else the model's
    name.
    """
    return hub.id_of(plan.checkpoint) or plan.model.name


def _arguments(plan: Plan, lane: LaneName) -> list[str]:
    one = plan.deployed(replicas=1)
    if runs_by_itself(plan):
        drafts = pods.with_mounted_draft(plan) if pods.mounts_draft(plan) else plan
        return [*own_arguments(one), *vllm_draft(drafts.speculation)]
    if lane != "both":
        return list(launch_lane(one, lane, _nixl("kv_both")).sizes)
    path = f"{ETC}/plan/plan.json"
    config = json.dumps({"xgpt": {"plan": path}})
    started = launch(one, plan_path=path)
    caching = started.arguments[-1]
    return [*started.sizes, caching, "--scheduler-cls", SCHEDULER, "--additional-config", config]


def _partition(plan: Plan, lane: LaneName) -> list[Object]:
    stages = [stage for stage in plan.stages if lane in ("both", stage.lane)]
    return [{"name": name, "value": value} for name, value in partition_of(stages).items()]


def _nixl(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role}


def _component(plan: Plan, names: Names, work: PodSpec, name: str, type_: str, replicas: int) -> Object:
    spec = pods.pod(plan, names, work, fetches=False)
    for entries in (spec["volumes"], spec["containers"][0]["volumeMounts"]):
        entries[:] = [entry for entry in entries if entry["name"] != "shm"]
    spec.pop("automountServiceAccountToken")  # Dynamo finds its components through the API server
    return {
        "name": name,
        "type": type_,
        "replicas": replicas,
        "runtimeVersionOverride": DYNAMO,
        "sharedMemorySize": f"{pods.shared_memory_gib(work.devices)}Gi",
        "podTemplate": {"metadata": {"labels": names.meta()["labels"]}, "spec": spec},
    }


def _llmd_lane(plan: Plan, names: Names, image: str, lane: LaneName, role: str) -> Object:
    with_xgpt = _reads_plan(plan)
    nodes = nodes_of(plan, _devices(plan, lane))
    write = _with_xgpt if with_xgpt else _vllm_itself
    answers = write(plan, names, image, lane, nodes)
    spec = pods.pod(plan, names, answers, fetches=with_xgpt)
    if lane == "decode":
        spec["initContainers"] = [_routing_proxy()]
    labels = {**ANSWERS, "llm-d.ai/model": names.name, "llm-d.ai/role": role}
    meta = names.meta("" if lane == "both" else f"-{role}", labels)
    if nodes > 1:
        follows = follower_command(["--engine", "vllm", *MEET]) if with_xgpt else [*_engine(answers), "--headless"]
        worker = replace(answers, command=follows, ports={}, probed=None, mounts_keys=False)
        return group_of_pods(plan, names, nodes, spec, pods.pod(plan, names, worker, fetches=with_xgpt), meta)
    chosen = names.selector | ({} if lane == "both" else {"llm-d.ai/role": role})
    return deployment(plan, chosen, spec, meta)


def _with_xgpt(plan: Plan, names: Names, image: str, lane: LaneName, nodes: int) -> PodSpec:
    return PodSpec(
        image,
        serving_command(names, FRONT_PORT, ["--engine", "vllm", *(MEET if nodes > 1 else ())]),
        _devices(plan, lane) // nodes,
        ports={"http": FRONT_PORT},
        probed="http",
        env=[of_pod("NAMESPACE", "metadata.namespace")],
    )


def _vllm_itself(plan: Plan, names: Names, image: str, lane: LaneName, nodes: int) -> PodSpec:
    """Return the container for a lane that vLLM's own server runs. In the decode lane, llm-d's proxy is in front of
    this server.
    """
    port = DECODE_PORT if lane == "decode" else FRONT_PORT
    role = {"encode": "kv_producer", "decode": "kv_consumer"}.get(lane)
    transfer = [] if role is None else ["--kv-transfer-config", json.dumps(_nixl(role))]
    nixl = {} if role is None else {"nixl": NIXL_PORT}
    return PodSpec(
        image,
        [
            *("vllm", "serve", _model(plan), "--served-model-name", _served_name(plan), *_arguments(plan, lane)),
            *(*transfer, *(MEET if nodes > 1 else ()), "--port", str(port)),
            *("--shutdown-timeout", str(pods.DRAIN_S)),
        ],
        _devices(plan, lane) // nodes,
        ports={"http" if lane == "both" else "engine": port, **nixl},
        probed="http" if lane == "both" else "engine",
        ready="/health",
        mounts_keys=False,
        mounts_plan=False,
        env=[
            of_secret("VLLM_API_KEY", f"{names.name}-keys", "key"),
            of_pod("VLLM_HOST_IP", "status.podIP"),
            *([] if role is None else [of_pod("VLLM_NIXL_SIDE_CHANNEL_HOST", "status.podIP")]),
            *_partition(plan, lane),
        ],
    )


def _engine(answers: PodSpec) -> list[str]:
    command = list(answers.command)
    return command[: command.index("--port")]


def _routing_proxy() -> Object:
    """Return the sidecar of a decode worker. It sends each prompt to a prefill worker first."""
    return {
        "name": "routing-proxy",
        "image": SIDECAR,
        "args": [f"--port={FRONT_PORT}", "--kv-connector=nixlv2", "--secure-proxy=false"],
        "ports": [{"name": "http", "containerPort": FRONT_PORT}],
        "restartPolicy": "Always",
        "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
        "securityContext": pods.container_security(),
    }


def _router(names: Names, *, is_split: bool) -> Object:
    picked = [{"pluginRef": "active-request-scorer"}, {"pluginRef": "max-score-picker"}]
    plugins: list[Object] = [
        {"type": "inflight-load-producer"},
        {"type": "active-request-scorer"},
        {"type": "max-score-picker"},
    ]
    profiles: list[Object] = [{"name": "default", "plugins": picked}]
    if is_split:
        decider = "always-disagg-pd-decider"
        handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider}}}
        plugins = [{"type": decider}, handler, {"type": "prefill-filter"}, {"type": "decode-filter"}, *plugins]
        profiles = [
            {"name": role, "plugins": [{"pluginRef": f"{role}-filter"}, *picked]} for role in ("prefill", "decode")
        ]
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": profiles,
    }
    return {
        "extraServicePorts": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": ROUTER_PORT}],
        "epp": {
            "replicas": 1,
            "pluginsConfigFile": "xgpt.yaml",
            "pluginsCustomConfig": {"xgpt.yaml": pods.to_yaml([config])},
        },
        "modelServers": {"matchLabels": names.selector | ANSWERS},
    }


def _lanes_note(plan: Plan) -> str:
    if len(plan.policy.lanes) == 1:
        return ""
    return "\n# The lanes have the plan's sizes; vLLM's own scheduler forms batches of prompts."
