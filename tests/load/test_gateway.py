"""`xgpt serve --front smg`: an engine in a process of its own, behind the gateway."""

from __future__ import annotations

import json
import os
import signal
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.lib.served_plans import SPEC, left_over, listening, one_lane, plan, served
from tests.attack.target import children_of, save_checkpoint
from tests.fakes import eventually
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xgpt.serving import gateway
from xgpt.serving.serve import ServeRequest, serve


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    where = urlsplit(url)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def engine_pid(session: int) -> int:
    """The process of the engine among those that a server has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == session and b"engine_process" in command:
                return int(entry.name)
    raise AssertionError("there is no engine")


@pytest.mark.long
def test_chats_responses_and_a_killed_engine_behind_the_gateway(tmp_path: Path) -> None:
    pytest.importorskip("smg")
    checkpoint = save_checkpoint(tmp_path / "model")
    served_plan = plan(one_lane([1], layers=SPEC.num_layers), model=read_spec(checkpoint))
    served_plan = served_plan.model_copy(update={"checkpoint": str(checkpoint)})
    with served(served_plan, tmp_path, "--front", "smg") as server:
        chat = {"model": served_plan.model.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        status, before = ask(server.url, "/v1/chat/completions", chat | {"temperature": 0})
        assert status == 200, before
        status, answer = ask(
            server.url, "/v1/responses", {"model": chat["model"], "input": "hi", "max_output_tokens": 8}
        )
        assert status == 200, answer
        os.kill(engine_pid(server.process.pid), signal.SIGKILL)
        deadline_s = time.monotonic() + 120
        while (found := ask(server.url, "/v1/chat/completions", chat | {"temperature": 0}))[0] != 200:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.5)
        assert found[1]["choices"] == before["choices"]
        sockets = listening(server.process.pid)
    assert server.process.returncode == 0
    assert left_over(server.process.pid, sockets) == []


def gateway_pid(session: int) -> int:
    """The process of the gateway among those that a server has started."""
    return next(pid for pid in children_of(session) if b"smg::router" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_ends_or_hangs_is_started_anew(number: signal.Signals, tmp_path: Path) -> None:
    """Its end ended the server once, and a hang was never noticed."""
    pytest.importorskip("smg")
    checkpoint = save_checkpoint(tmp_path / "model")
    served_plan = plan(one_lane([1], layers=SPEC.num_layers), model=read_spec(checkpoint))
    served_plan = served_plan.model_copy(update={"checkpoint": str(checkpoint)})
    with served(served_plan, tmp_path, "--front", "smg") as server:
        body = {"model": served_plan.model.name, "prompt": "hi", "max_tokens": 8, "temperature": 0}
        before, lost = ask(server.url, "/v1/completions", body), gateway_pid(server.process.pid)
        assert before[0] == 200, before
        # Its log filled a pipe that nobody read, until it would have waited for room in it.
        log, ours = (os.readlink(f"/proc/{pid}/fd/{fd}") for pid, fd in ((lost, 1), (server.process.pid, 2)))
        assert log == ours
        os.kill(lost, number)
        assert eventually(lambda: not Path(f"/proc/{lost}/cmdline").exists(), 60)
        assert eventually(lambda: any("starting it again" in line for line in server.lines), 10)
        assert eventually(lambda: answers(server.url, body, before), 60)
        assert gateway_pid(server.process.pid) != lost
    assert server.process.returncode == 0


def answers(url: str, body: dict[str, Any], expected: tuple[int, dict[str, Any]]) -> bool:
    try:
        status, found = ask(url, "/v1/completions", body)
    except OSError:
        return False
    return status == 200 and found["choices"] == expected[1]["choices"]


def test_what_the_gateway_cannot_do_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="xgpt-serve\\[gateway\\]"):
        gateway.check_gateway(plan(one_lane([1])), ServeRequest(front="smg"))
    monkeypatch.setattr(gateway, "find_spec", lambda name: object())
    for request, field in (
        (ServeRequest(front="smg", host="0.0.0.0"), "host"),
        (ServeRequest(front="smg", answer_within_s=1.0), "answer_within_s"),
        (ServeRequest(front="smg", api_key_file=Path("keys")), "api_key_file"),
        (ServeRequest(front="smg", shutdown_delay_s=10.0), "shutdown_delay_s"),
        (ServeRequest(front="smg"), "checkpoint"),
    ):
        with pytest.raises(InputError) as caught:
            gateway.check_gateway(plan(one_lane([1])), request)
        assert caught.value.field == field


def test_an_admin_port_needs_the_gateway() -> None:
    with pytest.raises(InputError, match="admin_port: 9000 is not accepted; it needs `front=smg`"):
        serve(plan(one_lane([1])), ServeRequest(admin_port=9000, dry_run=True))


def test_both_fronts_take_the_checkpoints_default_length(tmp_path: Path) -> None:
    """Behind the gateway outputs without max_tokens filled the context, whatever generation_config.json said."""
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 8}')
    served_plan = plan(one_lane([1])).model_copy(update={"checkpoint": str(tmp_path)})
    assert ServeRequest(front="smg").limits(served_plan).default_max_tokens == 8
    assert ServeRequest(max_max_tokens=5).limits(served_plan).default_max_tokens == 5
