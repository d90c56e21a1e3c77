"""Attacks on plans for several processes: their ports, their control messages, requests that do not fit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.lib.served_plans import PLANS, plan, two_lanes
from tests.attack.target import FLAVOURS, Target, attacked, children_of
from tests.attack.test_grammars import PATH, costly, formatted
from tests.attack.two_hosts import ADDRESSES, on_host, serving, two_hosts
from tests.fakes import eventually
from xgpt.core.schema import ModelSpec, Plan

SEVERAL = ("tp", "waa", "replicas")
CLIENTS, PATIENCE_S = 40, 200.0
"""Clients whose requests run when a process is lost, and how long they wait: the machine may have other work."""

OVERWRITE_STORE = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist

def overwrite(port):
    try:
        store = dist.TCPStore(sys.argv[1], port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
        store.set("stranger", "was here")
        print(f"port {port}: {store.num_keys()} keys, and one of mine", flush=True)
    except Exception:
        pass

threads = [threading.Thread(target=overwrite, args=(port,), daemon=True) for port in map(int, sys.argv[2:])]
for thread in threads:
    thread.start()
end = time.monotonic() + 6
for thread in threads:
    thread.join(max(0, end - time.monotonic()))
os._exit(0)
"""
"""What let a stranger list and set keys, and run code: torch's own client at every open port."""


@pytest.fixture(scope="module", params=SEVERAL)
def target(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    flavour: str = request.param
    with attacked(flavour, checkpoint, tmp_path_factory.mktemp(flavour)) as running:
        yield running


def narrow(model: ModelSpec) -> Plan:
    """WAA whose encode lane holds 128 tokens."""
    stages = [
        stage.model_copy(update={"kv_blocks": 8}) if stage.lane == "encode" else stage for stage in two_lanes([1], [1])
    ]
    return plan(tuple(stages), model=model)


@pytest.mark.point(7)
@pytest.mark.long
def test_a_prompt_that_the_encode_lane_never_holds(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in, and all behind it waited for ever."""
    monkeypatch.setitem(FLAVOURS, "narrow", narrow)
    with attacked("narrow", checkpoint, tmp_path) as target:
        before = target.probe()
        with target.felt() as felt:
            status, answer = target.complete(prompt=[5] * 129, max_tokens=4)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert "128 in the encode lane" in answer["error"]["message"]
            assert target.complete(prompt=[5] * 128, max_tokens=200)[0] == 200
            assert target.probe() == before
        assert felt.failures == []


@pytest.mark.point(15)
@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_ends_the_step_log_alone(checkpoint: Path, tmp_path: Path) -> None:
    with attacked("tp", checkpoint, tmp_path, "--step-log", "/dev/full") as target, target.left_as_it_was(memory=False):
        for _ in range(3):
            assert target.complete(prompt=[5] * 8, max_tokens=400, ignore_eos=True)[0] == 200
        assert target.metric("xgpt_step_log_lost") > 0


@pytest.mark.point(20)
@pytest.mark.long
def test_a_launcher_that_is_killed_loses_no_request(checkpoint: Path, tmp_path: Path) -> None:
    with attacked("tp", checkpoint, tmp_path) as target, target.left_as_it_was(memory=False):
        with target.felt() as felt:
            worker = target.served.pids[0]
            launcher = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(launcher, signal.SIGKILL)
            target.probe()
        assert felt.failures == []
        assert len(target.served.starts) == 2


@pytest.mark.point(27)
@pytest.mark.long
@pytest.mark.parametrize("flavour", SEVERAL)
@pytest.mark.parametrize("kind", ["worker", "launcher", "engine"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_loses_no_request(
    flavour: str, kind: str, number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    """A hang is a fault as an end is: after 4 s of silence of a worker, 15 of others, workers start anew.

    What hangs is killed.
    """
    with (
        attacked(flavour, checkpoint, tmp_path) as target,
        target.left_as_it_was(memory=False),
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        fields = {"prompt": [3, 50, 61], "max_tokens": 450, "temperature": 0, "ignore_eos": True}
        before = target.complete(**fields)[1]["choices"][0]["token_ids"]
        process, num_starts = target.served.pids[0], len(target.served.starts)
        running = [pool.submit(target.complete, PATIENCE_S, **fields) for _ in range(CLIENTS)]
        assert eventually(lambda: target.metric("xgpt_requests_running") >= 4, 30)
        if kind == "launcher":
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        if kind == "engine":
            assert target.served.engine is not None
            process = target.served.engine
        os.kill(process, number)
        answers = [one.result() for one in running]
        assert [status for status, _ in answers] == [200] * CLIENTS
        assert all(answer["choices"][0]["token_ids"] == before for _, answer in answers)
        # An encoder that hangs is missed by the next prompt only.
        status, answer = target.complete(**fields)
        assert status == 200 and answer["choices"][0]["token_ids"] == before
        assert eventually(lambda: len(target.served.starts) > num_starts, 60)
        assert eventually(lambda: not Path(f"/proc/{process}/cmdline").exists(), 30)


@pytest.mark.point(27)
@pytest.mark.long
@pytest.mark.parametrize(
    ("flavour", "kind"), [("one", "engine"), *((flavour, kind) for flavour in SEVERAL for kind in ("worker", "engine"))]
)
def test_a_process_that_is_killed_while_it_compiles_schemas_loses_no_request(
    flavour: str, kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    with (
        attacked(flavour, checkpoint, tmp_path) as target,
        target.left_as_it_was(memory=False),
        ThreadPoolExecutor(8) as pool,
    ):
        bodies = [{"model": target.model, **formatted(costly(number), temperature=0)} for number in range(4)]

        def ask(body: dict[str, Any]) -> tuple[int, Any]:
            status, answer = target.ask("POST", PATH, body)
            return status, json.loads(answer)["choices"][0]["message"]["content"] if status == 200 else answer

        before = [ask(body) for body in bodies]
        assert {status for status, _ in before} == {200}
        process = target.served.engine if kind == "engine" else target.served.pids[0]
        assert process is not None
        running = [pool.submit(ask, body) for body in bodies * 2]
        assert eventually(lambda: target.metric("xgpt_requests_waiting") >= 1, 30)
        os.kill(process, signal.SIGKILL)
        assert [one.result() for one in running] == before * 2
        assert eventually(lambda: not Path(f"/proc/{process}/cmdline").exists(), 30)


def stream(target: Target, fields: dict[str, Any]) -> tuple[int, bool]:
    """Return the tokens of a stream, and whether it says that it has ended."""
    connection = HTTPConnection(*target.address, timeout=60)
    num_tokens, is_whole = 0, False
    with contextlib.suppress(OSError, HTTPException):
        body = json.dumps({"model": target.model, "stream": True, **fields})
        connection.request("POST", "/v1/completions", body, target.headers)
        for line in connection.getresponse():
            is_whole = is_whole or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                num_tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
    connection.close()
    return num_tokens, is_whole


@pytest.mark.point(27)
@pytest.mark.long
@pytest.mark.parametrize("flavour", ["one", *SEVERAL])
def test_a_front_that_is_killed_takes_all_with_it_and_the_next_one_answers(
    flavour: str, checkpoint: Path, tmp_path: Path
) -> None:
    """No client takes what it got for an answer; asked again, each request is answered once."""
    fields = {"prompt": [3, 50, 61], "max_tokens": 450, "temperature": 0, "ignore_eos": True}
    with attacked(flavour, checkpoint, tmp_path) as target, ThreadPoolExecutor(CLIENTS) as pool:
        before, port = target.complete(**fields)[1]["choices"][0]["token_ids"], target.address[1]
        family = children_of(target.served.process.pid)
        running = [pool.submit(stream, target, fields) for _ in range(CLIENTS)]
        assert eventually(lambda: target.metric("xgpt_requests_running") >= 4, 30)
        os.kill(target.served.process.pid, signal.SIGKILL)
        received = [one.result() for one in running]
        assert all(num_tokens == 450 for num_tokens, is_whole in received if is_whole)
        assert not all(is_whole for _, is_whole in received)
        assert family and eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in family), 60)
    with attacked(flavour, checkpoint, tmp_path, "--port", str(port)) as target, ThreadPoolExecutor(CLIENTS) as pool:
        assert target.address[1] == port
        answers = [one.result() for one in [pool.submit(target.complete, **fields) for _ in range(CLIENTS)]]
        assert [status for status, _ in answers] == [200] * CLIENTS
        assert all(answer["choices"][0]["token_ids"] == before for _, answer in answers)
        assert target.metric("xgpt_output_tokens_total") == CLIENTS * 450


@pytest.mark.point(27)
@pytest.mark.long
@pytest.mark.parametrize("flavour", ["one", *SEVERAL])
def test_a_front_that_was_stopped_goes_on_where_it_was(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    """It takes nobody for lost because it did not run itself."""
    fields = {"prompt": [3, 50, 61], "max_tokens": 450, "temperature": 0, "ignore_eos": True}
    with (
        attacked(flavour, checkpoint, tmp_path) as target,
        target.left_as_it_was(memory=False),
        ThreadPoolExecutor(8) as pool,
    ):
        before = target.complete(**fields)[1]["choices"][0]["token_ids"]
        processes = target.served.engine, list(target.served.starts)
        running = [pool.submit(target.complete, **fields) for _ in range(8)]
        assert eventually(lambda: target.metric("xgpt_requests_running") >= 4, 30)
        target.served.process.send_signal(signal.SIGSTOP)
        time.sleep(20)
        target.served.process.send_signal(signal.SIGCONT)
        answers = [one.result() for one in running]
        assert [status for status, _ in answers] == [200] * 8
        assert all(answer["choices"][0]["token_ids"] == before for _, answer in answers)
        assert (target.served.engine, target.served.starts) == processes


def own_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("ss") is not None


@pytest.mark.point(3, 9)
@pytest.mark.long
@pytest.mark.skipif(not own_namespaces(), reason="network namespaces take root, `ip` and `ss`")
def test_a_stranger_on_the_link_between_two_machines_finds_no_store_of_tensors() -> None:
    """Ray listens on all interfaces, to those that have its token; xgpt's own sockets listen on the link only."""
    what = PLANS["TP 2"]()
    cluster = what.cluster.model_copy(update={"num_nodes": 2, "devices_per_node": 1})
    with (
        two_hosts(),
        TemporaryDirectory() as directory,  # Ray's sockets have short paths
        serving(what.model_copy(update={"cluster": cluster}), Path(directory)) as (_, servers),
    ):
        for number, local in enumerate(ADDRESSES):
            lines = subprocess.check_output(on_host(number, ["ss", "-ltnH"]), text=True)
            ports = sorted({line.split()[3].rpartition(":")[2] for line in lines.splitlines()})
            stranger = [sys.executable, "-c", OVERWRITE_STORE, local, *ports]
            assert subprocess.check_output(on_host(1, stranger), text=True, stderr=subprocess.DEVNULL) == ""
        assert [server.poll() for server in servers] == [None] * 3
    assert servers[0].returncode == 0
