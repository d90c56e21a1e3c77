"""Step times of a model on a device: measured through xrunner's own layers, or computed from a datasheet.

A ModelSpec and a ClusterSpec enter, a Profile leaves. Only `xprofiler.measure` loads torch.
"""

from xgpt import __version__

GENERATION = 9
"""To be raised whenever steps are executed, or measured, in another way: older profiles are not planned with."""

NATIVE_VERSION = f"{__version__}, steps of generation {GENERATION}"
"""Of the native engine, as a measured profile names it."""
