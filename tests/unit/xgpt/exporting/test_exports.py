"""What exports write, for every target: valid objects, the plan's command, and steps that work as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

import xgpt
from tests.exports import export, expressions, objects_in, pods_of
from tests.fleets import fleet_of
from tests.rings import few
from tests.unit.xgpt.exporting.test_started import planned
from tests.vllm.plans import exportable, plan_with, waa_plan
from xgpt.cli import cli
from xgpt.cli.commands import serve
from xgpt.core.documents import LOADER
from xgpt.core.errors import InputError
from xgpt.core.io import dump_json
from xgpt.core.schema import ChunkedSettings, Plan, RraSettings, Stage
from xgpt.core.schema.estimate import Capacity
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.schema.model_blocks import Block, Recurrent
from xgpt.exporting.groups import IN_PODS, Target
from xgpt.resolve import load_cluster, load_engine
from xgpt.serving.serve import ServeRequest, share_of
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.machines import Machines
from xscheduler.fleet.scaling import Scaling

TARGETS: tuple[Target, ...] = ("shell", "compose", "k8s", "llm-d", "dynamo")
RRA = exportable(plan_with(RraSettings(encode_batch=6, decode_iterations=5)), "/weights")
WAA = exportable(waa_plan(), "/weights")
GROUPS = exportable(waa_plan(3), "/weights")


def by_itself(replicas: int = 2) -> Plan:
    """A plan of vLLM's own scheduler that predicts a rate: two replicas unless another number is given."""
    plan = planned("by itself")
    plan = plan.model_copy(
        update={
            "cluster": plan.cluster.model_copy(update={"devices_per_node": 8}),
            "replicas": replicas,
            "checkpoint": None,
        }
    )
    capacity = Capacity(rate_per_s=11.0, whole_s=1, share_kept=0.99, num_requests=1, warm_up_requests=0, seed=0)
    return plan.with_estimate(capacity=capacity).proven(plan.ceiling)


def over_two_nodes(engine: str | None = None) -> Plan:
    """A replica on twice eight devices, two of them."""
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 4})
    stages = tuple(
        Stage(devices=tuple(range(8 * i, 8 * i + 8)), tp=8, decode_layers=(6 * i, 6 * i + 6), kv_blocks=800)
        for i in range(2)
    )
    profile = RRA.profile.model_copy(update={"engine": engine})
    return RRA.model_copy(update={"cluster": cluster, "stages": stages, "replicas": 2, "profile": profile})


def deployable() -> FleetPlan:
    """A day of two kinds of replicas of a shipped model, of which the second is needed at noon only."""
    fleet = fleet_of([2.0] * 144 + [9.0] * 36 + [2.0] * 108, (2.0, 5.0))
    plan = by_itself(1)
    kinds = tuple(kind.model_copy(update={"plan": plan}) for kind in fleet.kinds)
    noon = [each.model_copy(update={"replicas": (2, 1)}) if each.rate_per_s > 2 else each for each in fleet.intervals]
    return fleet.model_copy(update={"kinds": kinds, "intervals": tuple(noon)})


PLANS: dict[str, Callable[[], Plan]] = {
    "by itself": by_itself,
    "rra": lambda: RRA,
    "waa": lambda: WAA,
    "prefill groups": lambda: GROUPS,
    "two nodes": over_two_nodes,
    "two nodes, own engine": partial(over_two_nodes, "xgpt"),
    "an id": lambda: RRA.model_copy(update={"checkpoint": "hf://Qwen/Qwen2.5-0.5B"}),
}
REFUSED = {("two nodes", "compose"), ("two nodes, own engine", "compose")}
REFUSED |= {("two nodes, own engine", target) for target in ("llm-d", "dynamo")}


def kinds_of(plan: Plan | FleetPlan, target: Target = "k8s") -> dict[str, Any]:
    return {item["kind"]: item for item in objects_in(export(plan, target))}


def run_script(script: str, directory: Path, *more: str, **variables: str) -> list[str]:
    """Return the words with which an exported script starts a program, here a fake."""
    (directory / "script.sh").write_text(script)
    for name in ("xgpt", "vllm", "vllm-router", "hf", "python3"):
        (directory / name).write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$CUDA_VISIBLE_DEVICES" "$@"\n')
        (directory / name).chmod(0o755)
    path = {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", **variables}
    said = subprocess.check_output(["sh", directory / "script.sh", *more], env=path, text=True)
    return said.split("\0")[:-1]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PLANS)
def test_every_target_takes_every_plan_or_says_why_not(case: str, target: Target) -> None:
    if (case, target) in REFUSED:
        with pytest.raises(InputError, match="export"):
            export(PLANS[case](), target)
        return
    files = export(PLANS[case](), target)
    items = objects_in(files)
    for name, text in files.items():
        assert not name.endswith(".json") or json.loads(text)
    if target not in IN_PODS:
        return
    kinds = [item["kind"] for item in items]
    assert {"NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"} <= set(kinds)
    templates = [template for item in items for template in pods_of(item)]
    mounts = [volume for each in templates for volume in each["spec"]["volumes"] if "configMap" in volume]
    assert ("ConfigMap" in kinds) == bool(mounts)  # a plan that no pod reads is not deployed
    for template in templates:
        check_rights(template["spec"])
    policy = next(item for item in items if item["kind"] == "NetworkPolicy")["spec"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in [
        each for rule in policy["ingress"] for each in rule["from"]
    ]
    assert all(len(json.dumps(json.dumps(item))) < 262_144 for item in items)


def check_rights(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    assert pod["terminationGracePeriodSeconds"] > 75
    scratch = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    for container in pod["containers"] + pod.get("initContainers", []):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"]["limits"].keys()
        for mount in container.get("volumeMounts", ()):
            fetches = container["name"] == "fetch" and mount["name"] == "models"
            assert mount.get("readOnly") or mount["name"] in scratch or fetches
    assert len(claims) >= (container["resources"].get("nvidia.com/gpu") is not None)


def test_a_plan_of_the_engine_itself_runs_on_its_own_image_on_every_target() -> None:
    """The recommended plan was refused for Kubernetes, and put on an image to be built for llm-d."""
    for target in TARGETS[1:]:
        text = "\n".join(export(by_itself(), target).values())
        stock = "ai-dynamo/vllm-runtime" if target == "dynamo" else f"vllm/vllm-openai:v{TESTED_VERSION}"
        assert stock in text and "xgpt-vllm" not in text and "meta-llama/Llama-3.1-8B" in text
    spec = kinds_of(by_itself())["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 2 and container["command"][:2] == ["vllm", "serve"]
    older = planned("by itself, an older one")
    assert "vllm/vllm-openai:v0.10.0" in export(older, "k8s")["xgpt.yaml"]
    sglang = by_itself().model_copy(update={"engine": load_engine("sglang")})
    assert "lmsysorg/sglang:v0.5" in export(sglang, "k8s")["xgpt.yaml"]


@pytest.mark.parametrize("target", ["shell", "compose", "k8s"])
def test_what_monitoring_reads_is_what_the_server_is_started_with(target: Target) -> None:
    """SGLang has /metrics only with an option. Its histogram of gaps between tokens was called TPOT."""
    plan = by_itself()
    plan = plan.model_copy(update={"constraint": plan.constraint.but(tpot_s=0.5)})
    for engine, is_asked, shown, other in (("sglang", True, "ITL", "TPOT"), ("vllm", False, "TPOT", "ITL")):
        text = "\n".join(export(plan.model_copy(update={"engine": load_engine(engine)}), target).values())
        assert ("--enable-metrics" in text) == is_asked
        assert f"{shown}AboveBound" in text and f"{other}AboveBound" not in text
        # of single gaps the p99 may be over a bound on their means, which all requests keep
        mean = "sum(rate(sglang:inter_token_latency_seconds_sum{"
        assert (mean in text) == is_asked and "inter_token_latency_seconds_bucket" not in text.partition("panels")[0]


def test_a_remedy_is_printed_once(tmp_path: Path) -> None:
    """Three programs come with one command, which was printed three times."""
    (tmp_path / "plan.json").write_text(dump_json(by_itself()))
    ran = CliRunner().invoke(cli, ["export", str(tmp_path / "plan.json"), "--to", "shell", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 0 and ran.stdout.count("pip install -r requirements.txt") == 1


def test_weights_of_an_id_are_fetched_once_into_a_claim() -> None:
    objects = kinds_of(by_itself())
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (fetch,), (engine,) = pod["initContainers"], pod["containers"]
    assert fetch["command"][-1] == engine["command"][2] == "meta-llama/Llama-3.1-8B-Instruct"
    claim = {
        "name": "models",
        "persistentVolumeClaim": {"claimName": objects["PersistentVolumeClaim"]["metadata"]["name"]},
    }
    assert claim in pod["volumes"] and objects["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"]


def test_replicas_of_one_machine_have_a_port_and_devices_each_and_a_front(tmp_path: Path) -> None:
    """ "start it 2 times" collided on both."""
    files = export(by_itself(), "shell")
    found = [run_script(files["serve.sh"], tmp_path, str(i)) for i in range(2)]
    assert [words[:4] for words in found] == [
        ["vllm", str(i), "serve", "meta-llama/Llama-3.1-8B-Instruct"] for i in range(2)
    ]
    ports = [words[words.index("--port") + 1] for words in found]
    front = run_script(files["serve.sh"], tmp_path, "front")
    assert front[front.index("--worker-urls") + 1 :] == [f"http://127.0.0.1:{port}" for port in ports]
    assert len(set(ports)) == 2 and front[front.index("--port") + 1] not in ports
    tried, borne = (int(front[front.index(name) + 1]) for name in ("--retry-max-retries", "--cb-failure-threshold"))
    assert tried > borne  # a lost replica has the least work: all attempts went to it, and the client got a 500
    with pytest.raises(subprocess.CalledProcessError):
        run_script(files["serve.sh"], tmp_path, "2")
    assert "serve.sh %i" in next(text for name, text in files.items() if name.endswith("@.service"))
    services = yaml.load(export(by_itself(), "compose")["compose.yaml"], LOADER)["services"]
    gpus = [
        services[f"replica-{i}"]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for i in range(2)
    ]
    assert gpus == [["0"], ["1"]]
    assert services["front"]["entrypoint"][-2:] == ["http://replica-0:8000", "http://replica-1:8000"]


def test_replicas_on_cpus_have_cores_of_their_own() -> None:
    plan = exportable(plan_with(ChunkedSettings(token_budget=256, max_batch=8)), "/weights")
    plan = plan.model_copy(update={"engine": load_engine("vllm"), "cluster": load_cluster("local:2"), "replicas": 2})
    script = export(plan, "shell")["serve.sh"]
    assert len(set(re.findall(r"VLLM_CPU_OMP_THREADS_BIND=(\S+);;", script))) == 2
    assert "CUDA_VISIBLE_DEVICES" not in script
    assert "exec python3 -m vllm.entrypoints.openai.api_server --model /weights" in script  # vllm-cpu's `vllm` fails
    assert "--shutdown-timeout 60" in script


def test_the_script_of_our_scheduler_is_a_command_that_serve_takes(tmp_path: Path) -> None:
    for plan in (RRA, WAA, GROUPS):
        files = export(plan, "shell")
        assert Plan.model_validate_json(files["plan.json"]) == plan
        words = run_script(files["serve.sh"], tmp_path, "--api-key-file", "my keys")
        given = serve.make_context("serve", words[3:]).params
        assert (given["engine"], given["port"], given["api_key_file"]) == ("vllm", 8000, "my keys")
        assert f"vllm=={TESTED_VERSION}" in files["requirements.txt"] and "xgpt==" not in files["requirements.txt"]
    words = run_script(export(over_two_nodes("xgpt"), "shell")["serve.sh"], tmp_path)
    assert serve.make_context("serve", words[3:]).params["ray"] == "auto"
    script = export(over_two_nodes(), "shell")["serve.sh"]
    words = run_script(script, tmp_path, RANK="1", HEAD="h")
    given = serve.make_context("serve", words[3:]).params
    assert (given["nnodes"], given["node_rank"], given["master_addr"]) == (4, 1, "h")


def test_pods_of_our_scheduler_run_a_command_that_serve_takes() -> None:
    objects = kinds_of(RRA)
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:4] == ["python3", "-m", "xgpt", "serve"]
    given = serve.make_context("serve", container["command"][4:]).params
    assert (given["host"], given["engine"]) == ("0.0.0.0", "vllm")
    assert 0 < given["shutdown_delay_s"] < given["drain_s"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts[str(Path(given["api_key_file"]).parent)] == "keys"
    assert mounts[str(Path(given["plan_path"]).parent)] == "plan"
    plan = Plan.model_validate_json(objects["ConfigMap"]["data"]["plan.json"])
    assert plan.replicas == 1 and mounts[str(plan.checkpoint)] == "model"
    assert not pod["automountServiceAccountToken"]


VALUES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a-0.a.ns", "NAMESPACE": "ns"}
"""What the controller of LeaderWorkerSets and the kubelet put into a worker's command."""


def filled(words: list[str]) -> list[str]:
    return [re.sub(r"\$\((\w+)\)", lambda found: VALUES[found[1]], word) for word in words]


@pytest.mark.parametrize("target", ["k8s", "llm-d"])
def test_several_nodes_of_vllm_are_a_group_that_meets_at_its_leader(target: Target) -> None:
    objects = kinds_of(over_two_nodes(), target)
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert (objects["LeaderWorkerSet"]["spec"]["replicas"], group["size"]) == (2, 2)
    assert group["restartPolicy"] == "None"  # the leader keeps the clients' connections
    plan = Plan.model_validate_json(objects["ConfigMap"]["data"]["plan.json"])
    for role, keys in (("leader", "/etc/xgpt/keys/key"), ("worker", None)):
        (container,) = group[f"{role}Template"]["spec"]["containers"]
        given = serve.make_context("serve", filled(container["command"][4:])).params
        assert (given["engine"], given["api_key_file"]) == ("vllm", keys)
        asked = ServeRequest(engine="vllm", **{name: given[name] for name in ("nnodes", "node_rank", "master_addr")})
        assert share_of(plan, asked) == (plan, Machines(2, 1, "a-0.a.ns", 29500))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_several_nodes_of_an_engine_itself_end_together() -> None:
    plan = by_itself(1)
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"num_nodes": 2})})
    stage = plan.stages[0].model_copy(update={"devices": tuple(range(16)), "tp": 16})
    group = kinds_of(plan.model_copy(update={"stages": (stage,)}))["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, worker = (group[f"{role}Template"]["spec"]["containers"][0]["command"] for role in ("leader", "worker"))
    assert leader[-6:] == ["--nnodes", "2", "--node-rank", "0", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    assert worker[-1] == "--headless" and "$(LWS_WORKER_INDEX)" in worker


def test_several_nodes_of_our_own_engine_are_a_ray_cluster_on_an_image_with_ray() -> None:
    """The image had no Ray."""
    found = xgpt.export(over_two_nodes("xgpt"), "k8s")
    assert any("EXTRA=ray" in need.remedy for need in found.needs)
    objects = {item["kind"]: item for item in objects_in(found.files)}
    assert objects["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "None"
    leader, worker = (group[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker"))
    start, _, command = filled(leader["command"])[2].partition(" && exec ")
    given = serve.make_context("serve", shlex.split(command)[4:]).params
    assert "--head" in start.split() and (given["engine"], given["ray"]) == ("xgpt", "auto")
    assert filled(worker["command"])[:3] == ["ray", "start", "--address=a-0.a.ns:6379"]
    for container in (leader, worker):
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= {entry["name"] for entry in container["env"]}
    pods = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "xgpt-opt-125m"}}}]
    policy = objects["NetworkPolicy"]["spec"]
    assert {"from": pods} in policy["ingress"] and {"to": pods} in policy["egress"]


@pytest.mark.parametrize("target", few(["compose", "k8s"], 2))
def test_the_token_of_a_gated_model_is_a_step(target: Target) -> None:
    """Compose takes HF_TOKEN with an empty default, and no step named it."""
    gated = by_itself().model_copy(update={"checkpoint": "hf://meta-llama/Llama-3.3-70B-Instruct"})
    steps = [need.remedy for need in xgpt.export(gated, target).needs if "TOKEN" in need.remedy]
    (step,) = steps
    name = "export HF_TOKEN=" if target == "compose" else r"generic xgpt-[a-z0-9-]+-hub --from-literal=token="
    assert re.search(name, step) and step.endswith("of an account that may read meta-llama/Llama-3.3-70B-Instruct")
    free = gated.model_copy(update={"checkpoint": "hf://Qwen/Qwen3-32B"})
    assert not [need for need in xgpt.export(free, target).needs if "TOKEN" in need.remedy]


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
@pytest.mark.parametrize("plan", [WAA, GROUPS], ids=["waa", "prefill groups"])
def test_lanes_become_prefill_and_decode_workers_of_the_plans_sizes(plan: Plan, target: Target) -> None:
    items = objects_in(export(plan.model_copy(update={"replicas": 2}), target))
    if target == "dynamo":
        (graph,) = (item for item in items if item["kind"] == "DynamoGraphDeployment")
        found = {c["type"]: (c["replicas"], c["podTemplate"]["spec"]) for c in graph["spec"]["components"]}
        assert found.pop("frontend")[0] == 1
    else:
        found = {
            item["spec"]["template"]["metadata"]["labels"]["llm-d.ai/role"]: (
                item["spec"]["replicas"],
                item["spec"]["template"]["spec"],
            )
            for item in items
            if item["kind"] == "Deployment"
        }
        assert found["decode"][1]["initContainers"][0]["restartPolicy"] == "Always"
    assert set(found) == {"prefill", "decode"}
    for role, most in (("prefill", None), ("decode", "16")):
        replicas, pod = found[role]
        command = pod["containers"][0]["command"]
        assert replicas == 2 * (plan.prefill_groups if role == "prefill" else 1)
        assert (
            "--pipeline-parallel-size" not in command
            and "NixlConnector" in command[command.index("--kv-transfer-config") + 1]
        )
        assert "--scheduler-cls" not in command
        assert most is None or command[command.index("--max-num-seqs") + 1] == most


HOSTILE = [
    "a\nkind: Secret",
    "a\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: evil}",
    """quote's "double" `tick`""",
    "$(touch /tmp/pwned)",
    "${HOME}; rm -rf /",
    "a: {b: [c]} # d & *e !f |g >h %i @j",
    "\x85\u2028next line\ttab \\n",
    "../../etc/passwd",
    "ÄÖÜ 漢字 \U0001f600",
    "x" * 300,
    "--host=0.0.0.0",
    "{{ 7 * 7 }}{% raw %}",
]
"""Names that would be something else in YAML, in a shell or in a template."""


def hostile(plan: Plan, name: str) -> Plan:
    update = {
        "model": plan.model.model_copy(update={"name": name}),
        "workload": plan.workload.model_copy(update={"name": name}),
        "cluster": plan.cluster.model_copy(update={"name": name}),
        "checkpoint": name,
    }
    return plan.model_copy(update=update)


@pytest.mark.parametrize("name", few(HOSTILE, 2))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["rra", "by itself"])
def test_a_name_stays_a_name(case: str, name: str, target: Target, tmp_path: Path) -> None:
    found, plain = export(hostile(PLANS[case](), name), target), export(hostile(PLANS[case](), "opt"), target)
    if target == "shell":
        if case == "rra":
            assert found["serve.sh"] == plain["serve.sh"]
        else:
            assert run_script(found["serve.sh"], tmp_path, "0")[3] == name
        return
    documents = [
        list(yaml.load_all(each["compose.yaml" if target == "compose" else "xgpt.yaml"], LOADER))
        for each in (found, plain)
    ]
    objects_in(found)
    if target == "compose":
        words = documents[0][0]["services"]["replica-0"]["entrypoint"]
        assert words == [
            word.replace("opt", name.replace("$", "$$")) if word == "opt" else word
            for word in documents[1][0]["services"]["replica-0"]["entrypoint"]
        ]
        return
    own_name = documents[0][0]["metadata"]["name"]
    assert re.fullmatch(r"xgpt-[a-z0-9]([a-z0-9-]*[a-z0-9])?", own_name) and len(f"{own_name}-models") < 64
    if case == "by itself":
        written = json.dumps(documents[0]).replace(own_name, "xgpt-opt").replace(json.dumps(name), '"opt"')
        assert written == json.dumps(documents[1])


@pytest.mark.parametrize("name", ["org/a\nkind: Pod", "org/a b", "a", "org/../x", "-x/y", "ÄÖ/x"])
def test_an_id_that_the_hub_does_not_allow_is_refused(name: str) -> None:
    plan = RRA.model_copy(update={"checkpoint": f"hf://{name}"})
    with pytest.raises(InputError, match="ORGANISATION/MODEL"):
        export(plan, "k8s")
    with pytest.raises(ValidationError, match="Hugging Face"):
        Plan.model_validate_json(plan.model_dump_json())


def test_what_a_target_cannot_run_is_refused_with_the_way_out() -> None:
    full = RRA.estimate.model_copy(update={"memory_bytes": (2**40,)})
    with pytest.raises(InputError, match="the plan needs"):
        export(RRA.model_copy(update={"estimate": full}), "shell")
    state = Recurrent(num_heads=2, weights=8, state_elements=8, state_bytes=8)
    model = RRA.model.model_copy(update={"blocks": (Block(layers=(0,), recurrent=state),)})
    with pytest.raises(InputError, match="vLLM's own scheduler"):
        export(RRA.model_copy(update={"model": model}), "shell")
    uneven = load_cluster("h200x8").model_copy(update={"num_nodes": 4, "devices_per_node": 4})
    stage = Stage(devices=tuple(range(7)), tp=7, decode_layers=(0, 12), kv_blocks=800)
    with pytest.raises(InputError, match="must use equally many devices on each"):
        export(RRA.model_copy(update={"cluster": uneven, "stages": (stage,)}), "k8s")
    with pytest.raises(InputError, match="pods request GPUs"):
        export(RRA.model_copy(update={"cluster": load_cluster("local")}), "k8s")
    with pytest.raises(InputError, match=r"vLLM, and the plan is for sglang: export to shell or compose or k8s"):
        export(by_itself().model_copy(update={"engine": load_engine("sglang")}), "llm-d")
    unnamed = RRA.model_copy(update={"checkpoint": None, "model": RRA.model.model_copy(update={"name": "mine"})})
    with pytest.raises(InputError, match=r"plan.checkpoint is missing"):
        export(unnamed, "k8s")


def test_a_replica_is_slow_by_its_own_share_of_the_plan() -> None:
    """Each replica was compared with the throughput of all, so that the alert stood whenever requests waited."""
    plan = by_itself(2)
    plan = plan.model_copy(update={"estimate": plan.estimate.but(ranges={"throughput_rps": (8.0, 16.0)})})
    (slow,) = (rule for rule in expressions(export(plan, "compose"))[0] if "min_over_time" in rule)
    assert " < 4 * sum(up" in slow


def test_a_fleet_scales_by_rule_and_schedule() -> None:
    """It was refused: its file had 4.6 MB."""
    fleet = deployable()
    for target in ("k8s", "llm-d"):
        files = export(fleet, target)
        items = objects_in(files)
        scaled = [item["spec"] for item in items if item["kind"] == "ScaledObject"]
        names = {item["metadata"]["name"] for item in items if item["kind"] == "Deployment"}
        assert {spec["scaleTargetRef"]["name"] for spec in scaled} == names and len(names) == 2
        assert [spec["minReplicaCount"] for spec in scaled] == [1, 0]
        crons = [trigger["metadata"] for spec in scaled for trigger in spec["triggers"] if trigger["type"] == "cron"]
        lead = {"timezone": "UTC", "start": "59 11 * * *", "end": "0 15 * * *"}  # a replica starts in a minute
        assert crons == [{**lead, "desiredReplicas": "2"}, {**lead, "desiredReplicas": "1"}]
        queries = [
            trigger["metadata"]["query"]
            for spec in scaled
            for trigger in spec["triggers"]
            if "query" in trigger["metadata"]
        ]
        rules = yaml.safe_load(next(text for name, text in files.items() if "objects" in name).split("---")[-1])[
            "spec"
        ]["groups"][0]["rules"]
        wanted = [rule for rule in rules if rule.get("record") == "xgpt:replicas_wanted"]
        assert len(wanted) == len(queries) == 1 and wanted[0]["labels"]["replicas"] in queries[0]
        assert "rule xgpt:replicas_wanted and the forecast's schedule (UTC), the higher" in files["keda.yaml"]
    for target in ("shell", "compose"):
        assert export(fleet, target)  # the cheapest constant fleet
    scaling = Scaling(fleet)
    assert scaling.wanted(0.0, 2.0) == (1, 0) and scaling.wanted(13 * 3600.0, 9.0) == (2, 1)
    assert scaling.wanted(0.0, 20.0)[scaling.marginal] > scaling.most[scaling.marginal]


def test_a_kind_that_nothing_scales_stays_at_its_least_number() -> None:
    """Without a schedule, its ScaledObject had no triggers, which KEDA refuses."""
    fleet = deployable()
    items = objects_in(export(fleet.model_copy(update={"intervals": fleet.intervals[144:200]}), "k8s"))
    (scaled,) = (item["spec"] for item in items if item["kind"] == "ScaledObject")
    counts = {each["metadata"]["name"]: each["spec"]["replicas"] for each in items if each["kind"] == "Deployment"}
    assert len(scaled["triggers"]) == 1 and counts.pop(scaled["scaleTargetRef"]["name"]) == 1
    assert list(counts.values()) == [1]


def test_the_comment_on_scaling_names_the_triggers_that_there_are() -> None:
    """ "The higher of both" stood over a single trigger."""
    assert "# KEDA scales by the recording rule xgpt:replicas_wanted.\n" in export(by_itself(), "k8s")["keda.yaml"]


def test_the_command_prints_steps_and_checks_what_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(dump_json(by_itself()))
    for name in ("kubectl", "docker"):
        (tmp_path / name).write_text(f'#!/bin/sh\n[ -e "{tmp_path}/all" ] || {{ echo "$3: NotFound" >&2; exit 1; }}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    asked = ["export", str(tmp_path / "plan.json"), "--to", "k8s", "-o", str(tmp_path / "out")]
    told = CliRunner().invoke(cli, asked)
    assert told.exit_code == 0 and (tmp_path / "out" / "xgpt.yaml").is_file()
    secret = "kubectl create secret generic xgpt-llama-3-1-8b-keys"
    assert told.output.index(secret) < told.output.index("kubectl apply -k .")
    lacks = CliRunner().invoke(cli, [*asked, "--check"])
    assert "  secret xgpt-llama-3-1-8b-keys: missing; kubectl" in lacks.stdout and lacks.exception is not None
    assert "next" not in lacks.stdout, "each remedy on its line, and no next step before them"
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'connection refused' >&2; exit 1\n")
    unknown = CliRunner().invoke(cli, [*asked, "--check"]).stdout
    assert "keys: not known (connection refused); kubectl" in unknown, "nobody looked, so it is not missing"
    (tmp_path / "kubectl").write_text("#!/bin/sh\n")
    (tmp_path / "all").touch()
    checked = CliRunner().invoke(cli, [*asked, "--check"])
    assert checked.exit_code == 0 and secret not in checked.output and "kubectl apply -k ." in checked.output
