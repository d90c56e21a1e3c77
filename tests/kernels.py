"""Compile what numba compiles once for all test processes: each compiles what no other one is compiling."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.rings import ALL
from xgpt.core.schema import DType


def compile_all(cache: Path, *, wait: bool) -> None:
    """Compile into numba's cache, which the processes share, the kernels and simulations that are not in it.

    Args:
        wait: also wait for those that other processes are compiling.
    """
    import xsimulator
    from xrunner import cpu

    # Numba compiles a file anew when it has been written since.
    rooms = Path(cpu.__file__).parent, Path(xsimulator.__file__).parent
    newest = max(file.stat().st_mtime_ns for room in rooms for file in room.rglob("*.py"))
    shared = cache / f"tests-{newest}"
    shared.mkdir(parents=True, exist_ok=True)
    for name, compile_kernel in kernels().items():
        done = shared / f"{name}.done"
        if done.exists():
            continue
        with (shared / name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                continue
            if not done.exists():
                compile_kernel()
                done.touch()


def kernels() -> dict[str, Callable[[], object]]:
    """Return what compiles each group of kernels and simulations, those that take longest first."""
    import torch

    from xrunner import cpu
    from xrunner.packing.choice import layouts_of, pack
    from xsimulator.counts import counted_run

    found: dict[str, Callable[[], object]] = {"counts": counted_run.main}
    if not cpu.BACKENDS:
        return found

    def attend(kept: torch.dtype) -> None:
        import numpy as np

        from tests.numerics.steps import kept_in, random_batch
        from xrunner.build import BACKENDS

        (q, k, v), cache, batch = random_batch([9], [(0, 7)], (4, 2, 16), 16, np.random.default_rng(0))
        BACKENDS["numba"]().forward(q, k, v, kept_in(cache, kept), batch)

    def multiply(dtype: DType) -> None:
        product = pack(torch.ones(32, 32), "none", dtype)
        assert product is not None
        product(torch.ones(1, 32), None)

    found |= {
        f"attention-{kept}".replace("torch.", ""): partial(attend, kept)
        for kept in (torch.float32, *((torch.bfloat16, torch.int8) if ALL else ()))
    }
    dtypes: list[DType] = [dtype for dtype in ("float32", "bfloat16", "int8") if layouts_of(dtype)]
    return found | {f"products-{dtype}": partial(multiply, dtype) for dtype in dtypes}
