"""Step times of a model on a device: measured through xrunner's own layers, or computed from a datasheet.

A ModelSpec and a ClusterSpec enter, a Profile leaves. Only `xprofiler.measure` loads torch.
"""

from xgpt import __version__

GENERATION = 11
"""Raise it whenever steps are executed, or measured, differently: older profiles are then not used for planning."""

NATIVE_VERSION = f"{__version__}, steps of generation {GENERATION}"
"""Version of the native engine in measured profiles."""
