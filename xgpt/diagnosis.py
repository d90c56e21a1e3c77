"""Describe this machine, and list problems that make measurements on it unreliable."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import cache_dir, load_json
from xgpt.core.machine import detect, num_cores
from xgpt.core.schema import Frozen, Profile
from xgpt.core.version import __version__

STEADY = 0.10
"""Times count as steady if the slowest tenth of equal products take at most this share longer than the median."""
CLOCK_S = 1.0
FEW_FILES = 1024
"""Largest limit on open files at which a higher limit is recommended. An endpoint needs an open file for each
connection.
"""
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")


class Finding(Frozen):
    name: str
    value: str
    advice: str | None = None


def examine(root: Path = Path("/")) -> list[Finding]:
    """Examine the machine, the installed software and the cached files. This takes two to four seconds."""
    return [_python(), _devices(), instructions(root), _load(), _clock(), *_profiles(), _vllm(), _files(), _disk()]


def _python() -> Finding:
    text = f"xgpt {__version__}, Python {sys.version.split()[0]}"
    try:
        return Finding(name="versions", value=f"{text}, torch {version('torch')}")
    except PackageNotFoundError:
        advice = "planning for clusters works; to profile and serve on this machine, pip install 'xgpt-serve[serve]'"
        return Finding(name="versions", value=f"{text}, no torch", advice=advice)


def _devices() -> Finding:
    try:
        cluster = detect()
    except MachineError as error:
        return Finding(name="devices", value=str(error), advice="describe the machine in a cluster file")
    device = cluster.device
    memory = f"{device.memory_bytes / 2**30:.1f} GiB, of which plans use {device.usable_memory:.0%}"
    return Finding(name="devices", value=f"{cluster.devices_per_node} x {device.name} ({memory})")


def instructions(root: Path = Path("/")) -> Finding:
    try:
        flags = re.search(r"^flags\s*:(.*)$", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    found = [name for name in INSTRUCTIONS if flags and name in flags[1].split()]
    return Finding(name="instructions", value=", ".join(found) or "not known")


def _load() -> Finding:
    cores, load = num_cores(), os.getloadavg()[0]
    advice = None if load < 0.5 else "other programs are running: what is measured now holds for a busy machine"
    return Finding(name="load", value=f"{load:.1f} on {cores} cores", advice=advice)


def _clock() -> Finding:
    a, times_s = np.random.default_rng(0).random((256, 256), dtype=np.float32), []
    until_s = time.perf_counter() + CLOCK_S
    while (begin_s := time.perf_counter()) < until_s:
        for _ in range(8):
            a @ a
        times_s.append(time.perf_counter() - begin_s)
    median_s, slow_s = np.quantile(times_s, [0.5, 0.9])
    spread = slow_s / median_s - 1
    advice = None if spread < STEADY else "times are not steady: profile and measure when the machine is idle"
    return Finding(
        name="clock",
        value=f"the slowest tenth of matrix products take over {1 + spread:.2f} times the median",
        advice=advice,
    )


def _profiles() -> list[Finding]:
    directory = cache_dir() / "profiles"
    kept, broken = [], 0
    for path in sorted(directory.glob("*.json")):
        try:
            kept.append(load_json(path, Profile, "profile"))
        except InputError:
            broken += 1  # a profile of another version of xgpt
    measured = [profile for profile in kept if profile.source == "measured"]
    if not measured:
        advice = "the first plan for this machine measures one, which takes about a minute for a small model"
        return [Finding(name="profiles", value=f"none measured, in {directory}", advice=advice)]
    names = sorted({f"{profile.model.name} in {profile.dtype} on {profile.device}" for profile in measured})
    others = f", {broken} of other versions of xgpt" if broken else ""
    layouts = sorted({layout for profile in measured for layout in profile.layouts.values()})
    return [
        Finding(name="profiles", value=f"{len(measured)} measured{others}, in {directory}: {'; '.join(names)}"),
        Finding(name="layouts", value=", ".join(layouts) or "those of torch"),
    ]


def _vllm() -> Finding:
    from xrunner.vllm.process import package_path, python, version_of

    try:
        with package_path() as packages:
            found = python()
            return Finding(name="vLLM", value=f"{version_of(found, packages)}, by {found}")
    except MachineError as error:
        return Finding(name="vLLM", value="none", advice=f"only --engine vllm needs it: {error}")


def _files() -> Finding:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"run ulimit -n {most} to serve more connections" if limit <= FEW_FILES < most else None
    return Finding(name="open files", value=f"{limit} at most", advice=advice)


def _disk() -> Finding:
    directory = cache_dir()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    advice = None if free > 2**30 and os.access(existing, os.W_OK) else "profiles and compiled kernels cannot be stored"
    return Finding(name="cache", value=f"{directory}, {free / 2**30:.1f} GiB free", advice=advice)
