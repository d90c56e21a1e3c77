"""Attacks on running servers: `make attack` runs all, `make test` those that take seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.attack.client import MIB
from tests.attack.report import Report
from tests.attack.target import FELT_S, LEFT_MIB, TIMES_CALM, Felt, Target, Unharmed, roomy, save_checkpoint

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # memory and sockets are read from /proc


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attack-report", metavar="FILE", help="what attacks did, as JSON and as a table")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--attack-report", None)
    if path is not None:
        config.pluginmanager.register(Report(Path(path)))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with a tokenizer of one token a byte and a chat template."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture(scope="session")
def one_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server on one device, for all files whose attacks leave it as it was."""
    with roomy("one", checkpoint, tmp_path_factory.mktemp("one")) as target:
        yield target


@pytest.fixture(scope="module")
def target(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """A server of the flavour that a file is parametrised with, for all attacks of the file."""
    with ExitStack() as opened:
        if request.param == "one":
            running: Target = request.getfixturevalue("one_server")
        else:
            running = opened.enter_context(roomy(request.param, checkpoint, tmp_path_factory.mktemp("target")))
        opened.enter_context(running.left_as_it_was(memory=False))
        yield running
        lines = [line for line in running.served.lines if '"traceback"' in line]
        assert not [line for line in lines if "socket.accept() out of system resource" not in line]


@pytest.fixture(autouse=True)
def left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after every attack on a file's `target` that it left the server as it was; in `make test`, after a file."""
    is_checked = is_long(request) or request.config.getoption("--attack-report", None) is not None
    if "target" not in request.fixturenames or "unharmed" in request.fixturenames or not is_checked:
        yield
        return
    with request.getfixturevalue("target").left_as_it_was():
        yield


def is_long(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("long") is not None


@pytest.fixture
def unharmed(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Unharmed:
    """Return the block that an attack on the module's `target` is put in: it leaves others' answers, a probe's tokens
    and the memory (but for some MiB) as they were, and what it did is recorded.
    """
    target: Target = request.getfixturevalue("target")
    is_reported = request.config.getoption("--attack-report", None) is not None

    @contextmanager
    def watched(mib: float) -> Iterator[Felt]:
        with target.left_as_it_was(memory=is_reported or is_long(request)), felt_beside(mib) as felt:
            yield felt

    @contextmanager
    def felt_beside(mib: float) -> Iterator[Felt]:
        rss = target.rss_bytes()
        peak, over = [rss], threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                peak.append(target.rss_bytes())

        with target.felt() as calm:
            time.sleep(1 if is_reported or is_long(request) else 0.2)
        watching = threading.Thread(target=watch)
        watching.start()
        begin_s = time.monotonic()
        try:
            with target.felt() as felt:
                yield felt
        finally:
            over.set()
            watching.join()
        if is_reported:  # the control goes on for as long as the attack, but for some seconds
            with target.felt() as after:
                time.sleep(min(10.0, time.monotonic() - begin_s))
            calm.gaps_s += after.gaps_s
            calm.health_s += after.health_s
        end_s = time.monotonic() + 5
        while (left := (target.rss_bytes() - rss) / MIB) > LEFT_MIB and time.monotonic() < end_s:
            time.sleep(0.2)
        record_property("case", request.node.name.partition("[")[0].removeprefix("test_").replace("_", " "))
        record_property("flavour", target.flavour)
        record_property("gap_s", [round(calm.longest_gap_s, 3), round(felt.longest_gap_s, 3)])
        record_property("health_s", [round(calm.slowest_health_s, 3), round(felt.slowest_health_s, 3)])
        record_property("mib", [round(rss / MIB), round(max(peak) / MIB), round(rss / MIB + left)])
        record_property("num_lost", len(felt.failures))
        assert felt.failures == []
        assert felt.longest_gap_s < max(FELT_S, TIMES_CALM * calm.longest_gap_s)
        assert felt.slowest_health_s < max(FELT_S, TIMES_CALM * calm.slowest_health_s)
        assert (max(peak) - rss) / MIB < mib

    return watched
