"""Step times of a model on a device: measured through xrunner's own layers, or computed from a datasheet.

A ModelSpec and a ClusterSpec enter, a Profile leaves. Only `xprofiler.measure` loads torch.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from xgpt.core.version import __version__

GENERATIONS = {"cpu": 14, "gpu": 11}
"""Raise a device's whenever steps are executed, or measured, differently there: its older profiles are then not used
for planning."""


def native_version(device_type: Literal["cpu", "gpu"]) -> str:
    """Return the version of the native engine in profiles measured on such a device."""
    return f"{__version__}, steps of generation {GENERATIONS[device_type]}"


def libraries() -> dict[str, str]:
    """Return the versions of the installed libraries that steps run on."""
    versions = {}
    for name in ("torch", "numba", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
