"""Describe this machine as a cluster, without importing torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from xgpt.core.errors import MachineError
from xgpt.core.io import config_names, configs_dir, load_cluster_yaml, parse
from xgpt.core.schema import ClusterSpec, DeviceKind, Link

LOOPBACK = Link(bandwidth_bytes_per_s=2e9, latency_s=50e-6)
"""Link between processes of one machine. The figures are orders of magnitude, since there is no datasheet."""

GRACE_HOPPER = {"gh200-480gb": "gh200-96gb", "gh200-144g-hbm3e": "gh200-144gb"}
"""Names of configs by the names that drivers report."""

CPU_USABLE_MEMORY = 0.5
"""Share of a CPU's memory that a plan may fill. The system and other programs need the rest."""


def detect(num_devices: int | None = None, *, root: Path = Path("/")) -> ClusterSpec:
    """Return this machine as a cluster of the GPUs that nvidia-smi lists or, if there are none, of its CPU.

    Args:
        num_devices: number of GPUs, or of CPU devices with equal shares of cores and memory. None means all GPUs, or
            one CPU device.

    Raises:
        MachineError: the machine has fewer GPUs or cores than `num_devices`, has GPUs of several kinds, or does not
            state its memory.
    """
    return _detect_gpus(num_devices) or _detect_cpu(num_devices, root)


def _name(num_devices: int | None) -> str:
    return "local" if num_devices is None else f"local:{num_devices}"


def _detect_cpu(num_devices: int | None, root: Path) -> ClusterSpec:
    cores, count = num_cores(root), num_devices or 1
    if count > cores:
        raise MachineError(
            f"cluster: {_name(num_devices)} needs a core for each device; this machine has {cores} cores: give at most "
            f"local:{cores}"
        )
    device = DeviceKind(
        # Step times depend on the number of cores, so devices of one core and of two cores are different kinds.
        name=f"{slug(_cpu_model(root))}-{cores // count}c",
        type="cpu",
        memory_bytes=_memory_bytes(root) // count,
        usable_memory=CPU_USABLE_MEMORY,
    )
    link = LOOPBACK if count > 1 else None
    return ClusterSpec(name=_name(num_devices), device=device, devices_per_node=count, intra_node=link, host=link)


def _detect_gpus(num_devices: int | None) -> ClusterSpec | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    # Programs cannot allocate the memory that the driver reserves, 0.4% to 1.3%. Drivers before 510 do not state it.
    gpus = _listed(command, "name,memory.total,memory.reserved") or _listed(command, "name,memory.total")
    if not gpus:  # nvidia-smi is installed, but there is no driver or no device
        return None
    if num_devices is not None and num_devices > len(gpus):
        raise MachineError(
            f"cluster: {_name(num_devices)} needs {num_devices} GPUs; nvidia-smi lists {len(gpus)}: give at most "
            f"local:{len(gpus)}"
        )
    if len({(name, total) for name, total, *_ in gpus}) > 1:
        kinds = ", ".join(sorted({", ".join(gpu[:2]) for gpu in gpus}))
        raise MachineError(
            f"all GPUs must be of one kind, but nvidia-smi lists {kinds}; describe those of one kind in a cluster file"
        )
    name, total = gpus[0][:2]
    known = _shipped_cluster_of(slug(name))
    if not total.isdecimal() and known is None:
        raise MachineError(
            f"nvidia-smi gives {total!r}, not a number, as the memory of {name!r}; describe the GPUs in a cluster file"
        )
    reserved = max((int(each) for _, _, *rest in gpus for each in rest if each.isdecimal()), default=0)
    if known is None or total.isdecimal():  # GB10 shares the CPU's memory and states none
        memory_bytes = (int(total) - reserved) * 2**20
        device = DeviceKind(name=slug(name), type="gpu", memory_bytes=memory_bytes)
        device = known.device.but(memory_bytes=memory_bytes) if known else device
    else:
        device = known.device
    return ClusterSpec(
        name=_name(num_devices),
        device=device,
        devices_per_node=num_devices or len(gpus),
        intra_node=known.intra_node if known else None,
        host=known.host if known else None,
    )


def _listed(command: str, fields: str) -> list[list[str]]:
    query = [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        says = f"nvidia-smi does not answer: {error}; repair the driver, or describe the GPUs in a cluster file"
        raise MachineError(says) from None
    return [] if answer.returncode else [line.split(", ") for line in answer.stdout.splitlines() if ", " in line]


def _shipped_cluster_of(device: str) -> ClusterSpec | None:
    documents = [load_cluster_yaml(configs_dir() / "clusters" / f"{n}.yaml") for n in config_names("clusters")]
    clusters = [parse(d, ClusterSpec, d["name"]) for d in documents if "detect" not in d]
    same = [cluster for cluster in clusters if cluster.device.name == device]
    return max(same, key=lambda cluster: cluster.devices_per_node, default=None)


def slug(name: str) -> str:
    """Return a product's name as configs spell it, such as a100-sxm4-80gb for "NVIDIA A100-SXM4-80GB"."""
    words = r"\((r|tm)\)|\b(nvidia|tesla|geforce|blackwell|(server|workstation) edition|cpu|processor)\b|@.*"
    found = re.sub(r"[^a-z0-9]+", "-", re.sub(words, " ", name.lower())).strip("-") or "cpu"
    return GRACE_HOPPER.get(found, found)


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use by its affinity and its cgroup's CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in _cgroup_dirs(root, "cpu"):
        written = _read(directory / "cpu.max") or " ".join(
            _read(directory / f"cpu.cfs_{part}_us") for part in ("quota", "period")
        )
        limit = re.fullmatch(r"(\d+)\s+(\d+)\s*", written)  # no limit is "max" in version 2, "-1" in 1
        if limit:
            cores = min(cores, max(1, int(limit[1]) // int(limit[2])))
    return cores


def _memory_bytes(root: Path) -> int:
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if total:
        limits = [int(total[1]) * 1024]
    elif hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names):
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    else:
        raise MachineError("this machine does not say how much memory it has; describe it in a cluster file")
    for directory in _cgroup_dirs(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(directory / name).strip()
            if text.isdecimal():
                limits.append(int(text))
    return min(limits)


def _cpu_model(root: Path) -> str:
    model = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def _cgroup_dirs(root: Path, controller: str) -> list[Path]:
    """Return the directories of this process's cgroup and its parents (cgroup versions 1 and 2), which may state
    limits.
    """
    mount = root / "sys/fs/cgroup"
    directories = [mount, mount / controller]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        folder = base / path.lstrip("/")
        directories += [folder, *(above for above in folder.parents if base in above.parents)]
    return directories


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
