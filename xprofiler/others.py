"""Observe how much CPU time other processes use, and how fast this machine computes."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np

from xgpt.core.machine import num_cores
from xgpt.core.schema import Profile

BUSY = 0.25
"""If other processes use more than this share of the cores, the machine is too busy for a full measurement."""
LEAST = 0.05
STEAL, UNSEEN = "steal", "processes that ended or are not visible"
LOOK_S = 0.5
NOTABLE = 0.1
"""A machine counts as changed if its GFLOP/s (relatively), or the share of its cores that other processes use, differ
by more.
"""


class Others:
    """Counts the CPU time of all processes except this one and its descendants, from this object's creation on. On
    other systems than Linux, it counts nothing.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc, self._started = proc, time.monotonic()
        self._before, self._whole_before = self._seconds()

    def cores(self) -> dict[str, float]:
        """Return how many cores each other process has used on average so far, by name, the busiest first. The name
        includes the process id, for example "python[4711]". Processes with the same name are added up, without ids.

        "steal" stands for the time that a virtual machine's host gave to other machines. `UNSEEN` stands for processes
        that have ended or are not visible.
        """
        wall_s, by_name = max(time.monotonic() - self._started, 1e-9), dict[str, float]()
        seconds, whole = self._seconds()
        times = Counter(name for name, _ in seconds.values())
        for key, (name, until) in seconds.items():
            taken = until - self._before.get(key, (name, 0.0))[1]
            label = f"{name}[{key[0]}]" if key[0] and times[name] == 1 else name
            by_name[label] = by_name.get(label, 0.0) + taken
        seen = sum(taken for name, taken in by_name.items() if name != STEAL)
        by_name[UNSEEN] = whole - self._whole_before - seen
        found = sorted(by_name.items(), key=lambda item: -item[1])
        return {name: round(taken / wall_s, 2) for name, taken in found if taken >= LEAST * wall_s}

    def _seconds(self) -> tuple[dict[tuple[int, int], tuple[str, float]], float]:
        """Return two results: the name and CPU seconds of every other process, by id and start time, and the CPU
        seconds of the whole machine minus those of this process and its descendants.
        """
        tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        parents: dict[int, int] = {}
        found: dict[tuple[int, int], tuple[str, float]] = {}
        with_ended: dict[int, float] = {}
        for file in self._proc.glob("[0-9]*/stat"):
            try:
                head, _, rest = file.read_text(errors="replace").rpartition(")")
            except OSError:  # it has ended
                continue
            fields, number = rest.split(), int(file.parent.name)
            parents[number] = int(fields[1])
            found[number, int(fields[19])] = head.partition("(")[2], (int(fields[11]) + int(fields[12])) / tick
            with_ended[number] = sum(map(int, fields[11:15])) / tick
        ours = sum(seconds for number, seconds in with_ended.items() if _is_ours(number, parents))
        found = {key: value for key, value in found.items() if not _is_ours(key[0], parents)}
        try:
            whole = [int(field) / tick for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
            found[0, 0] = STEAL, whole[7]
        except (OSError, IndexError, ValueError):
            return found, 0.0
        return found, sum(whole[:3]) - ours


def _is_ours(number: int, parents: dict[int, int]) -> bool:
    while number and number != os.getpid():
        number = parents.get(number, 0)
    return bool(number)


def cores_taken() -> float:
    others = Others()
    time.sleep(LOOK_S)
    return sum(others.cores().values())


def gflops() -> float:
    """Return the GFLOP/s of a fixed matrix product on all cores. They show changes of the clock rate."""
    a = np.ones((1024, 1024), np.float32)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return round(2 * 1024**3 / best / 1e9, 1)


def differences(profile: Profile) -> str | None:
    """Return one line on how this machine's state differs from that during profiling.

    Return None if it does not differ notably, or if the profile does not contain the state.
    """
    if profile.gflops is None:
        return None
    rate, taken, before = gflops(), cores_taken(), sum(profile.others.values())
    found = []
    if abs(rate / profile.gflops - 1) > NOTABLE:
        found.append(f"it computed {profile.gflops:.0f} GFLOP/s and now computes {rate:.0f}")
    if abs(taken - before) > NOTABLE * num_cores():
        found.append(f"other processes used {before:.2g} of its {num_cores()} cores and now use {taken:.2g}")
    return f"the machine has changed since it was profiled: {'; '.join(found)}" if found else None
