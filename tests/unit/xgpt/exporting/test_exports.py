"""What exports write: scripts, and objects of Kubernetes, Dynamo and llm-d."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

from tests.rings import few
from tests.vllm.plans import exportable, plan_with, waa_plan
from xgpt.cli import cli
from xgpt.cli.commands import serve
from xgpt.core.errors import InputError
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan, RraSettings, Stage
from xgpt.core.schema.estimate import Capacity
from xgpt.core.schema.model_blocks import Block, Recurrent
from xgpt.exporting.export import Target, export
from xgpt.exporting.pods import to_yaml
from xgpt.resolve import load_cluster
from xgpt.serving.serve import ServeRequest, share_of
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.machines import Machines

RRA = plan_with(RraSettings(encode_batch=6, decode_iterations=5))
CRDS = {
    "DynamoGraphDeployment": "dynamographdeployment-v1beta1.json",
    "LeaderWorkerSet": "leaderworkerset-v1.json",
}


def fitting(plan: Plan) -> Plan:
    return exportable(plan, "/weights")


def waa() -> Plan:
    return fitting(waa_plan())


# Export --------------------------------------------------------------------------------------------------------


HOSTILE = [
    "a\nkind: Secret",
    "a\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: evil}",
    """quote's "double" `tick`""",
    "$(touch /tmp/pwned)",
    "${HOME}; rm -rf /",
    "a: {b: [c]} # d & *e !f |g >h %i @j",
    "\x85\u2028next line\ttab \\n",
    "../../etc/passwd",
    "ÄÖÜ 漢字",
    "x" * 300,
    "--host=0.0.0.0",
    "org/a\nkind: Pod",
    "org/model --token x",
]
"""Names that would be something else in YAML or in a shell."""


def hostile(name: str) -> Plan:
    """A plan in which everything that has a name has this one."""
    plan = fitting(RRA)
    update = {
        "model": plan.model.model_copy(update={"name": name}),
        "workload": plan.workload.model_copy(update={"name": name}),
        "cluster": plan.cluster.model_copy(update={"name": name}),
        "checkpoint": name,
    }
    return plan.model_copy(update=update)


def strict(schema: Any) -> Any:
    """A CRD's schema that refuses the fields an API server would drop."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict_schema = {key: strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and "type" in schema and not is_open:
        strict_schema["additionalProperties"] = False
    return strict_schema


@cache
def validator_of(kind: str) -> jsonschema.protocols.Validator:
    crd = strict(json.loads((Path(__file__).parent / "crds" / CRDS[kind]).read_text())["openAPIV3Schema"])
    return jsonschema.validators.validator_for(crd)(crd)


def pods_of(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of an object."""
    spec = item["spec"] if item["kind"] != "ConfigMap" else {}
    yield from (spec["template"] for _ in range("template" in spec))
    yield from (spec.get("leaderWorkerTemplate", {}).get(f"{role}Template") for role in ("leader", "worker"))
    yield from (component["podTemplate"] for component in spec.get("components", ()))


def validate(item: dict[str, Any]) -> None:
    """Check an object against its published schema, its pods as those of a Deployment."""
    if item["kind"] not in CRDS:
        kubernetes_validate.validate(item, "1.31", strict=True)
        return
    validator_of(item["kind"]).validate(item)
    for template in filter(None, pods_of(item)):
        spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": item["metadata"], "spec": spec}
        kubernetes_validate.validate(deployment, "1.31", strict=True)


FILES: dict[Target, str] = {"k8s": "xgpt.yaml", "dynamo": "dynamo.yaml", "llm-d": "llm-d.yaml"}


def all_objects(plan: Plan, target: Target) -> list[dict[str, Any]]:
    """The exported objects, validated."""
    files = export(plan, target)
    items = list(yaml.safe_load_all(files[FILES[target]]))
    for item in items:
        validate(item)
    assert yaml.safe_load(files["kustomization.yaml"])["resources"] == [FILES[target]]
    return items


def objects_of(plan: Plan, target: Target = "k8s") -> dict[str, Any]:
    """The exported objects, validated, by kind."""
    return {item["kind"]: item for item in all_objects(plan, target)}


def over_two_nodes(engine: str | None = None) -> Plan:
    """A replica on twice eight devices, two of them."""
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 4})
    stages = tuple(
        Stage(devices=tuple(range(8 * i, 8 * i + 8)), tp=8, decode_layers=(6 * i, 6 * i + 6), kv_blocks=800)
        for i in range(2)
    )
    profile = RRA.profile.model_copy(update={"engine": engine})
    update = {"cluster": cluster, "stages": stages, "replicas": 2, "profile": profile}
    return fitting(RRA).model_copy(update=update)


def run_script(script: str, directory: Path, *more: str, env: dict[str, str] | None = None) -> list[str]:
    """The words with which an exported script calls xgpt, here a fake."""
    (directory / "script.sh").write_text(script)
    fake = directory / "xgpt"
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    path = {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", **(env or {})}
    said = subprocess.check_output(["sh", directory / "script.sh", *more], env=path, text=True)
    return said.split("\0")[:-1]


@pytest.mark.parametrize("more", [(), ("--host", "0.0.0.0", "--api-key-file", "my keys"), ("$(id)", "a b")])
def test_the_exported_script_serves_in_vllm_behind_our_endpoint(tmp_path: Path, more: tuple[str, ...]) -> None:
    for plan in (fitting(RRA), waa()):
        files = export(plan, "vllm")
        assert Plan.model_validate_json(files["plan.json"]) == plan
        assert f"vllm=={TESTED_VERSION}" in files["requirements.txt"]
        words = run_script(files["serve.sh"], tmp_path, *more)
        assert words == ["serve", "plan.json", "--engine", "vllm", "--port", "8000", *more]
    assert "nixl" in files["requirements.txt"]


def test_the_exported_script_is_not_for_others_without_keys(tmp_path: Path) -> None:
    plan = exportable(RRA, str(tmp_path))
    words = run_script(export(plan, "vllm")["serve.sh"], tmp_path, "--host", "0.0.0.0")
    (tmp_path / "plan.json").write_text(dump_json(plan))
    refused = CliRunner().invoke(cli, ["serve", str(tmp_path / "plan.json"), *words[2:]])
    assert isinstance(refused.exception, InputError) and "--api-key-file" in str(refused.exception)


@pytest.mark.parametrize("name", few(HOSTILE, 2))
@pytest.mark.parametrize("target", ["vllm", "k8s", "dynamo", "llm-d", "script"])
def test_a_name_stays_a_name(name: str, target: Target, tmp_path: Path) -> None:
    plain, files = export(hostile("opt"), target), export(hostile(name), target)
    assert files.keys() == plain.keys()
    assert Plan.model_validate_json(files["plan.json"]) == hostile(name)
    for script in ("serve.sh", "start.sh", "requirements.txt", "Dockerfile"):
        assert files.get(script) == plain.get(script)  # nothing of the plan's names comes in
    if target not in FILES:
        return
    found, expected = objects_of(hostile(name), target), objects_of(hostile("opt"), target)
    assert found.keys() == expected.keys()
    object_name = found["ConfigMap"]["metadata"]["name"]
    assert re.fullmatch(r"xgpt-[a-z0-9]([a-z0-9-]*[a-z0-9])?", object_name) and len(f"{object_name}-model") < 64
    assert json.loads(found.pop("ConfigMap")["data"]["plan.json"])["model"]["name"] == name
    for kind, item in found.items():
        written = json.dumps(item).replace(object_name, "xgpt-opt")
        assert json.loads(written.replace(json.dumps(name), '"opt"')) == expected[kind]


def test_exported_pods_may_do_nothing_that_serving_does_not_take() -> None:
    objects = objects_of(fitting(RRA).model_copy(update={"cluster": load_cluster("h200x8"), "replicas": 3}))
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 3
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for bound in ("requests", "limits"):
        assert container["resources"][bound].keys() == {"cpu", "memory", "nvidia.com/gpu"}
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] and volumes["scratch"]["emptyDir"]["sizeLimit"]
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"shm", "scratch"}
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["egress"] == [] and policy["podSelector"] == {"matchLabels": spec["selector"]["matchLabels"]}
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"protocol": "TCP", "port": "http"}]]
    service = objects["Service"]["spec"]
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()


def test_exported_pods_serve_the_plan_with_keys_of_a_secret() -> None:
    objects = objects_of(fitting(RRA).model_copy(update={"cluster": load_cluster("h200x8"), "replicas": 3}))
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command[:4] == ["python3", "-m", "xgpt", "serve"]
    given = serve.make_context("serve", command[4:]).params
    assert (given["host"], given["engine"]) == ("0.0.0.0", "vllm")
    assert 0 < given["shutdown_delay_s"] < given["drain_s"]
    assert pod["terminationGracePeriodSeconds"] > given["shutdown_delay_s"] + given["drain_s"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "secret" in volumes[mounts[str(Path(given["api_key_file"]).parent)]]
    assert "configMap" in volumes[mounts[str(Path(given["plan_path"]).parent)]]
    plan = json.loads(objects["ConfigMap"]["data"]["plan.json"])
    assert plan["replicas"] == 1 and mounts[plan["checkpoint"]] == "model"


def test_the_exported_start_of_our_own_engine_is_one_that_it_takes(tmp_path: Path) -> None:
    two_nodes = load_cluster("a40x16")
    first = Stage(devices=tuple(range(8)), tp=8, decode_layers=(0, 12), kv_blocks=800)
    plan = fitting(RRA).model_copy(update={"cluster": two_nodes, "stages": (first,), "replicas": 2})
    script = export(plan, "script")["start.sh"]
    words = run_script(script, tmp_path)
    assert words.pop(0) == "serve"
    assert serve.make_context("serve", words).params["ray"] == "auto"
    assert "ray start --head" in script and "RAY_AUTH_TOKEN" in script


def test_no_requirement_is_a_strangers_package_of_our_name() -> None:
    """The package index has one."""
    for target in ("vllm", "k8s", "dynamo", "llm-d"):
        for name, text in export(fitting(RRA), target).items():
            lines = (line for line in text.splitlines() if not line.startswith("#"))
            assert name == "plan.json" or not any("xgpt==" in line for line in lines)


def test_a_script_for_several_nodes_asks_for_their_rank_and_the_first_ones_address(tmp_path: Path) -> None:
    script = export(over_two_nodes(), "vllm")["serve.sh"]
    words = run_script(script, tmp_path, env={"NODE_RANK": "1", "HEAD": "h"})
    given = serve.make_context("serve", words[1:]).params
    assert (given["engine"], given["nnodes"], given["node_rank"], given["master_addr"]) == ("vllm", 4, 1, "h")
    plan = fitting(RRA).model_copy(update={"cluster": load_cluster("h200x8"), "replicas": 9})
    with pytest.raises(InputError, match="do not divide evenly among"):
        export(plan, "vllm")


def test_recurrent_layers_are_not_left_to_our_scheduler_in_vllm() -> None:
    plan = fitting(RRA)
    state = Recurrent(num_heads=2, weights=8, state_elements=8, state_bytes=8)
    model = plan.model.model_copy(update={"blocks": (Block(layers=(0,), recurrent=state),)})
    with pytest.raises(InputError, match="vLLM's own scheduler"):
        export(plan.model_copy(update={"model": model}), "vllm")


def test_a_plan_that_does_not_fit_is_not_exported() -> None:
    plan = fitting(RRA)
    full = plan.estimate.model_copy(update={"memory_bytes": (2**40,)})
    with pytest.raises(InputError, match="the plan needs"):
        export(plan.model_copy(update={"estimate": full}), "vllm")


def test_the_command_writes_files_and_says_how_to_start(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(dump_json(fitting(RRA)))
    out = tmp_path / "out"
    result = CliRunner().invoke(cli, ["export", str(tmp_path / "plan.json"), "--to", "script", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "sh start.sh" in result.output
    assert "exec xgpt serve plan.json" in (out / "start.sh").read_text()


PLANS: dict[str, tuple[Plan, Target]] = {
    "one node": (fitting(RRA).model_copy(update={"cluster": load_cluster("h200x8"), "replicas": 3}), "k8s"),
    "waa on one node": (waa(), "k8s"),
    "two nodes": (over_two_nodes(), "k8s"),
    "two nodes, own engine": (over_two_nodes("xgpt"), "k8s"),
    "two nodes, dynamo": (over_two_nodes(), "dynamo"),
    "two nodes, llm-d": (over_two_nodes(), "llm-d"),
    "dynamo": (fitting(RRA), "dynamo"),
    "dynamo, waa": (waa(), "dynamo"),
    "llm-d": (fitting(RRA), "llm-d"),
    "llm-d, waa": (waa(), "llm-d"),
    "an id": (fitting(RRA).model_copy(update={"checkpoint": "hf://Qwen/Qwen2.5-0.5B"}), "k8s"),
    "an id, dynamo": (fitting(RRA).model_copy(update={"checkpoint": "hf://Qwen/Qwen2.5-0.5B"}), "dynamo"),
}


@pytest.mark.parametrize("case", PLANS)
def test_every_pod_is_held_to_what_serving_takes(case: str) -> None:
    items = all_objects(*PLANS[case])
    kinds = [item["kind"] for item in items]
    assert {"NetworkPolicy", "PodDisruptionBudget"} <= set(kinds)
    policy, budget = (
        next(item for item in items if item["kind"] == kind)["spec"]
        for kind in ("NetworkPolicy", "PodDisruptionBudget")
    )
    assert budget["maxUnavailable"] == "5%" and set(policy["policyTypes"]) == {"Ingress", "Egress"}
    templates = [template for item in items if "spec" in item for template in filter(None, pods_of(item))]
    assert templates
    mounts = [volume for each in templates for volume in each["spec"]["volumes"] if "configMap" in volume]
    assert ("ConfigMap" in kinds) == bool(mounts)  # a plan that no pod reads is not deployed
    for template in templates:
        for chooser in (policy["podSelector"], budget["selector"]):
            assert chooser["matchLabels"].items() <= template["metadata"]["labels"].items()
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
        assert pod["terminationGracePeriodSeconds"] > 75
        scratch = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        for container in pod["containers"] + pod.get("initContainers", []):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"][
                "limits"
            ].keys()
            for mount in container.get("volumeMounts", ()):
                assert mount.get("readOnly") or mount["name"] in scratch
        (worker,) = pod["containers"]
        follows = case.startswith("two nodes") and "ports" not in worker  # it ends when the leader does
        assert follows or {"startupProbe", "readinessProbe", "livenessProbe"} <= worker.keys()


VALUES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a-0.a.ns", "NAMESPACE": "ns"}
"""What the controller of LeaderWorkerSets and the kubelet put into a worker's command."""


@pytest.mark.parametrize("target", ["k8s", "llm-d"])
def test_several_nodes_of_vllm_are_a_group_that_meets_at_its_leader(target: Target) -> None:
    objects = objects_of(over_two_nodes(), target)
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert (objects["LeaderWorkerSet"]["spec"]["replicas"], group["size"]) == (2, 2)
    plan = Plan.model_validate_json(objects["ConfigMap"]["data"]["plan.json"])
    for role, keys in (("leader", "/etc/xgpt/keys/keys"), ("worker", None)):
        (container,) = group[f"{role}Template"]["spec"]["containers"]
        given = serve.make_context("serve", filled(container["command"][4:], VALUES)).params
        assert (given["engine"], given["api_key_file"]) == ("vllm", keys)
        asked = ServeRequest(engine="vllm", **{name: given[name] for name in ("nnodes", "node_rank", "master_addr")})
        assert share_of(plan, asked) == (plan, Machines(2, 1, "a-0.a.ns", 29500))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_a_worker_of_dynamo_says_how_many_nodes_it_spans() -> None:
    graph = objects_of(over_two_nodes(), "dynamo")["DynamoGraphDeployment"]
    worker = next(c for c in graph["spec"]["components"] if c["type"] == "worker")
    assert (worker["multinode"], worker["replicas"]) == ({"nodeCount": 2}, 2)
    assert worker["podTemplate"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_under_llm_d_only_a_lane_that_spans_nodes_is_a_group() -> None:
    """Its workers are vLLM's own, without an endpoint: the router must not choose them."""
    plan = waa()
    encode, decode = plan.stages
    wide = decode.model_copy(update={"devices": tuple(range(1, 17)), "tp": 4})
    half = {"devices": wide.devices[:8], "decode_layers": (0, 6), "tp": 8}
    rest = {"devices": wide.devices[8:], "decode_layers": (6, 12), "tp": 8}
    stages = (encode, wide.model_copy(update=half), wide.model_copy(update=rest))
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 3})
    items = all_objects(plan.model_copy(update={"cluster": cluster, "stages": stages}), "llm-d")
    by_kind = {item["kind"]: item for item in items}
    assert by_kind["Deployment"]["metadata"]["labels"]["llm-d.ai/role"] == "prefill"
    group = by_kind["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[f"{role}Template"] for role in ("leader", "worker"))
    assert worker["spec"]["containers"][0]["command"][-1] == "--headless"
    assert "llm-d.ai/inference-serving" in leader["metadata"]["labels"]
    assert "llm-d.ai/inference-serving" not in worker["metadata"]["labels"]


def test_several_nodes_of_our_own_engine_are_a_group_whose_leader_answers() -> None:
    objects = objects_of(over_two_nodes("xgpt"))
    spec = objects["LeaderWorkerSet"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (2, 2, "RecreateGroupOnPodRestart")
    assert objects["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    for role in ("leader", "worker"):
        (container,) = group[f"{role}Template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        words = filled(container["command"], VALUES)
        if role == "leader":
            start, _, command = words[2].partition(" && exec ")
            assert words[:2] == ["sh", "-c"] and "--head" in start.split()
            given = serve.make_context("serve", shlex.split(command)[4:]).params
            assert (given["api_key_file"], given["engine"], given["ray"]) == ("/etc/xgpt/keys/keys", "xgpt", "auto")
        else:
            assert words[:3] == ["ray", "start", "--address=a-0.a.ns:6379"]
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= {entry["name"] for entry in container["env"]}
    pods = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "xgpt-opt-125m"}}}]
    policy = objects["NetworkPolicy"]["spec"]
    assert {"from": pods} in policy["ingress"] and {"to": pods} in policy["egress"]


@pytest.mark.parametrize(("subject", "kind"), [(fitting(RRA), "Deployment"), (over_two_nodes(), "LeaderWorkerSet")])
def test_an_autoscaler_keeps_each_replica_to_the_rate_that_keeps_the_bounds(subject: Plan, kind: str) -> None:
    assert "autoscaler.yaml" not in export(subject, "k8s")  # no arrival rate is known
    capacity = Capacity(rate_per_s=11.0, whole_s=1, share_kept=0.99, num_requests=1, warm_up_requests=0, seed=0)
    plan = subject.with_estimate(capacity=capacity).proven(subject.ceiling)
    files = export(plan, "k8s")
    scaler = yaml.safe_load(files["autoscaler.yaml"])
    validate(scaler)
    target = next(one for one in yaml.safe_load_all(files["xgpt.yaml"]) if one["kind"] == kind)
    named = scaler["spec"]["scaleTargetRef"]
    assert [named[name] for name in ("apiVersion", "kind")] == [target[name] for name in ("apiVersion", "kind")]
    assert named["name"] == target["metadata"]["name"]
    assert scaler["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == f"{11000 / plan.replicas / 1.1:.0f}m"
    assert scaler["spec"]["maxReplicas"] == plan.cluster.num_devices // plan.devices_per_replica


def filled(words: list[str], values: dict[str, str]) -> list[str]:
    """A container's words with its variables' values in them, as a kubelet puts them there."""
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in words]


def test_a_replica_that_does_not_spread_evenly_over_nodes_is_not_exported() -> None:
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 4, "devices_per_node": 4})
    stage = Stage(devices=tuple(range(7)), tp=7, decode_layers=(0, 12), kv_blocks=800)
    with pytest.raises(InputError, match="must use equally many devices on each"):
        export(fitting(RRA).model_copy(update={"cluster": cluster, "stages": (stage,)}), "k8s")


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
def test_lanes_become_prefill_and_decode_workers_of_the_plans_sizes(target: Target) -> None:
    items = all_objects(waa().model_copy(update={"replicas": 2}), target)
    if target == "dynamo":
        (graph,) = (item for item in items if item["kind"] == "DynamoGraphDeployment")
        found = {c["type"]: (c["replicas"], c["podTemplate"]["spec"]) for c in graph["spec"]["components"]}
        assert set(found) == {"frontend", "prefill", "decode"}
    else:
        found = {
            item["spec"]["template"]["metadata"]["labels"]["llm-d.ai/role"]: (
                item["spec"]["replicas"],
                item["spec"]["template"]["spec"],
            )
            for item in items
            if item["kind"] == "Deployment"
        }
        assert set(found) == {"prefill", "decode"}
        (proxy,) = found["decode"][1]["initContainers"]
        assert proxy["restartPolicy"] == "Always"
    for role, most in (("prefill", None), ("decode", "16")):
        replicas, pod = found[role]
        command = pod["containers"][0]["command"]
        assert replicas == 2 and "NixlConnector" in command[command.index("--kv-transfer-config") + 1]
        assert "--scheduler-cls" not in command
        assert most is None or command[command.index("--max-num-seqs") + 1] == most


def test_one_lane_keeps_its_schedule_under_dynamo() -> None:
    (graph,) = (item for item in all_objects(fitting(RRA), "dynamo") if item["kind"] == "DynamoGraphDeployment")
    worker = next(c for c in graph["spec"]["components"] if c["type"] == "worker")
    (container,) = worker["podTemplate"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["python3", "-m", "dynamo.vllm"]
    assert command[command.index("--scheduler-cls") + 1].endswith("XgptScheduler")
    config = json.loads(command[command.index("--additional-config") + 1])["xgpt"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert config == {"plan": "/etc/xgpt/plan/plan.json"} and str(Path(config["plan"]).parent) in mounts


def test_engine_arguments_that_are_exported_are_vllms() -> None:
    """tests/vllm asks vLLM's own parser."""
    from xgpt.comparing.vllm_command import TABLE

    commands = [
        template["spec"]["containers"][0]["command"]
        for plan in (fitting(RRA), waa())
        for item in all_objects(plan, "dynamo") + all_objects(plan, "llm-d")
        for template in filter(None, pods_of(item))
    ]
    of_vllm = [command for command in commands if {"dynamo.vllm", "vllm"} & set(command[:3])]
    assert len(of_vllm) == 5
    for command in of_vllm:
        flags = {word[2:] for word in command if word.startswith("--")} - {"disaggregation-mode"}
        assert {flag.removeprefix("no-") for flag in flags} <= TABLE.takes.keys()


def test_weights_of_an_id_are_fetched_where_it_is_deployed(tmp_path: Path) -> None:
    plan = fitting(RRA).model_copy(update={"checkpoint": "hf://Qwen/Qwen2.5-0.5B"})
    pod = objects_of(plan)["Deployment"]["spec"]["template"]["spec"]
    (fetch,) = pod["initContainers"]
    assert fetch["command"] == ["hf", "download", "Qwen/Qwen2.5-0.5B", "--local-dir", "/model"]
    egress = objects_of(plan)["NetworkPolicy"]["spec"]["egress"]
    assert {"protocol": "TCP", "port": 443} in egress[0]["ports"]
    fake = tmp_path / "hf"
    fake.write_text('#!/bin/sh\nprintf "%s\\0" hf "$@"\n')
    fake.chmod(0o755)
    for target, script in (("vllm", "serve.sh"), ("script", "start.sh")):
        words = run_script(export(plan, target)[script], tmp_path)  # type: ignore[arg-type]
        assert words[:5] == ["hf", "download", "Qwen/Qwen2.5-0.5B", "--local-dir", "weights"]
        assert words[-2:] == ["--checkpoint", "weights"]
    for target in ("dynamo", "llm-d"):
        assert "Qwen/Qwen2.5-0.5B" in export(plan, target)[FILES[target]]  # type: ignore[arg-type,index]


@pytest.mark.parametrize(
    "name", ["org/a\nkind: Pod", "org/a\n---\nkind: Pod", "org/a b", "a", "org/../x", "-x/y", "ÄÖ/x"]
)
@pytest.mark.parametrize("target", ["k8s", "script"])
def test_an_id_that_the_hub_does_not_allow_is_refused(name: str, target: Target) -> None:
    """A newline in one stood in a comment, and ended it."""
    plan = fitting(RRA).model_copy(update={"checkpoint": f"hf://{name}"})
    with pytest.raises(InputError, match="ORGANISATION/MODEL"):
        export(plan, target)
    with pytest.raises(ValidationError, match="Hugging Face"):
        Plan.model_validate_json(plan.model_dump_json())


def test_no_line_of_a_comment_is_yaml() -> None:
    document = to_yaml([{"a": 1}], "# first\nkind: Pod\u2028kind: Secret\x85---\n")
    assert list(yaml.safe_load_all(document)) == [{"a": 1}]
