"""What has to be installed where an exported plan runs, pinned to versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from xgpt import __version__
from xgpt.schema import Plan

WHEEL = f"xgpt_serve-{__version__}-py3-none-any.whl"
MAKE_WHEEL = "# (pip wheel --no-deps . makes it in xgpt's repository)\n"
BESIDE_VLLM = ("click", "optuna", "rich", "scipy")
"""What serving needs that vLLM does not bring."""
PORT = 8000
NIXL_PACKAGE = "nixl==1.5.1"
"""What K/V of WAA goes by, from GPU to GPU."""


def beside_vllm(plan: Plan) -> list[str]:
    """Return what pip is to install next to vLLM."""
    moves_kv = plan.cluster.device.type == "gpu" and len(plan.policy.lanes) > 1
    return [*map(_pinned, BESIDE_VLLM), *[NIXL_PACKAGE] * moves_kv]


def _pinned(name: str) -> str:
    """The version that is here; of a package that is not, whichever fits."""
    try:
        return f"{name}=={version(name)}"
    except PackageNotFoundError:
        return name
