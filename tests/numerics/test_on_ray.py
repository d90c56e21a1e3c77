"""Two Ray nodes, both on this machine, give the tokens of transformers; a node that is lost costs none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fakes import eventually
from tests.numerics.served import engine_on, greedy, run, served_on
from tests.planned import problem_of, scored
from xgpt.core.processes import free_port
from xgpt.serving.engine_process import build_engine
from xrunner.cluster.workers import Workers
from xrunner.executor import WorkerLost

PLANS = {
    "TP 2": ("opt-tied", "rra", [[2]], {"encode_batch": 3, "decode_iterations": 3}),
    "PP 2": ("llama-grouped", "orca", [[1, 1]], {"max_batch": 10}),
    "WAA": ("opt-tied", "waa", ([1], [1]), {"encode_batch": 2, "max_decode_batch": 14}),
    "T5, WAA": ("t5-tied", "waa", ([1], [1]), {"encode_batch": 2, "max_decode_batch": 14}),
    "T5, PP 2": ("t5-tied", "static", [[1, 1]], {"batch": 8}),
}
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


def end_ray(port: int) -> None:
    """Kill all processes of the Ray cluster whose head listens at a port."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith((f":{port}", f"_port={port}")) for word in words[1:]):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Address of a Ray cluster of two nodes, and the process of the second, which ends with its node."""
    port = free_port()
    head = [*START, "--head", f"--port={port}", "--include-dashboard=false"]
    subprocess.run([*head, f"--temp-dir={tmp_path_factory.mktemp('ray')}"], check=True, stdout=subprocess.DEVNULL)
    second = subprocess.Popen([*START, f"--address=127.0.0.1:{port}", "--block"], stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}", second
    end_ray(port)
    second.wait()


@pytest.fixture(scope="module")
def fleet(cluster):
    from xrunner.cluster import on_ray

    machines = on_ray.reserve(cluster[0], 2, 1, gpus=False)
    with Workers(2, host=on_ray.host(), machines=machines) as started:
        yield started


def plan_of(checkpoint, name):
    family, kind, degrees, values = PLANS[name]
    directory, model = checkpoint(family)
    return scored(problem_of(directory, 2), kind, degrees, 1, **values), model


@pytest.mark.parametrize("name", PLANS)
def test_tokens_of_two_nodes_are_those_of_transformers(fleet, checkpoint, name):
    plan, model = plan_of(checkpoint, name)
    assert served_on(fleet, plan) == greedy(model)


def test_a_node_that_is_lost_and_comes_back_costs_no_token(cluster, fleet, checkpoint):
    address, second = cluster
    plan, model = plan_of(checkpoint, "TP 2")
    with engine_on(fleet, plan) as engine:
        before = {member.hello.pid for member in fleet.members.values()}
        raylet = next(pid for pid in children_of(second.pid) if b"raylet" in program(pid))
        os.kill(raylet, signal.SIGKILL)
        assert eventually(lambda: is_lost(fleet), 60)
        second.wait(60)
        subprocess.Popen([*START, f"--address={address}"], stdout=subprocess.DEVNULL).wait(60)
        assert run(engine) == greedy(model)
        assert not before & {member.hello.pid for member in fleet.members.values()}


def test_replicas_are_on_nodes_of_their_own(cluster, fleet, checkpoint):
    directory, model = checkpoint("opt-tied")
    fleet.close()
    plan = scored(problem_of(directory, 1), "orca", [[1]], 1, max_batch=10)
    two = plan.cluster.model_copy(update={"num_nodes": 2, "devices_per_node": 1})
    plan = plan.model_copy(update={"replicas": 2, "cluster": two})
    engine = build_engine(plan, ray=cluster[0])
    try:
        assert run(engine) == greedy(model)
    finally:
        engine.close()


def is_lost(fleet):
    try:
        fleet.check()
    except WorkerLost:
        return True
    return False


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
        return [int(child) for child in children.read().split()]


def program(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as words:
        return words.read().split(b"\0")[0].rpartition(b"/")[2]
