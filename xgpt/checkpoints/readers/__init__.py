"""Make the fields of `ModelSpec` from the config.json of a family."""

from __future__ import annotations

from xgpt.checkpoints.readers.common import common
from xgpt.checkpoints.readers.dense import SHAPES, read
from xgpt.core.schema.model import Family

OTHER_NAMES: dict[str, Family] = {"mt5": "t5", "gemma3_text": "gemma3"}
"""The family of each model_type whose name differs from its family's."""
