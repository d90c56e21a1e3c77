"""vLLM's flags, the lane inside it and the channel to it: all that needs no vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from tests.vllm.plans import exportable, here, plan_with
from xgpt.app.exporting import Target, export
from xgpt.cli import cli
from xgpt.cli.serve import command as serve
from xgpt.errors import InputError, MachineError
from xgpt.io import dump_json, sha256
from xgpt.policies import Request
from xgpt.resolve import load_cluster, load_model
from xgpt.schema import (
    Account,
    Admission,
    Arrival,
    ChunkedSettings,
    ClusterSpec,
    DeviceKind,
    OrcaSettings,
    Plan,
    RraSettings,
    Stage,
    StaticSettings,
    StepRecord,
    WaaSettings,
)
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.channel import (
    Accepted,
    Cancel,
    CoreSide,
    Down,
    FrontSide,
    HostSide,
    Output,
    Refused,
    Stepped,
    Submit,
    Up,
)
from xrunner.vllm.command import CPU_BLOCK_SIZE, launch, launch_lane, variables
from xrunner.vllm.lane import VllmRoom, build_lane, change_lane
from xrunner.vllm.process import PYTHON_VARIABLE, package_path, python
from xsimulator.memory import LaneMemory
from xsimulator.stages import lane_of

ROOM = VllmRoom(num_blocks=400, block_size=32, max_running=64)
RRA = plan_with(RraSettings(encode_batch=6, decode_iterations=5))
CHUNKED = plan_with(ChunkedSettings(token_budget=48, max_batch=8))


def fitting(plan: Plan) -> Plan:
    return exportable(plan, "/weights")


def waa() -> Plan:
    layers = (0, 12)
    stages = (
        Stage(lane="encode", devices=(0,), encode_layers=layers, decode_layers=(0, 0), kv_blocks=100),
        Stage(lane="decode", devices=(1,), decode_layers=layers, kv_blocks=800),
    )
    policy = WaaSettings(encode_batch=4, max_decode_batch=32)
    update = {"cluster": load_cluster("h200x8"), "policy": policy, "stages": stages}
    return fitting(RRA).model_copy(update=update)


def cpu(num_devices: int) -> ClusterSpec:
    device = DeviceKind(name="cpu", type="cpu", memory_bytes=2**34, usable_memory=0.5)
    return ClusterSpec(name="local", device=device, devices_per_node=num_devices)


def flags(arguments: tuple[str, ...]) -> dict[str, str]:
    return {flag: value for flag, value in zip(arguments, (*arguments[1:], ""), strict=True) if flag.startswith("--")}


def test_flags_say_what_the_plan_says() -> None:
    started = launch(fitting(RRA), plan_path="plan.json")
    given = flags(started.arguments)
    assert started.model == "/weights"
    assert given["--scheduler-cls"] == "xrunner.vllm.scheduler.XgptScheduler"
    assert json.loads(given["--additional-config"]) == {"xgpt": {"plan": "plan.json"}}
    assert given["--block-size"] == "16" and given["--num-gpu-blocks-override"] == "801"
    assert given["--dtype"] == "float32"
    assert "--enable-prefix-caching" in given and "--no-async-scheduling" in given
    without = flags(launch(fitting(RRA), plan_path="plan.json", reuse=False).arguments)
    assert "--no-enable-prefix-caching" in without


def test_uneven_stages_become_a_partition_and_uneven_degrees_an_error() -> None:
    first = Stage(devices=(0,), decode_layers=(0, 5), kv_blocks=800)
    second = Stage(devices=(1,), decode_layers=(5, 12), kv_blocks=700)
    plan = fitting(RRA).model_copy(update={"stages": (first, second)})
    started = launch(plan, plan_path="plan.json")
    assert started.variables["VLLM_PP_LAYER_PARTITION"] == "5,7"
    assert flags(started.arguments)["--pipeline-parallel-size"] == "2"
    wide = second.model_copy(update={"devices": (1, 2), "tp": 2})
    with pytest.raises(InputError, match="one tensor-parallel degree"):
        launch(plan.model_copy(update={"stages": (first, wide)}), plan_path="plan.json")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (fitting(plan_with(StaticSettings(batch=8))), "frees a slot"),
        (waa(), "a vLLM of its own"),
        (RRA, "plan with --model DIRECTORY"),
        (fitting(RRA).model_copy(update={"model": load_model("t5-11b")[0]}), "no plan has a place for its encoder"),
    ],
    ids=["static", "waa", "no weights", "encoder"],
)
def test_what_vllm_cannot_run_is_refused(plan: Plan, says: str) -> None:
    with pytest.raises(InputError, match=says):
        launch(plan, plan_path="plan.json")


def test_each_lane_of_waa_is_a_vllm_with_its_end_of_the_connector() -> None:
    for lane, role, blocks in (("encode", "kv_producer", "101"), ("decode", "kv_consumer", "801")):
        given = flags(launch_lane(waa(), lane, {"kv_connector": "NixlConnector"}).arguments)
        assert json.loads(given["--kv-transfer-config"]) == {"kv_connector": "NixlConnector", "kv_role": role}
        assert given["--num-gpu-blocks-override"] == blocks
        assert "--disable-hybrid-kv-cache-manager" in given


def test_of_a_machines_cores_as_many_compute_with_a_connector_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, reserved in ((1, "0"), (2, "1"), (16, "1")):
        monkeypatch.setattr("xrunner.vllm.command.num_cores", lambda cores=cores: cores)
        assert variables(cpu(1), [0]) == {"VLLM_CPU_NUM_OF_RESERVED_CPU": reserved}
    assert variables(cpu(2), [1]) == {"VLLM_CPU_OMP_THREADS_BIND": "8-15"}
    assert variables(cpu(2), [0, 1]) == {"VLLM_CPU_OMP_THREADS_BIND": "0-7|8-15"}


@pytest.mark.parametrize(("splits", "tp"), [((0, 12), 1), ((0, 6, 12), 1), ((0, 4, 12), 1), ((0, 6, 12), 2)])
def test_vllm_is_told_the_memory_that_the_plan_counts_on(splits: tuple[int, ...], tp: int) -> None:
    """On CPUs: K/V of the plan's blocks on its fullest device, and of the block that vLLM keeps for itself."""
    stages = tuple(
        Stage(devices=tuple(range(tp * i, tp * (i + 1))), decode_layers=layers, tp=tp, kv_blocks=800)
        for i, layers in enumerate(pairwise(splits))
    )
    plan = fitting(RRA).model_copy(update={"cluster": cpu(tp * len(stages)), "stages": stages})
    given = flags(launch(plan, plan_path="plan.json").arguments)
    memory = LaneMemory(plan.model, plan.cluster, plan.precision, lane_of(stages, plan.cluster), plan.block_size)
    with_cache, without = memory.device_bytes(800, 0), memory.device_bytes(0, 0)
    planned = max(used - fixed for used, fixed in zip(with_cache, without, strict=True))
    one_block = planned / 800 * CPU_BLOCK_SIZE / plan.block_size
    assert int(given["--kv-cache-memory-bytes"]) == pytest.approx(planned + one_block, abs=2)


def test_a_lane_needs_the_memory_that_the_plan_counts_on() -> None:
    with pytest.raises(InputError, match="vLLM has 399 of 32 tokens"):
        build_lane(RRA, VllmRoom(num_blocks=399, block_size=32, max_running=64))
    assert build_lane(RRA, ROOM).pool.kv_blocks == 400


def test_a_lane_goes_on_by_another_plan_with_all_requests_in_it() -> None:
    lane = build_lane(CHUNKED, ROOM)
    for number in range(3):
        lane.submit(Request(number, input_length=40, max_output=4))
    step = lane.next_step()
    assert step is not None
    assert [(chunk.id, chunk.length) for chunk in step.encode] == [(0, 40), (1, 8)]
    lane.settle(step, ())
    assert change_lane(lane, RRA, ROOM) is lane
    step = lane.next_step()
    assert step is not None
    assert [(chunk.id, chunk.start, chunk.length) for chunk in step.encode] == [(1, 8, 32), (2, 0, 40)]
    assert not step.decode
    with pytest.raises(InputError, match="take an empty engine"):
        change_lane(lane, plan_with(OrcaSettings(max_batch=8), kv="quantile"), ROOM)


def test_an_empty_lane_changes_in_all_respects() -> None:
    lane = change_lane(build_lane(CHUNKED, ROOM), plan_with(OrcaSettings(max_batch=8), kv="quantile"), ROOM)
    assert lane.pool.kv == "quantile"


def test_an_order_by_deadlines_has_them_and_its_row() -> None:
    plan = RRA.model_copy(update={"admission": Admission(order="das", row_tokens=100, patience=None)})
    lane = build_lane(plan, ROOM)
    for number, (length, deadline_ns) in enumerate([(60, None), (30, 900), (40, 500)]):
        lane.submit(Request(number, length, max_output=4, deadline_ns=deadline_ns))
    assert [request.id for request in lane.pool.waiting.ahead(2)] == [1, 2]
    assert lane.expire(600) == [2]


def test_plans_go_down_the_channel_and_steps_come_up(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}"
    front = FrontSide(address, ["both"])
    core, host = CoreSide(address, follows_plans=True), HostSide(address, "both")

    def told() -> Up:
        front.wait(5)
        message = front.receive()
        assert message is not None
        return message

    try:
        while not front.reaches(["both"], 1):
            pass
        front.send_plan(CHUNKED)
        plans: list[Plan] = []
        while not plans:
            plans += core.plans()
        assert plans == [CHUNKED]
        core.accept(CHUNKED)
        assert told() == Accepted(core.core, sha256(CHUNKED))
        core.refuse(CHUNKED, "no")
        assert told() == Refused(core.core, sha256(CHUNKED), "no")
        record = StepRecord(1, 2, ((7, 0, 3),), (), (7,), (Arrival(7, 3, 1, 0, account=Account("a", 2.0, 1)),), ())
        stepped = Stepped("both", core.core, [Output(7, [5], "length", [(-1.0, [(5, -1.0)])])], [record], 3, 1)
        core.send(stepped)
        assert told() == stepped
        request = Submit(7, (1, 2, 3), 1, sampling={"seed": 2**63 - 1, "temperature": 0.5}, account=Account("a"))
        front.send("both", request)
        front.send("both", Cancel(7))
        requests: list[Down] = []
        while len(requests) < 2:
            requests += host.requests()
        assert requests == [request, Cancel(7)]
        assert front.receive() is None
    finally:
        for end in (core, host, front):
            end.close()


def test_vllms_processes_see_our_packages_alone() -> None:
    with package_path() as directory:
        assert sorted(path.name for path in directory.iterdir()) == ["xgpt", "xrunner"]
        assert (directory / "xrunner" / "vllm" / "scheduler.py").is_file()


def test_a_machine_without_vllm_says_where_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr("xrunner.vllm.process.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=PYTHON_VARIABLE):
        python()


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


def objects_of(plan: Plan) -> dict[str, Any]:
    """The exported Kubernetes objects, validated, by kind."""
    items = list(yaml.safe_load_all(export(plan, "k8s")["xgpt.yaml"]))
    for item in items:
        kubernetes_validate.validate(item, "1.31", strict=True)
    return {item["kind"]: item for item in items}


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


def test_what_vllm_does_not_take_of_serves_options_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGPT_CLUSTER_SECRET", "x" * 16)
    (tmp_path / "plan.json").write_text(dump_json(exportable(here(RRA), str(tmp_path))))
    options = ["--engine", "vllm", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29400"]
    refused = CliRunner().invoke(cli, ["serve", str(tmp_path / "plan.json"), *options])
    assert isinstance(refused.exception, InputError) and "on this machine alone" in str(refused.exception)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("target", ["vllm", "k8s", "script"])
def test_a_name_stays_a_name(name: str, target: Target, tmp_path: Path) -> None:
    plain, files = export(hostile("opt"), target), export(hostile(name), target)
    assert files.keys() == plain.keys()
    assert Plan.model_validate_json(files["plan.json"]) == hostile(name)
    for script in ("serve.sh", "start.sh", "requirements.txt", "Dockerfile"):
        assert files.get(script) == plain.get(script)  # nothing of the plan's names comes in
    if target != "k8s":
        return
    found, expected = objects_of(hostile(name)), objects_of(hostile("opt"))
    assert found.keys() == expected.keys()
    own = found["Deployment"]["metadata"]["name"]
    assert re.fullmatch(r"xgpt-[a-z0-9]([a-z0-9-]*[a-z0-9])?", own) and len(f"{own}-model") < 64
    assert json.loads(found["ConfigMap"]["data"]["plan.json"])["model"]["name"] == name
    for kind in ("Deployment", "Service", "NetworkPolicy"):
        assert json.loads(json.dumps(found[kind]).replace(own, "xgpt-opt")) == expected[kind]


def test_exported_pods_may_do_nothing_that_serving_does_not_take() -> None:
    objects = objects_of(fitting(RRA).model_copy(update={"cluster": load_cluster("h200x8"), "replicas": 3}))
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 3
    held = pod["securityContext"]
    assert held["runAsNonRoot"] and held["runAsUser"] and held["seccompProfile"] == {"type": "RuntimeDefault"}
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
    words = run_script(script, tmp_path, env={"NODE_RANK": "1", "HEAD": "h"})
    assert words.pop(0) == "serve"
    given = serve.make_context("serve", words).params
    assert (given["nnodes"], given["node_rank"], given["rendezvous"]) == (2, 1, "h:29400")
    assert "XGPT_CLUSTER_SECRET" in script


def test_no_requirement_is_a_strangers_package_of_our_name() -> None:
    """The package index has one."""
    for target in ("vllm", "k8s"):
        for name, text in export(fitting(RRA), target).items():
            lines = (line for line in text.splitlines() if not line.startswith("#"))
            assert name == "plan.json" or not any("xgpt==" in line for line in lines)


def test_a_script_for_one_node_takes_no_more_devices_than_it_has() -> None:
    plan = fitting(RRA).model_copy(update={"cluster": load_cluster("h200x8"), "replicas": 9})
    with pytest.raises(InputError, match="takes 9 devices; the script is for one node, of 8"):
        export(plan, "vllm")


def test_a_plan_that_does_not_fit_is_not_exported() -> None:
    plan = fitting(RRA)
    full = plan.estimate.model_copy(update={"memory_bytes": (2**40,)})
    with pytest.raises(InputError, match="offers"):
        export(plan.model_copy(update={"estimate": full}), "vllm")


def test_the_command_writes_files_and_says_how_to_start(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(dump_json(fitting(RRA)))
    out = tmp_path / "out"
    result = CliRunner().invoke(cli, ["export", str(tmp_path / "plan.json"), "--to", "script", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "sh start.sh" in result.output
    assert "exec xgpt serve plan.json" in (out / "start.sh").read_text()
