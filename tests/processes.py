"""Run tests in several processes that are forked after one collection: `pytest -p tests.processes --processes 3`.

Collecting imports torch, transformers and all of the product, which takes 15 s of CPU time. Each process that
pytest-xdist starts spends them again. A process takes a file at a time, so fixtures of a module are made once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

FORK = get_context("fork")
TOGETHER = "tests/attack"
"""Files of this folder run in one process, one after the other: they share a server."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="how many processes run tests, each a file at a time")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests and report them as if they had run here; None leaves that to pytest."""
    option = session.config.option
    if option.processes < 2 or option.collectonly or session.testsfailed:
        return None
    files: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        name = item.nodeid.partition("::")[0]
        files.setdefault(TOGETHER if name.startswith(TOGETHER) else name, []).append(item)
    queue, numbers = os.pipe()
    os.write(numbers, b"".join(number.to_bytes(2) for number in range(len(files))))
    os.close(numbers)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    running: dict[Connection, Any] = {}
    for number in range(min(option.processes, len(files))):
        results, sending = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run, args=(session, list(files.values()), queue, sending, number))
        process.start()
        sending.close()
        running[results] = process
    try:
        _report(session, running, queue)
    finally:
        for process in running.values():
            process.join()
        os.close(queue)
    if any(process.exitcode for process in running.values()) and not session.testsfailed:
        raise session.Failed("a process failed between two tests")
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def _report(session: pytest.Session, running: dict[Connection, Any], queue: int) -> None:
    """Report what the processes send until each has ended."""
    hook, now = session.config.hook, dict[Connection, tuple[str, Any]]()
    left = set(running)
    while left:
        for results in wait(left):
            assert isinstance(results, Connection)
            try:
                name, given = results.recv()
            except EOFError:
                left.remove(results)
                if results in now:  # it has not sent the end of its test
                    running[results].join()
                    reason = f"its process ended with {running[results].exitcode}; the rest of the file did not run"
                    report = pytest.TestReport(*now[results], {}, "failed", reason, "call")
                    hook.pytest_runtest_logreport(report=report)
                continue
            if name == "pytest_runtest_logreport":
                given = {"report": hook.pytest_report_from_serializable(config=session.config, data=given["report"])}
            elif name == "pytest_runtest_logstart":
                now[results] = given["nodeid"], given["location"]
            else:
                del now[results]
            getattr(hook, name)(**given)
        if session.shouldfail or session.shouldstop:
            while os.read(queue, 4096):
                pass  # no process begins another file


def _run(session: pytest.Session, files: list[list[pytest.Item]], queue: int, sending: Connection, number: int) -> None:
    """Run files of the queue in this forked process and send what comes of each test."""
    config = session.config
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Sender(config, sending))
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # the file that takes the output is also the parent's
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"process-{number}"
    factory._basetemp.mkdir(0o700)
    items: Iterator[pytest.Item | None] = (
        item for file in iter(lambda: os.read(queue, 2), b"") for item in files[int.from_bytes(file)]
    )
    try:
        for item, following in pairwise(chain(items, [None])):
            assert item is not None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
    except KeyboardInterrupt:
        pass  # the parent has had it, too
    finally:
        session._setupstate.teardown_exact(None)
        capture.stop_global_capturing()


class _Sender:
    """Sends what pytest would report."""

    def __init__(self, config: pytest.Config, sending: Connection) -> None:
        self.config, self.sending = config, sending

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.sending.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sending.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.sending.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))
