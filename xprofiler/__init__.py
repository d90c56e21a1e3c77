"""Step times of a model on a device: measured through xrunner's own layers, or computed from a datasheet.

A ModelSpec and a ClusterSpec enter, a Profile leaves. Only `xprofiler.measure` loads torch.
"""

from typing import Literal

from xgpt.core.version import __version__

GENERATIONS = {"cpu": 13, "gpu": 11}
"""Raise a device's whenever steps are executed, or measured, differently there: its older profiles are then not used
for planning."""


def native_version(device_type: Literal["cpu", "gpu"]) -> str:
    """Return the version of the native engine in profiles measured on such a device."""
    return f"{__version__}, steps of generation {GENERATIONS[device_type]}"
