"""Compile kernels in separate processes before a machine is measured, and store them on disk.

On a new machine, compiling attention and the simulation by counts takes half a minute on one core (Zen 4).
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from xgpt.core.compiled_code import set_directory
from xgpt.core.errors import MachineError
from xgpt.core.io import write_atomic
from xgpt.core.processes import run_module
from xgpt.core.schema import DType, ModelSpec

MOST_S = 180.0


class Ahead:
    """Processes that compile those kernels for a model's profile and first plan that are not on disk yet.

    If a process fails, its kernels are compiled when they are needed.
    """

    def __init__(self, spec: ModelSpec, dtype: DType, kv_dtype: DType | None, *, is_cpu: bool) -> None:
        kind = f"{dtype}-{kv_dtype or dtype}-{'encoder' if spec.is_encoder_decoder else 'decoder'}"
        commands = {
            f"attention-{kind}": ["xprofiler.compile_attention", dtype, kv_dtype or "", spec.model_dump_json()],
            "counts": ["xsimulator.counts.counted_run"],
        }
        set_directory()
        directory = Path(os.environ.get("NUMBA_CACHE_DIR", os.devnull))
        marks = {directory / f"{name}.done": command for name, command in commands.items()}
        self._processes = {
            mark: subprocess.Popen(
                [*run_module(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for mark, command in marks.items()
            if is_cpu and directory.is_dir() and not mark.is_file()
        }

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def wait(self) -> None:
        for mark, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired, MachineError):
                if process.wait(MOST_S) == 0:
                    write_atomic(mark, "")
