"""The readers of config.json, one for each family: model_type to a function that returns fields of `ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.readers.common import common
from xgpt.checkpoints.readers.dense import DENSE
from xgpt.checkpoints.readers.experts import WITH_EXPERTS
from xgpt.core.schema.model import Family

FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = DENSE | WITH_EXPERTS
"""By model_type."""

OTHER_NAMES: dict[str, Family] = {"mt5": "t5", "gemma3_text": "gemma3"}
"""Families whose model_type is not their name."""

__all__ = ["FAMILIES", "OTHER_NAMES", "common"]
