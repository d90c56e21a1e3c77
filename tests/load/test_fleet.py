"""A fleet of processes of this machine: a controller that is restarted finds them, and none loses a request."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

import xgpt
from tests.fleets import fleet_of
from tests.planned import SHORT, cpus
from xgpt.app.fleet.drivers.local import LocalWorld
from xgpt.schema import ModelSpec
from xgpt.schema.fleet import FleetPlan

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


def test_a_restarted_controller_finds_its_fleet_and_drains_it(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fleet = tiny_fleet()
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
