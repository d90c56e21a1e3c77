"""A fleet of processes of this machine: a controller that is restarted finds them, and none loses a request."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import xgpt
from tests.fleets import fleet_of
from tests.planned import SHORT, cpus
from xgpt.core.io import dump_json
from xgpt.core.schema import ModelSpec
from xgpt.core.schema.fleet import FleetPlan
from xgpt.operating.drivers.local import LocalWorld

SPEC = ModelSpec(
    name="tiny",
    family="opt",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=128,
    vocab_size=512,
    max_context=256,
)
READY_S = 60.0


def tiny_fleet() -> FleetPlan:
    plan = xgpt.plan(model=SPEC, cluster=cpus(1), workload=SHORT, latency_bound_s=5, policy="orca")
    fleet = fleet_of([2.0])
    return fleet.model_copy(update={"kinds": (fleet.kinds[0].model_copy(update={"plan": plan}),)})


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_a_restarted_controller_finds_its_fleet_and_drains_it(tmp_path: Path) -> None:
    port, fleet = free_port(), tiny_fleet()
    world = LocalWorld(fleet, tmp_path, port, 0.0)
    try:
        world.open()
        world.start(0, 1)
        again = LocalWorld(fleet, tmp_path, port, 0.0)  # the first controller has died in the middle of its change
        again.open()
        found = again.replicas(0.0)
        assert [(one.kind, one.state) for one in found] == [(0, "starting")]
        until_s = time.monotonic() + READY_S
        while again.replicas(0.0)[0].state != "ready" and time.monotonic() < until_s:
            time.sleep(0.3)
        ask = {"model": "tiny", "prompt": [2, 5, 7], "max_tokens": 16}
        with ThreadPoolExecutor(8) as clients:
            asked = [
                clients.submit(httpx.post, f"{again.url}/v1/completions", json=ask, timeout=30, trust_env=False)
                for _ in range(16)
            ]
            assert [one.result().status_code for one in asked] == [200] * 16
        again.replicas(0.0)
        counts = again.counts()
        assert [one.arrived for one in counts.values()] == [16]
        again.drain([found[0].name])
        assert again.replicas(0.0)[0].state == "draining"
        until_s = time.monotonic() + READY_S
        while again.replicas(0.0) and time.monotonic() < until_s:
            time.sleep(0.3)
        assert again.replicas(0.0) == []
    finally:
        world.close()
    assert LocalWorld(fleet, tmp_path, port, 0.0).replicas(0.0) == []


@contextmanager
def autoscaling(directory: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "xgpt", "autoscale", str(directory / "fleet.json"), "--look", "1"]
    command += ["--port", str(port), "--state", str(directory / "state")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeper:
        try:
            yield keeper
        finally:
            keeper.kill()


def until_said(keeper: subprocess.Popen[str], what: str) -> None:
    """Read on until the controller has said this; it says something at every look."""
    assert keeper.stderr is not None
    until_s, said = time.monotonic() + READY_S, list[str]()
    for line in keeper.stderr:
        said.append(line)
        if what in line:
            return
        if time.monotonic() > until_s:
            break
    raise AssertionError(f"the controller has not said {what!r} but {said[-5:]}")


@pytest.mark.long
def test_a_controller_killed_in_mid_change_loses_no_request_and_no_replica(tmp_path: Path) -> None:
    """It orders the day's two replicas and is killed; the next one drains what nothing asks for and is killed; the
    third one finds a replica that has drained, and ends it."""
    port, fleet = free_port(), tiny_fleet()
    kind = fleet.kinds[0].model_copy(update={"rates_per_s": (100.0,), "start_s": 2.0, "drain_s": 18.0})
    days = tuple(of.model_copy(update={"replicas": (2,), "rate_per_s": 150.0}) for of in fleet.intervals)
    fleet = fleet.model_copy(update={"kinds": (kind,), "intervals": days})
    (tmp_path / "fleet.json").write_text(dump_json(fleet))
    world = LocalWorld(fleet, tmp_path / "state", port, 0.0)
    ending, answers = threading.Event(), list[int]()

    def ask() -> None:
        body = {"model": "tiny", "prompt": [2, 5, 7], "max_tokens": 16}
        while not ending.wait(0.05):
            answers.append(
                httpx.post(f"{world.url}/v1/completions", json=body, timeout=60, trust_env=False).status_code
            )

    with ThreadPoolExecutor(2) as clients:
        try:
            with autoscaling(tmp_path, port) as keeper:
                until_said(keeper, "start 2 of")
                until_s = time.monotonic() + READY_S  # it says so before it starts the first of them
                while len(world.replicas(0.0)) < 2 and time.monotonic() < until_s:
                    time.sleep(0.05)
            with autoscaling(tmp_path, port) as keeper:
                asking = [clients.submit(ask) for _ in range(2)]
                until_said(keeper, "drain ")  # as before, and it is killed once that can be seen
                until_s = time.monotonic() + READY_S
                while len(active := [one for one in world.replicas(0.0) if one.state != "draining"]) > 1:
                    assert time.monotonic() < until_s
                    time.sleep(0.05)
            assert len(active) == 1
            with autoscaling(tmp_path, port) as keeper:
                until_said(keeper, "replicas: 1 ready;")
                ending.set()
                assert [one.result() for one in asking] == [None, None]
            assert [one.state for one in world.replicas(0.0)] == ["ready"]
        finally:
            ending.set()
            world.close()
    assert len(answers) > 20 and set(answers) == {200}
