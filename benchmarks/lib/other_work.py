"""Keep the cores partly busy, like other work: `python -m benchmarks.lib.other_work KIND CORES`.

KIND is `steady`, one process that computes for a part of every 50 ms, or `short`, one short program after the other.
CORES is the total processor time per second. The command runs until it is terminated.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("steady", "short")
PERIOD_S = 0.05
STARTED_S = 0.3
SHORT = ("/bin/sh", "-c", "sort -r /etc/services 2>/dev/null | grep -c tcp; ls -lR /etc | wc -l")
"""A command like a step of a script or of a build: a few milliseconds of starting, reading and sorting."""


class OtherWork:
    """Other work that runs. Its process is None if it uses no core."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process

    def seconds(self) -> float:
        """Return the processor seconds of the other work, including those of ended programs that it started."""
        if self._process is None:
            return 0.0
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def beside(kind: str, cores: float) -> Iterator[OtherWork]:
    if not cores:
        yield OtherWork(None)
        return
    process = subprocess.Popen([sys.executable, "-m", __spec__.name, kind, str(cores)])
    try:
        time.sleep(STARTED_S)
        yield OtherWork(process)
    finally:
        process.kill()
        process.wait()


def _steady(cores: float) -> None:
    while True:
        started, used = time.monotonic(), time.process_time()
        while time.process_time() - used < cores * PERIOD_S:
            pass
        time.sleep(max(0.0, PERIOD_S - (time.monotonic() - started)))


def _short(cores: float) -> None:
    started, before = time.monotonic(), sum(os.times()[:4])
    while True:
        subprocess.run(SHORT, stdout=subprocess.DEVNULL, check=False)
        due_s = started + (sum(os.times()[:4]) - before) / cores
        time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    {"steady": _steady, "short": _short}[sys.argv[1]](float(sys.argv[2]))
