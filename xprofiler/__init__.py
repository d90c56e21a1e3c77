"""Find a model's step times. They are measured with xrunner's layers, computed from a datasheet, or imported.

Only modules that measure with xrunner's layers load torch.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

GENERATIONS = {"cpu": 15, "gpu": 11}
"""Versions of xgpt's engine by type of device. Increment one if steps are executed or measured differently. Older
profiles are then no longer used.
"""


def xgpt_version(device_type: Literal["cpu", "gpu"]) -> str:
    return f"steps of generation {GENERATIONS[device_type]}"


def libraries() -> dict[str, str]:
    versions = {}
    for name in ("torch", "numba", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
