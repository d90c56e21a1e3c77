"""vLLM's flags, the lane inside it and the channel to it: all that needs no vLLM."""

from __future__ import annotations

import json
import resource
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.vllm.plans import exportable, here, plan_with, waa_plan
from xgpt.cli import cli
from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import dump_json
from xgpt.core.policies import Request
from xgpt.core.schema import (
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
from xgpt.resolve import load_cluster, load_model
from xgpt.serving.checking import check_runs
from xrunner.channel.messages import (
    Alive,
    Cancel,
    Down,
    Follow,
    Followed,
    Ready,
    Refused,
    Rested,
    Room,
    Stepped,
    Submit,
    Up,
)
from xrunner.generation import Generation, Logprobs, SamplingParams, Token
from xrunner.vllm.channel import Lanes, VllmEnd
from xrunner.vllm.command import CPU_BLOCK_SIZE, launch, launch_lane, variables
from xrunner.vllm.lane import PlannedLane, VllmRoom, build_lane
from xrunner.vllm.process import PYTHON_VARIABLE, package_path, python
from xrunner.vllm.waa import waa_launches
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
    assert given["--block-size"] == "16" and "--num-gpu-blocks-override" not in given
    assert given["--gpu-memory-utilization"] == "0.9"
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
    with pytest.raises(InputError, match="the same tensor-parallel degree"):
        launch(plan.model_copy(update={"stages": (first, wide)}), plan_path="plan.json")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (fitting(plan_with(StaticSettings(batch=8))), "frees a slot"),
        (waa(), "need two vLLMs"),
        (RRA, "plan with --model DIRECTORY"),
        (fitting(RRA).model_copy(update={"model": load_model("t5-11b")[0]}), "which xgpt does not run in vLLM"),
    ],
    ids=["static", "waa", "no weights", "encoder"],
)
def test_what_vllm_cannot_run_is_refused(plan: Plan, says: str) -> None:
    with pytest.raises(InputError, match=says):
        launch(plan, plan_path="plan.json")


def test_each_lane_of_waa_is_a_vllm_with_its_end_of_the_connector() -> None:
    for lane, role in (("encode", "kv_producer"), ("decode", "kv_consumer")):
        given = flags(launch_lane(waa(), lane, {"kv_connector": "NixlConnector"}).arguments)
        assert json.loads(given["--kv-transfer-config"]) == {"kv_connector": "NixlConnector", "kv_role": role}
        assert "--disable-hybrid-kv-cache-manager" in given


def test_each_prefill_group_is_a_vllm_on_its_own_devices_and_no_other_engine_runs_them(tmp_path: Path) -> None:
    plan = exportable(waa_plan(2), "/weights")
    assert [each.variables["CUDA_VISIBLE_DEVICES"] for each in waa_launches(plan, tmp_path)] == ["0", "1", "2"]
    with pytest.raises(InputError, match="serve the plan with `--engine vllm`"):
        check_runs(plan)
    fields = plan.model_dump(mode="json")
    fields["stages"][0] |= {"tp": 2, "devices": [0, 3]}
    with pytest.raises(ValueError, match="need the same tp"):
        Plan.model_validate(fields)


def test_of_a_machines_cores_as_many_compute_with_a_connector_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, reserved in ((1, "0"), (2, "1"), (16, "1")):
        monkeypatch.setattr("xrunner.vllm.command.num_cores", lambda cores=cores: cores)
        assert variables(cpu(1), [0]) == {"VLLM_CPU_NUM_OF_RESERVED_CPU": reserved}
    assert variables(cpu(1), [0], threads=16) == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, "as when it was profiled"
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
    with pytest.raises(InputError, match="vLLM has only 379 K/V blocks of 32 tokens"):
        build_lane(RRA, VllmRoom(num_blocks=379, block_size=32, max_running=64))
    assert build_lane(RRA, VllmRoom(num_blocks=381, block_size=32, max_running=64)).pool.kv_blocks == 381
    assert build_lane(RRA, ROOM).pool.kv_blocks == 400


def test_a_lane_goes_on_by_another_plan_with_all_requests_in_it() -> None:
    told: list[Followed | Refused] = []
    planned = PlannedLane(CHUNKED, ROOM, told.append)
    lane = planned.lane
    for number in range(3):
        lane.submit(Request(number, input_length=40, max_output=4))
    step = lane.next_step()
    assert step is not None
    assert [(chunk.id, chunk.length) for chunk in step.encode] == [(0, 40), (1, 8)]
    lane.settle(step, ())
    planned.go_over_to(RRA)
    assert planned.lane is lane and not planned.is_emptying and told == [Followed()]
    step = lane.next_step()
    assert step is not None
    assert [(chunk.id, chunk.start, chunk.length) for chunk in step.encode] == [(1, 8, 32), (2, 0, 40)]
    assert not step.decode


def test_a_plan_with_another_promise_waits_until_no_request_is_inside() -> None:
    told: list[Followed | Refused] = []
    planned = PlannedLane(CHUNKED, ROOM, told.append)
    planned.lane.submit(Request(0, input_length=40, max_output=4))
    planned.go_over_to(plan_with(OrcaSettings(max_batch=8), kv="quantile"))
    planned.go_on_if_empty()
    assert planned.is_emptying and planned.taken.is_emptying and not told
    planned.lane.cancel(0)
    planned.go_on_if_empty()
    assert planned.lane.pool.kv == "quantile" and not planned.is_emptying and told == [Followed()]
    planned.go_over_to(plan_with(OrcaSettings(max_batch=8), kv_tokens=12800 * 32))
    assert isinstance(told[-1], Refused) and "vLLM has only 400 K/V blocks of 32 tokens" in told[-1].reason


def test_an_order_by_deadlines_has_them_and_its_row() -> None:
    plan = RRA.model_copy(update={"admission": Admission(order="das", row_tokens=100, patience=None)})
    lane = build_lane(plan, ROOM)
    for number, (length, deadline_ns) in enumerate([(60, None), (30, 900), (40, 500)]):
        lane.submit(Request(number, length, max_output=4, deadline_ns=deadline_ns))
    assert [request.id for request in lane.pool.waiting.ahead(2)] == [1, 2]
    assert lane.expire(600) == [2]


def test_plans_go_down_the_channel_and_steps_come_up(tmp_path: Path) -> None:
    front = Lanes(str(tmp_path), [("both", 0)], 1)
    core, host = VllmEnd(str(tmp_path), "both", plans=True), VllmEnd(str(tmp_path), "both")

    def told() -> Up:
        while (message := front.receive()) is None or isinstance(message, Alive):
            front.wait(0.01)
        return message

    try:
        host.send(Ready(takes_seeds=True, scores_prompts=False, resumes=True))
        assert told() == Ready(takes_seeds=True, scores_prompts=False, resumes=True)
        front.send(Follow(dump_json(CHUNKED)))
        plans: list[Plan] = []
        while not plans:
            plans += core.plans()
        assert plans == [CHUNKED]
        for message in (Followed(), Refused("no")):
            core.send(message)
            assert told() == message
        record = StepRecord(1, 2, ((7, 0, 3),), (), (7,), (Arrival(7, 3, 1, 0, account=Account("a", 2.0, 1)),), ())
        tokens = [Token(7, 5, "length", Logprobs(-1.0, ((5, -1.0),)))]
        stepped = Stepped(tokens, [record], Room(3, 0, 1), {7: {"at": 1}})
        core.send(stepped)
        assert told() == stepped
        sampling = SamplingParams(seed=2**63 - 1, temperature=0.5)
        request = Submit(Generation(7, (1, 2, 3), 1, sampling=sampling, account=Account("a")), {"at": 1})
        front.send(request)
        front.send(Cancel(7))
        requests: list[Down] = []
        while len(requests) < 2:
            requests += host.received()
        assert requests == [request, Cancel(7)]
        assert front.receive() is None
    finally:
        for end in (core, host, front):
            end.close()


def test_a_front_that_may_open_no_more_files_keeps_its_engine(tmp_path: Path) -> None:
    """`accept` then fails even if nobody connects; idle clients that took all files once ended the server."""
    front = Lanes(str(tmp_path), [("both", 0)], 1)
    core, host = VllmEnd(str(tmp_path), "both", plans=True), VllmEnd(str(tmp_path), "both")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        host.send(Ready(takes_seeds=True, scores_prompts=False, resumes=True))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        assert front.receive() == Alive([])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while isinstance(message := front.receive(), Alive):
            pass
        assert isinstance(message, Ready)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for end in (core, host, front):
            end.close()


def test_what_several_cores_tell_is_that_of_one_engine(tmp_path: Path) -> None:
    front = Lanes(str(tmp_path), [], 2)
    cores = [VllmEnd(str(tmp_path), "both", plans=True) for _ in range(2)]
    try:
        while isinstance(message := front.receive(), Alive):
            pass
        assert isinstance(message, Ready)
        front.send(Follow(dump_json(CHUNKED)))
        for core in cores:
            core.send(Followed())
            core.send(Rested(Room(2, 1, 3, core is cores[0])))
        seen: list[Up] = []
        while len(seen) < 3:
            front.wait(5)
            seen += filter(None, [front.receive()])
        assert seen.count(Followed()) == 1
        assert seen[-1] in (Rested(Room(4, 2, 6, True)), Followed()) and Rested(Room(4, 2, 6, True)) in seen
    finally:
        for end in (*cores, front):
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


def test_what_vllm_does_not_take_of_serves_options_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(dump_json(exportable(here(RRA), str(tmp_path))))
    options = ["--engine", "vllm", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    refused = CliRunner().invoke(cli, ["serve", str(tmp_path / "plan.json"), *options])
    assert isinstance(refused.exception, InputError) and "do not divide evenly among the machines" in str(
        refused.exception
    )
