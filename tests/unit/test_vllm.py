"""vLLM's flags, the lane inside it and the channel to it: all that needs no vLLM."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from tests.vllm.plans import exportable, plan_with
from xgpt.app.exporting import export
from xgpt.cli import cli
from xgpt.cli.serve import command as serve
from xgpt.errors import InputError, MachineError
from xgpt.io import dump_json, sha256
from xgpt.policies import Request
from xgpt.resolve import load_cluster
from xgpt.schema import (
    ChunkedSettings,
    ClusterSpec,
    DeviceKind,
    OrcaSettings,
    Plan,
    RraSettings,
    Stage,
    StaticSettings,
    WaaSettings,
)
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.channel import Accepted, Ended, EngineSide, Refused, ServerSide
from xrunner.vllm.command import CPU_BLOCK_SIZE, launch, launch_lane, variables
from xrunner.vllm.lane import Room, build_lane, change_lane
from xrunner.vllm.process import PYTHON_VARIABLE, package_path, python
from xsimulator.memory import LaneMemory
from xsimulator.placement import lane_of

ROOM = Room(num_blocks=400, block_size=32, max_running=64)
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
    started = launch(fitting(RRA), plan_path="plan.json", host="127.0.0.1", port=8001)
    given = flags(started.arguments)
    assert started.model == "/weights"
    assert given["--scheduler-cls"] == "xrunner.vllm.scheduler.XgptScheduler"
    assert json.loads(given["--additional-config"]) == {"xgpt": {"plan": "plan.json"}}
    assert given["--block-size"] == "16" and given["--num-gpu-blocks-override"] == "801"
    assert (given["--dtype"], given["--port"]) == ("float32", "8001")
    assert "--no-enable-prefix-caching" in given and "--no-async-scheduling" in given


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
    ],
    ids=["static", "waa", "no weights"],
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
    memory = LaneMemory(plan.model, plan.cluster, plan.dtype, lane_of(stages, plan.cluster), plan.block_size)
    with_cache, without = memory.device_bytes(800, 0), memory.device_bytes(0, 0)
    planned = max(used - fixed for used, fixed in zip(with_cache, without, strict=True))
    one_block = planned / 800 * CPU_BLOCK_SIZE / plan.block_size
    assert int(given["--kv-cache-memory-bytes"]) == pytest.approx(planned + one_block, abs=2)


def test_a_lane_needs_the_memory_that_the_plan_counts_on() -> None:
    with pytest.raises(InputError, match="vLLM has 399 of 32 tokens"):
        build_lane(RRA, Room(num_blocks=399, block_size=32, max_running=64))
    assert build_lane(RRA, ROOM).pool.kv_blocks == 400


def test_a_lane_goes_on_by_another_plan_with_everybody_in_it() -> None:
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


def test_plans_go_down_the_channel_and_lengths_come_up(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    server = ServerSide(address)
    engine = EngineSide(address, RRA)
    try:
        assert server.receive(5) == (0, Accepted(sha256(RRA)))
        assert server.num_engines == 1
        assert list(engine.plans()) == []
        server.send(CHUNKED)
        plans: list[Plan] = []
        while not plans:
            plans += engine.plans()
        assert plans == [CHUNKED]
        engine.refuse(CHUNKED, "no")
        engine.send(Ended(12, 3))
        assert server.receive(5) == (0, Refused(sha256(CHUNKED), "no"))
        assert server.receive(5) == (0, Ended(12, 3))
        assert server.receive(0) is None
    finally:
        engine.close()
        server.close()


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


def test_the_exported_script_is_the_command_pinned_to_a_version() -> None:
    files = export(fitting(RRA), "vllm")
    assert Plan.model_validate_json(files["plan.json"]) == fitting(RRA)
    assert f"vllm=={TESTED_VERSION}" in files["requirements.txt"]
    words = shlex.split(files["serve.sh"].partition("exec ")[2])
    expected = launch(fitting(RRA), plan_path="plan.json", host="127.0.0.1", port=8000)
    assert [word for word in words if word != "\n"] == [*expected.command("python3"), "$@"]


def test_the_exported_script_listens_further_only_where_that_is_said(tmp_path: Path) -> None:
    for name, text in export(fitting(RRA), "vllm").items():
        (tmp_path / name).write_text(text)
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for more in ([], ["--host", "0.0.0.0"]):
        words = subprocess.check_output(["sh", tmp_path / "serve.sh", *more], env=path, text=True).split()
        assert words[-4 - len(more) :] == ["--host", "127.0.0.1", "--port", "8000", *more]  # vLLM takes the last


def test_exported_objects_are_kubernetes_own() -> None:
    files = export(fitting(RRA).model_copy(update={"replicas": 3}), "k8s")
    objects = list(yaml.safe_load_all(files["xgpt.yaml"]))
    for item in objects:
        kubernetes_validate.validate(item, "1.31", strict=True)
    config, deployment, service = objects
    assert "  plan.json: |\n    {\n" in files["xgpt.yaml"]  # as a reader would have it
    assert deployment["spec"]["replicas"] == 3
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert json.loads(config["data"]["plan.json"])["replicas"] == 1
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_exported_start_of_our_own_engine_is_one_that_it_takes() -> None:
    two_nodes = load_cluster("a40x16")
    first = Stage(devices=tuple(range(8)), tp=8, decode_layers=(0, 12), kv_blocks=800)
    plan = fitting(RRA).model_copy(update={"cluster": two_nodes, "stages": (first,), "replicas": 2})
    script = export(plan, "torchrun")["start.sh"]
    words = shlex.split(script.partition("exec xgpt serve")[2].replace("${NODE_RANK:?}", "1").replace("${HEAD:?}", "h"))
    given = serve.make_context("serve", words).params
    assert (given["nnodes"], given["node_rank"], given["rendezvous"]) == (2, 1, "h:29400")
    assert "XGPT_CLUSTER_SECRET" in script


def test_waa_is_exported_as_two_lanes_and_their_front() -> None:
    files = export(waa(), "vllm")
    assert "nixl" in files["requirements.txt"]
    for lane, role, devices, port in (("encode", "producer", "0", 5600), ("decode", "consumer", "1", 5601)):
        script = files[f"{lane}.sh"]
        assert f"kv_{role}" in script and "--host 127.0.0.1" in script
        assert f"CUDA_VISIBLE_DEVICES={devices}\n" in script
        assert f"VLLM_NIXL_SIDE_CHANNEL_PORT={port}\n" in script


def test_what_the_front_cannot_drive_is_not_exported() -> None:
    with pytest.raises(InputError, match="plan for 2 devices"):
        export(waa().model_copy(update={"replicas": 2}), "vllm")


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


@pytest.mark.timeout(60)
def test_both_lanes_end_with_their_script(tmp_path: Path) -> None:
    """Three programs take part; each of them, here a fake, shares a lock for as long as it runs."""
    for name, text in export(waa(), "vllm").items():
        (tmp_path / name).write_text(text)
    fake = tmp_path / "python3"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import fcntl, sys, time\n"
        "fcntl.flock(file := open('lock', 'w'), fcntl.LOCK_SH)\n"
        "print('here', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    fake.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(["sh", tmp_path / "serve.sh"], stderr=subprocess.PIPE, env=path) as script:
        assert script.stderr is not None
        for _ in range(3):
            assert script.stderr.readline() == b"here\n"
        script.terminate()
        with (tmp_path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def test_a_plan_that_does_not_fit_is_not_exported() -> None:
    plan = fitting(RRA)
    full = plan.estimate.model_copy(update={"memory_bytes": (2**40,)})
    with pytest.raises(InputError, match="offers"):
        export(plan.model_copy(update={"estimate": full}), "vllm")


def test_the_command_writes_files_and_says_how_to_start(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(dump_json(fitting(RRA)))
    out = tmp_path / "out"
    result = CliRunner().invoke(cli, ["export", str(tmp_path / "plan.json"), "--to", "torchrun", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "sh start.sh" in result.output
    assert "exec xgpt serve plan.json" in (out / "start.sh").read_text()
