"""For each model_type, the function that makes the fields of `ModelSpec` from a config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.readers.common import common
from xgpt.checkpoints.readers.dense import DENSE
from xgpt.checkpoints.readers.experts import WITH_EXPERTS
from xgpt.core.schema.model import Family

READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = DENSE | WITH_EXPERTS
"""Readers by model_type."""

OTHER_NAMES: dict[str, Family] = {"mt5": "t5", "gemma3_text": "gemma3"}
"""The family of each model_type whose name differs from its family's."""
