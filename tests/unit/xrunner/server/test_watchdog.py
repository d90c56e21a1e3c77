"""A server whose event loop hangs starts again: on the same port, with the same process id."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

PROGRAM = """
import re, time
from starlette.routing import Route
from tests.fakes import *
from xrunner.server.http import watchdog
from xrunner.server.http.process import serve
watchdog.HANG_CPU_S, watchdog.HANG_IDLE_S, watchdog.LOOK_S = 0.5, 2.0, 0.1

async def spin(_):
    while True:
        pass

async def block(_):
    time.sleep(1000)

async def hold(_):
    sum(range(10**15))  # compiled code that holds the interpreter's lock

app = fake_app(fake_engine(FakeExecutor()))
app.router.routes += [Route(f"/{each.__name__}", each) for each in (spin, block, hold)]
watchdog.HARD_CPU_S = 3.0
serve(app, "127.0.0.1", 0, bound=watchdog.inherited_listener(), restarts=RESTARTS)
"""


@contextmanager
def serving(*, restarts: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    program = PROGRAM.replace("RESTARTS", str(restarts))
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process, process.stderr.readline().split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def hang(url: str, path: str) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/{path}", timeout=60, trust_env=False)


@pytest.mark.parametrize("path", ["spin", pytest.param("block", marks=pytest.mark.long)])
def test_a_loop_that_hangs_starts_again(path: str) -> None:
    """Once one answer that the reader could not end held the server up for ever."""
    with serving(restarts=True) as (process, url):
        hang(url, path)
        assert httpx.get(f"{url}/health", timeout=60, trust_env=False).status_code == 200
        assert process.poll() is None


@pytest.mark.long
def test_four_hangs_end_the_server() -> None:
    with serving(restarts=True) as (process, url):
        for _ in range(4):
            hang(url, "spin")
        assert process.wait(30) == 3


@pytest.mark.long
@pytest.mark.parametrize(("path", "code"), [("spin", 3), ("hold", -27)])
def test_a_server_that_cannot_start_again_ends(path: str, code: int) -> None:
    """That of another program, or one whose interpreter is held by compiled code."""
    with serving(restarts=False) as (process, url):
        begin_s = time.monotonic()
        hang(url, path)
        assert process.wait(30) == code
        assert time.monotonic() - begin_s < 60
