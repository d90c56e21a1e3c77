"""A LeaderWorkerSet's commands, started as its pods start them: two Ray nodes on this machine, and a server on one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.attack.target import save_checkpoint
from tests.exports import export
from tests.fakes import eventually
from tests.planned import cpus, problem_of, scored
from xgpt.core.io import dump_json
from xgpt.core.processes import free_port
from xgpt.core.schema import Plan
from xgpt.exporting.groups import PORT, RAY_PORT
from xgpt.resolve import load_cluster

LANES = {
    "tp": ("rra", [[2]], {"encode_batch": 4, "decode_iterations": 2}),
    "pp": ("orca", [[1, 1]], {"max_batch": 8}),
    "waa": ("waa", [[1], [1]], {"encode_batch": 4, "max_decode_batch": 16}),
}
KEY = "0123456789abcdef"
RAY = f"""#!/bin/sh
exec {sys.executable} -m ray.scripts.scripts "$@" --num-cpus=1
"""


def container_of(plan: Plan, role: str) -> dict[str, Any]:
    """The container of a pod of the plan's group, its devices being GPUs on a node each."""
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 2, "devices_per_node": 1})
    text = export(plan.model_copy(update={"cluster": cluster}), "k8s")["xgpt.yaml"]
    (group,) = (item for item in yaml.safe_load_all(text) if item["kind"] == "LeaderWorkerSet")
    found: dict[str, Any] = group["spec"]["leaderWorkerTemplate"][f"{role}Template"]["spec"]["containers"][0]
    return found


def planned_on_two_machines(kind: str, directory: Path) -> Plan:
    policy, degrees, values = LANES[kind]
    plan = scored(problem_of(directory, 2), policy, degrees, 1, **values)
    plan = plan.model_copy(update={"cluster": cpus(2).model_copy(update={"num_nodes": 2, "devices_per_node": 1})})
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"engine": "xgpt"})})


class Pods:
    """The containers of a group's leader and worker, each a process with what it starts."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory, self.meet, self.port = plan, directory, free_port(), free_port()
        for name, text in (("plan/plan.json", dump_json(plan)), ("keys/key", KEY + "\n"), ("ray", RAY)):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)
        (directory / "ray").chmod(0o755)
        self.of: dict[str, subprocess.Popen[bytes]] = {}
        self.rooms: list[str] = []
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers = {"Authorization": f"Bearer {KEY}"}

    def start(self, role: str) -> None:
        variables = {"NAMESPACE": "ns", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost"}
        variables |= {"POD": f"{self.directory}/{role}", "PATH": f"{self.directory}{os.pathsep}{os.environ['PATH']}"}
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": KEY * 2}
        self.rooms.append(tempfile.mkdtemp(dir="/tmp"))  # a new pod has one of its own; sockets need short paths
        variables |= {"RAY_TMPDIR": self.rooms[-1]}
        words = []
        for word in container_of(self.plan, role)["command"]:
            word = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)
            word = word.replace("/etc/xgpt", str(self.directory)).replace(str(RAY_PORT), str(self.meet))
            words.append(word.replace("python3", sys.executable).replace(f"--port {PORT}", f"--port {self.port}"))
        with (self.directory / "log").open("a") as log:
            self.of[role] = subprocess.Popen(words, env=os.environ | variables, stdout=log, stderr=log)

    def kill(self, role: str) -> None:
        """Kill all processes of a pod, as the loss of its machine would."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"POD={self.directory}/{role}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
        self.of[role].wait(60)

    def close(self) -> None:
        for role in self.of:
            self.kill(role)
        for made in self.rooms:
            shutil.rmtree(made, ignore_errors=True)

    def said(self) -> str:
        return (self.directory / "log").read_text()

    def ask(self, tokens: int) -> list[int]:
        body = {"model": self.plan.model.name, "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True}
        post = httpx.post(f"{self.url}/v1/completions", json=body, headers=self.headers, trust_env=False, timeout=120)
        found: list[int] = post.raise_for_status().json()["choices"][0]["token_ids"]
        return found

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200
        return False


@pytest.fixture
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pods]:
    found = Pods(planned_on_two_machines(request.param, save_checkpoint(tmp_path / "model")), tmp_path)
    try:
        for role in ("worker", "leader"):  # pods start in any order
            found.start(role)
        assert eventually(found.is_ready, 180), found.said()
        yield found
    finally:
        found.close()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("pods", LANES, indirect=True)
def test_the_pods_of_a_group_serve_together(pods: Pods) -> None:
    assert httpx.post(f"{pods.url}/v1/completions", json={}, trust_env=False).status_code == 401
    assert len(pods.ask(6)) == 6
    pods.of["leader"].terminate()
    assert pods.of["leader"].wait(60) == 0, pods.said()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pods", ["pp"], indirect=True)
def test_a_lost_worker_costs_no_request_and_a_lost_leader_those_that_it_holds(pods: Pods) -> None:
    """With `restartPolicy: None`, kubelet starts what has ended; the leader keeps its clients' connections."""
    undisturbed = pods.ask(60)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(pods.ask, 60) for _ in range(8)]
        time.sleep(0.3)
        assert not all(each.done() for each in running)
        pods.kill("worker")
        pods.start("worker")
        assert [each.result() for each in running] == [undisturbed] * 8
        print("the worker is back, and none of 8 requests is lost or changed")
        running = [pool.submit(pods.ask, 60) for _ in range(8)]
        time.sleep(0.3)
        lost = sum(not each.done() for each in running)
        assert lost
        pods.kill("leader")
        pods.start("leader")
        assert sum(isinstance(each.exception(), httpx.HTTPError) for each in running) <= lost
    begin = time.monotonic()

    def worker_is_back() -> bool:
        if pods.of["worker"].poll() is not None:  # Ray ends a node without its head
            pods.start("worker")
        return pods.is_ready()

    assert eventually(worker_is_back, 240), pods.said()
    print(
        f"{lost} of 8 requests were lost with the leader, and the group answered after {time.monotonic() - begin:.0f} s"
    )
    assert pods.ask(60) == undisturbed
