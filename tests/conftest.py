"""What every test may rely on."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.heap import set_heap_aside
from tests.kernels import compile_all
from xgpt.core.compiled_code import set_directory
from xgpt.core.io import cache_dir

with suppress(ModuleNotFoundError):  # vLLM's environment does without it
    from hypothesis import HealthCheck, settings

    # The same random cases each time, however long one takes.
    every = list(HealthCheck)
    settings.register_profile("tests", deadline=None, derandomize=True, database=None, suppress_health_check=every)
    settings.load_profile("tests")

# Two test processes share the machine, and the models of tests are too small to gain from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    # Triton looks when it is first imported: kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Tests give commands an empty cache directory. Compiled kernels and fonts they still take from the user's.
set_directory()
os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile kernels once for all processes of a run; one process compiles what its tests need."""
    if hasattr(session.config, "workerinput") and "NUMBA_CACHE_DIR" in os.environ:
        compile_all(Path(os.environ["NUMBA_CACHE_DIR"]))


FIRST = (
    *("contract/test_claims.py", "unit/xscheduler/objectives", "cli", "load", "attack", "numerics", "contract"),
    *("unit/xrunner/vllm", "unit/xrunner", "unit/xgpt/exploring", "unit/xgpt/core"),
)
"""Files that take longest: started first, so that no process works on one file after the others have ended."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and begin with the files that take longest."""
    here = [item for item in items if not any(True in mark.args for mark in item.iter_markers("skipif"))]
    kept = set(here)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])

    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((place for place, first in enumerate(FIRST) if path.startswith(first)), len(FIRST))

    items[:] = sorted(here, key=rank)


def pytest_collection_finish() -> None:
    """Keep what is loaded out of the garbage collections of the tests, and of the servers that they start."""
    set_heap_aside()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that serves sends all logs of its process to where its errors go; the next test's are its own."""
    root = logging.getLogger()
    names = ("", "uvicorn", "asyncio", "httpx", "numba", "torch")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = root.handlers[:]
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    root.handlers[:] = [h for h in root.handlers if h in handlers]
