"""List the attention backends by name, and choose the fastest one on a device."""

from __future__ import annotations

import torch

from xrunner import cpu
from xrunner.attention.base import AttentionBackend
from xrunner.attention.reference import ReferenceAttention
from xrunner.gpu.attention import TritonAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    **cpu.BACKENDS,
    "triton": TritonAttention,
    "reference": ReferenceAttention,
}
"""Backends by name, the fastest first."""


def usable_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the backends that run on a device, the fastest first."""
    return [name for name, backend in BACKENDS.items() if backend.supports(device, dtype)]


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest backend that runs on a device."""
    return usable_backends(device, dtype)[0]
