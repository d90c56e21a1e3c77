"""What other processes of this machine do while it is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.25
"""If others use at least this share of the cores, the machine is too busy for a full measurement."""
LEAST = 0.05
"""A process that uses at least this many cores is named."""
LOOK_S = 0.5
"""Seconds for which `cores_taken` looks."""


class Others:
    """Counts the CPU time of all processes but this one and its children, from now on. On Linux only; else no time."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc, self._started = proc, time.monotonic()
        self._before = self._seconds()

    def cores(self) -> dict[str, float]:
        """Return the cores that others have taken on average so far, by name, the busiest first; "steal" is what a
        virtual machine's host has given to others.
        """
        wall_s, by_name = max(time.monotonic() - self._started, 1e-9), dict[str, float]()
        for key, (name, seconds) in self._seconds().items():
            taken = (seconds - self._before.get(key, (name, 0.0))[1]) / wall_s
            by_name[name] = by_name.get(name, 0.0) + taken
        found = sorted(by_name.items(), key=lambda item: -item[1])
        return {name: round(cores, 2) for name, cores in found if cores >= LEAST}

    def _seconds(self) -> dict[tuple[int, int], tuple[str, float]]:
        """Return the name and CPU seconds of every other process, by its number and the time at which it began."""
        tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        parents: dict[int, int] = {}
        found: dict[tuple[int, int], tuple[str, float]] = {}
        for file in self._proc.glob("[0-9]*/stat"):
            try:
                head, _, rest = file.read_text(errors="replace").rpartition(")")
            except OSError:  # it has ended
                continue
            fields, number = rest.split(), int(file.parent.name)
            parents[number] = int(fields[1])
            found[number, int(fields[19])] = head.partition("(")[2], (int(fields[11]) + int(fields[12])) / tick
        found = {key: value for key, value in found.items() if not _is_ours(key[0], parents)}
        try:
            whole = (self._proc / "stat").read_text().split("\n", 1)[0].split()
            found[0, 0] = "steal", int(whole[8]) / tick
        except (OSError, IndexError, ValueError):
            pass
        return found


def _is_ours(number: int, parents: dict[int, int]) -> bool:
    """Return whether a process is this one or descends from it."""
    while number and number != os.getpid():
        number = parents.get(number, 0)
    return bool(number)


def cores_taken() -> float:
    """Return the cores that others take just now."""
    others = Others()
    time.sleep(LOOK_S)
    return sum(others.cores().values())
