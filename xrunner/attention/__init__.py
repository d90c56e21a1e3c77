"""Attention backends. base.py has their interface, reference.py the reference implementation."""

from __future__ import annotations

from xrunner.attention.base import PLAIN, AttentionBackend, Batch, PositionBias, Scoring, Sequences, make_batch
