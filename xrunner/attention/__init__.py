"""Attention backends: the contract in base.py, its definition in reference.py, and the choice in backends.py."""

from __future__ import annotations

from xrunner.attention.base import PLAIN, AttentionBackend, Batch, PositionBias, Scoring, Sequences, make_batch

__all__ = ["PLAIN", "AttentionBackend", "Batch", "PositionBias", "Scoring", "Sequences", "make_batch"]
