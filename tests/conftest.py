"""What every test may rely on."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator

import pytest

# Two test processes share the machine, and the models of tests are too small to gain from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    # Triton looks when it is first imported: kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
