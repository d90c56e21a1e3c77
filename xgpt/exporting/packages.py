"""The Python packages that a machine needs to run an exported plan, with pinned versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from xgpt.core.schema import Plan
from xgpt.core.version import __version__
from xrunner.vllm import TESTED_VERSION

WHEEL = f"xgpt_serve-{__version__}-py3-none-any.whl"
MAKE_WHEEL = "# (pip wheel --no-deps . makes it in xgpt's repository)\n"
BESIDE_VLLM = ("click", "optuna", "rich", "scipy")
"""Packages that serving needs and vLLM does not install."""
PORT = 8000
NIXL_PACKAGE = "nixl==1.5.1"
"""Package that moves K/V from GPU to GPU under WAA."""


def beside_vllm(plan: Plan) -> list[str]:
    """Return the requirements that pip installs next to vLLM."""
    moves_kv = plan.cluster.device.type == "gpu" and len(plan.policy.lanes) > 1
    return [*map(pinned, BESIDE_VLLM), *[NIXL_PACKAGE] * moves_kv]


def vllm_dockerfile(plan: Plan, image: str, user: int, base: str | None = None) -> str:
    """Return the Dockerfile of an image with xgpt next to vLLM.

    Args:
        base: an image with vLLM, whose version is checked during the build. None means vLLM's own image.
    """
    check = (
        f"RUN python3 -c \"import vllm; assert vllm.__version__.startswith('{TESTED_VERSION}'), vllm.__version__\"\n"
    )
    return (
        f"# docker build -t {image} . (with {WHEEL} in this directory)\n{MAKE_WHEEL}"
        f"FROM {base or f'vllm/vllm-openai:v{TESTED_VERSION}'}\n{'' if base is None else check}"
        f"COPY {WHEEL} /tmp/\n"
        f"RUN pip install {' '.join(beside_vllm(plan))} && pip install --no-deps /tmp/{WHEEL}\n"
        f"USER {user}\n"
    )


def pinned(name: str) -> str:
    """Return a requirement pinned to the installed version, or without a version if the package is not installed."""
    try:
        return f"{name}=={version(name).partition('+')[0]}"
    except PackageNotFoundError:
        return name
