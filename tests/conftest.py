"""What every test may rely on."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import httpx
import httpx._transports.default
import pytest

from tests import rings
from tests.kernels import compile_all
from tests.rings import ALL, examples, shorten
from xgpt.core.compiled_code import set_directory
from xgpt.core.io import cache_dir

with suppress(ModuleNotFoundError):  # vLLM's environment does without it
    from hypothesis import HealthCheck, settings

    # The same random cases each time, however long one takes.
    every = list(HealthCheck)
    settings.register_profile(
        "tests",
        max_examples=examples(100, 20),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=every,
    )
    settings.load_profile("tests")

# Tests start many processes, which take what Python has compiled from files.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts jobs in the background with Ctrl-C ignored, and all processes of tests would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several test processes share the machine, and the models of tests are too small to gain from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    # Triton looks when it is first imported: kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Each client that httpx makes reads the machine's certificates, which takes 20 ms of a processor.
httpx._transports.default.create_ssl_context = lru_cache(httpx.create_ssl_context)

# Hardly anything of what is loaded for a collection of tests is ever garbage.
gc.disable()

# Tests give commands an empty cache directory. Compiled kernels and fonts they still take from the user's.
set_directory()
os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))


def pytest_configure(config: pytest.Config) -> None:
    rings.only_first = config.option.markexpr == "not long"


def pytest_pycollect_makeitem(obj: object) -> list[pytest.Item] | None:
    """Make no items of a long function where they would all be left out."""
    if rings.only_first and isinstance(obj, FunctionType):
        return [] if any(mark.name == "long" for mark in getattr(obj, "pytestmark", ())) else None
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    _compile(session, wait=False)


def _compile(session: pytest.Session, *, wait: bool) -> None:
    """Compile kernels once for all processes of a run; a process without others compiles what its tests need."""
    if hasattr(session.config, "workerinput") and "NUMBA_CACHE_DIR" in os.environ:
        compile_all(Path(os.environ["NUMBA_CACHE_DIR"]), wait=wait)


def pytest_collection(session: pytest.Session) -> None:
    """Begin with another folder in each process: what one has compiled of its files, the others read."""
    worker, arguments = getattr(session.config, "workerinput", None), session.config.args
    if worker is not None and arguments == session.config.getini("testpaths"):
        tests = Path(__file__).parent
        folders = [file.relative_to(tests).parts[0] for file in sorted(tests.rglob("test_*.py"))]
        first = folders[int(worker["workerid"][2:]) * len(folders) // worker["workercount"]]
        arguments[:] = [str(tests / name) for name in sorted(set(folders), key=lambda name: (name < first, name))]


_IMPORTS_TRANSFORMERS = re.compile(r"^ +(from|import) transformers\b", re.MULTILINE)


@lru_cache(None)
def _together(config: pytest.Config, file: str) -> str:
    """Name what stays in one process: the tests of a file and, unless they are all that runs, all attacks, which share
    a server, and in the first ring all comparisons with transformers, which takes six seconds to import.
    """
    if file.startswith("tests/attack/"):
        return file if config.getoption("--attack-report", None) else "attacks"
    if ALL:
        return file
    if file.startswith("tests/numerics/") or _IMPORTS_TRANSFORMERS.search((config.rootpath / file).read_text()):
        return "transformers"
    return file


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(config, _file(nodeid))

    return Scheduling(config, log)


SECONDS = Path(__file__).parent / "seconds.json"
"""How long each file of tests took when `make test-times` wrote it: a process takes those that take longest first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and begin with what takes longest together; new files come before it."""
    here = [item for item in items if not any(True in mark.args for mark in item.iter_markers("skipif"))]
    kept = set(here)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    seconds, together = json.loads(SECONDS.read_text()), Counter[str]()
    for file in sorted({_file(item.nodeid) for item in here}):  # all processes must add alike
        together[_together(config, file)] += seconds.get(file, float("inf"))

    def place(item: pytest.Item) -> tuple[float, str, str]:
        name = _together(config, _file(item.nodeid))
        return -together[name], name, _file(item.nodeid)

    items[:] = sorted(here, key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write how long each file took if the run is to tell it."""
    if "XGPT_TEST_TIMES" in os.environ:
        ran: Counter[str] = Counter()
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                ran[_file(report.nodeid)] += report.duration
        root = terminalreporter.config.rootpath
        seconds = json.loads(SECONDS.read_text()) | {file: round(took, 1) for file, took in ran.items()}
        seconds = {file: seconds[file] for file in sorted(seconds) if (root / file).exists()}
        SECONDS.write_text(json.dumps(seconds, indent=0) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait for what other processes compile, and keep what is loaded out of the garbage collections of the tests."""
    _compile(session, wait=True)
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that serves sends all logs of its process to where its errors go; the next test's are its own."""
    root = logging.getLogger()
    names = ("", "uvicorn", "asyncio", "httpx", "numba", "torch")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = root.handlers[:]
    yield
    for name, level in levels.items():
        if (logger := logging.getLogger(name)).level != level:  # setting one clears what all loggers remember
            logger.setLevel(level)
    root.handlers[:] = [h for h in root.handlers if h in handlers]


@pytest.fixture(autouse=True, scope="session")
def _rates_of_few_requests() -> None:
    """In the first ring, the rates of plans are those by which a search compares them."""
    with suppress(ModuleNotFoundError):  # vLLM's environment does without the planner's packages
        from xscheduler.objectives import every_setting
        from xsimulator import capacity

        if not ALL:
            capacity.LASTING_REQUESTS = every_setting.LASTING_REQUESTS = capacity.LEAST_REQUESTS


@pytest.fixture
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are verified with a tenth of the requests: for tests of what is chosen and said, not of its figures."""
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def short_simulations_here() -> Iterator[None]:
    """The same for all tests of a file, and for what they share."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        yield
