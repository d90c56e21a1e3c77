"""One vLLM on several machines, with fakes in place of its processes: they meet, and notice losses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import fake_vllm
from tests.fakes import eventually, expected_tokens
from tests.rings import LOOPBACKS
from tests.unit.xrunner.vllm.test_engine import ORCA, PROMPTS, ids, run, submit
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import ClusterSpec, Plan, Stage
from xgpt.serving.serve import ServeRequest, share_of
from xrunner.channel import EngineLost
from xrunner.vllm import machines
from xrunner.vllm.command import launch
from xrunner.vllm.engine import VllmEngine
from xrunner.vllm.machines import Followers, Machines, follow
from xrunner.vllm.process import PYTHON_VARIABLE

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm.program(tmp_path)))
    monkeypatch.setattr(machines, "RETRY_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
    return number


@contextmanager
def following(port: int, plan: Plan = ORCA, host: str = "127.0.0.1") -> Iterator[Callable[[], bool]]:
    """The second machine, in a thread. Yields whether it still runs."""
    second, over = Machines(2, 1, host, port), threading.Event()
    started = second.spread(launch(plan, plan_path="plan.json"))
    thread = threading.Thread(target=follow, args=(plan, second, started, over.is_set))
    thread.start()
    try:
        yield thread.is_alive
    finally:
        over.set()
        thread.join()


def test_each_machine_starts_its_part_of_one_vllm(port: int) -> None:
    first, second = (Machines(2, rank, "127.0.0.1", port).spread(launch(ORCA, plan_path="p")) for rank in (0, 1))
    at = first.arguments.index("--node-rank") + 1
    assert (first.arguments[at], second.arguments[at]) == ("0", "1")
    assert first.arguments[:at] == second.arguments[:at] and first.arguments[at + 1 :] == second.arguments[at + 1 :]
    assert first.arguments[-4:] == ("--master-addr", "127.0.0.1", "--master-port", str(port + 1))
    assert first.variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert first.variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_a_pipeline_on_cpus_has_a_worker_of_ours() -> None:
    """vLLM 0.32's own one fails in its first step."""
    halves = tuple(Stage(devices=(i,), decode_layers=(6 * i, 6 * i + 6), kv_blocks=800) for i in range(2))
    flags = launch(ORCA.model_copy(update={"stages": halves}), plan_path="p").arguments
    assert flags[flags.index("--worker-cls") + 1] == "xrunner.vllm.cpu_pipeline.CpuPipelineWorker"
    assert "--worker-cls" not in launch(ORCA, plan_path="p").arguments


@pytest.mark.parametrize("host", LOOPBACKS)
def test_machines_meet_and_end_together(port: int, host: str) -> None:
    with following(port, host=host) as runs:
        engine = VllmEngine(ORCA, machines=Machines(2, 0, host, port))
        submit(engine, PROMPTS)
        got = run(engine, len(PROMPTS))
        assert [ids(got[id_]) for id_ in range(len(PROMPTS))] == [expected_tokens(prompt, 6) for prompt in PROMPTS]
        engine.close()
        eventually(lambda: not runs())


@pytest.mark.long
def test_when_one_machines_workers_end_the_engine_starts_anew(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Any] = []
    start = machines.started

    @contextmanager
    def noted(*arguments: Any) -> Iterator[Any]:
        with start(*arguments) as process:
            workers.append(process)
            yield process

    monkeypatch.setattr(machines, "started", noted)
    monkeypatch.setattr(machines, "LOOK_S", 0.02)
    with following(port):
        engine = VllmEngine(ORCA, machines=Machines(2, 0, "127.0.0.1", port))
        eventually(lambda: len(workers) == 1)
        workers[0].terminate()
        with pytest.raises(EngineLost, match="workers of machine 1 have ended"):
            while True:
                engine.step()
                time.sleep(0.01)
        engine.restart(ORCA)
        submit(engine, PROMPTS[:2])
        assert len(run(engine, 2)) == 2 and len(workers) == 2
        engine.close()


def test_a_machine_with_another_plan_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "GREET_S", 0.2)
    monkeypatch.setattr(machines, "MEET_S", 1.0)
    first = Followers(Machines(2, 0, "127.0.0.1", port), ORCA)

    def wait() -> None:
        with pytest.raises(MachineError):
            first.start()

    waits = threading.Thread(target=wait)
    waits.start()
    other, second = ORCA.model_copy(update={"seed": 7}), Machines(2, 1, "127.0.0.1", port)
    with pytest.raises(MachineError, match="has another plan"):
        follow(other, second, launch(other, plan_path="p"), lambda: False)
    first.close(for_good=True)
    waits.join()


def over(nodes: int, devices: int, replicas: int, tp: int) -> Plan:
    """A plan for machines of some devices."""
    stage = Stage(devices=tuple(range(tp)), tp=tp, decode_layers=(0, 12), kv_blocks=800)
    cluster = ClusterSpec(name="c", device=ORCA.cluster.device, num_nodes=nodes, devices_per_node=devices)
    return ORCA.model_copy(update={"cluster": cluster, "replicas": replicas, "stages": (stage,)})


@pytest.mark.parametrize(
    ("plan", "rank", "replicas", "expected"),
    [
        (over(2, 4, 4, 2), 1, 2, None),  # two whole replicas on each machine
        (over(2, 4, 1, 8), 1, 1, Machines(2, 1, "a", 29500)),
        (over(4, 2, 2, 4), 3, 1, Machines(2, 1, "a", 29500)),  # the second machine of the second replica
    ],
)
def test_a_machine_serves_its_share_of_a_plan(plan: Plan, rank: int, replicas: int, expected: Machines | None) -> None:
    asked = ServeRequest(engine="vllm", nnodes=plan.cluster.num_nodes, node_rank=rank, master_addr="a")
    here, found = share_of(plan, asked)
    assert (here.replicas, found) == (replicas, expected)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("a:7", "a", 7), ("fd00::1", "fd00::1", 29500), ("[fd00::1]", "fd00::1", 29500), ("[fd00::1]:7", "fd00::1", 7)],
)
def test_the_first_machine_has_an_address_of_either_kind(address: str, host: str, port: int) -> None:
    asked = ServeRequest(engine="vllm", nnodes=2, node_rank=1, master_addr=address)
    assert share_of(over(2, 4, 1, 8), asked)[1] == Machines(2, 1, host, port)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"nnodes": 3}, "nnodes"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank"),
        ({"nnodes": 2}, "master_addr"),
        ({"nnodes": 2, "master_addr": "a:70000"}, "master_addr"),
    ],
)
def test_what_does_not_make_a_group_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as refused:
        share_of(over(2, 4, 1, 8), ServeRequest(engine="vllm", **fields))
    assert refused.value.field == named
