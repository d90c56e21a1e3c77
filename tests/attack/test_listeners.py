"""Every listening socket of every mode: which there are, and what another user of the machine can do at each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.served_plans import listening, plan, two_lanes
from tests.attack import strangers
from tests.attack.target import FAKE_VLLM, FLAVOURS, REAL_VLLM, attacked, children_of
from tests.fakes import eventually
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import dump_json

NOBODY = 65534
MOST_LOG_BYTES, NUM_ANSWERED, LINE_BYTES = 1 << 20, 4000, 400
"""Bytes of log that silent connections may leave, and a line for each request that the attacks and others send."""

SOCKET_S = 30.0
"""Silent connections to a socket take at most 24 s."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.long,
    pytest.mark.point(3),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user"),
]


def unix_listeners(session: int) -> list[str]:
    """Names of the Unix sockets on which processes of a session accept connections."""
    flags = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & 0x10000:
            flags[fields[6]] = fields[7]
    inodes = set()
    for process in (session, *children_of(session)):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                inodes.add(found[1])
    return sorted(name for inode, name in flags.items() if inode in inodes)


def as_another_user(addresses: list[Any]) -> dict[str, Any]:
    """Run the attacks of `strangers` on each address."""
    done = subprocess.run(
        [sys._base_executable, "-c", Path(strangers.__file__).read_text()],  # type: ignore[attr-defined]
        input=json.dumps({"addresses": addresses, "user": NOBODY}),
        capture_output=True,
        text=True,
        timeout=SOCKET_S * len(addresses),
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_unix(found: dict[str, Any], names: list[str]) -> None:
    """Another user gets no word out of a Unix socket."""
    for name in names:
        said = found[json.dumps(name)]["said"]
        assert all(not answer or "rror" in answer for answer in said.values()), (name, said)


@pytest.mark.parametrize("flavour", [*FLAVOURS, FAKE_VLLM, REAL_VLLM])
def test_a_server_has_one_port_and_no_stranger_harms_it(
    flavour: str, checkpoint: Path, tmp_path: Path, record_property: Any
) -> None:
    """A plan for two devices had four more ports; 1,500 silent connections ended a worker, then the server."""
    with attacked(flavour, checkpoint, tmp_path) as target, target.left_as_it_was(memory=False):
        pid = target.served.process.pid
        ports, names = list(listening(pid).values()), unix_listeners(pid)
        record_property("listeners", {"mode": flavour, "tcp": ports, "unix": names})
        if flavour != REAL_VLLM.values[0]:
            assert ports == [target.address]
        logged = sum(map(len, target.served.lines))
        with target.felt() as felt:
            found = as_another_user([*map(list, ports), *names])
        assert felt.failures == []
        check_unix(found, names)
        said = found[json.dumps(list(target.address))]["said"]
        assert all(
            answer.startswith("HTTP/1.1 4") or "200" in answer or "rror" in answer or not answer
            for answer in said.values()
        ), said
        assert sum(map(len, target.served.lines)) - logged < MOST_LOG_BYTES + NUM_ANSWERED * LINE_BYTES
        assert target.served.process.poll() is None


@contextmanager
def command(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of xgpt in a session of its own, with few files."""
    with log.open("wb") as to:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", sys.executable, "-m", "xgpt", *arguments],
            stderr=to,
            stdout=to,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def address_in(log: Path) -> str:
    found: list[str] = []

    def look() -> bool:
        found[:] = re.findall(r"http://\S+", log.read_text())
        return bool(found)

    assert eventually(look, 90), log.read_text()
    return found[0]


def test_the_page_beside_the_endpoint_has_its_guards(tmp_path: Path) -> None:
    """300 silent sockets stopped the page at 256 files and wrote 15.7 MB of log; 800 became 800 threads."""
    log = tmp_path / "log"
    with command("ui", "--port", "0", "--no-browser", log=log) as process:
        url = address_in(log)
        ports = list(listening(process.pid).values())
        assert len(ports) == 1 and ports[0][0] == "127.0.0.1"
        threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
        as_another_user([list(ports[0])])
        assert httpx.get(url, timeout=20, trust_env=False).status_code == 200
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) <= threads + 8
        assert log.stat().st_size < MOST_LOG_BYTES


RANKS = """
from xgpt.core.machine import detect
from xgpt.resolve import load_model
from xprofiler import measure
spec, _ = load_model("opt-125m")
spec = spec.model_copy(update={"num_layers": 2, "max_context": 128, "vocab_size": 500})
measure.profile(spec, detect(2), "float32")
"""


def test_a_profile_of_two_devices_opens_no_port() -> None:
    process = subprocess.Popen([sys.executable, "-c", RANKS], start_new_session=True)
    found: set[tuple[str, int]] = set()
    while process.poll() is None:
        found |= set(listening(process.pid).values())
        time.sleep(0.1)
    assert process.returncode == 0 and found == set()


def test_a_benchmark_has_the_server_s_port_alone(checkpoint: Path, tmp_path: Path) -> None:
    made = plan(two_lanes([1], [1]), model=read_spec(checkpoint)).model_copy(update={"checkpoint": str(checkpoint)})
    (tmp_path / "plan.json").write_text(dump_json(made))
    log, found = tmp_path / "log", set[tuple[str, int]]()
    with ExitStack() as at_end:
        process = at_end.enter_context(command("bench", str(tmp_path / "plan.json"), "--requests", "20", log=log))
        while process.poll() is None:
            sessions = [process.pid, *children_of(process.pid)]
            found |= {where for session in sessions for where in listening(session).values()}
            time.sleep(0.1)
        assert process.returncode == 0, log.read_text()
    assert len(found) == 1 and all(address == "127.0.0.1" for address, _ in found)
