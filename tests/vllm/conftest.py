"""Tests inside vLLM: collected only where it is installed (`make test-vllm` makes such an environment)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.offline import Requests

_found = find_spec("vllm")
# This folder itself can be found by that name; only an installed package has an origin.
collect_ignore_glob = [] if _found and _found.origin else ["test_*.py"]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Threads that compute wait for the one whose core another process has: on a busy machine two are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _functions_of_llvm() -> None:
    """vLLM looks for kernels in all that this process has imported. numba's library answers to any name, even that of
    Python's own attributes.
    """
    from llvmlite.binding import ffi

    function_of = ffi._lib_wrapper.__getattr__

    def found(library: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return function_of(library, name)

    ffi._lib_wrapper.__getattr__ = found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OPT-125M's shape with seeded weights."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("opt-125m")
    OPTForCausalLM(OPTConfig()).save_pretrained(directory)  # its defaults are this model's shape
    return directory


@pytest.fixture(scope="session")
def requests() -> Requests:
    from tests.vllm.offline import draw_requests

    return draw_requests()


@pytest.fixture(scope="session")
def expected(checkpoint: Path, requests: Requests) -> list[list[int]]:
    """The tokens of vLLM with its own scheduler."""
    from tests.vllm.offline import generate, start

    llm = start(checkpoint, "vllm.v1.core.sched.scheduler.Scheduler", {})
    try:
        return generate(llm, requests)
    finally:
        llm.llm_engine.engine_core.shutdown()
