"""Attention backends: the contract in base.py, one file a backend, and the table of names."""

from __future__ import annotations

import torch

from xrunner.attention.base import PLAIN, AttentionBackend, Batch, PositionBias, Scoring, Sequences, make_batch
from xrunner.attention.reference import ReferenceAttention
from xrunner.cpu.attention import NumbaAttention
from xrunner.gpu.attention import TritonAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    "numba": NumbaAttention,
    "triton": TritonAttention,
    "reference": ReferenceAttention,
}
"""The fastest first."""


def usable_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the backends that run on a device, the fastest first."""
    return [name for name, backend in BACKENDS.items() if backend.supports(device, dtype)]


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest backend that runs on a device."""
    return usable_backends(device, dtype)[0]


__all__ = [
    "BACKENDS",
    "PLAIN",
    "AttentionBackend",
    "Batch",
    "PositionBias",
    "Scoring",
    "Sequences",
    "default_backend",
    "make_batch",
    "usable_backends",
]
