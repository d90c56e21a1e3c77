"""The tables of model families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xgpt.core.documents import read_yaml

(TABLES,) = read_yaml((Path(__file__).parent / "families.yaml").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = {name: {"family": name} | row for name, row in TABLES["families"].items()}
"""By model_type: the family in `ModelSpec`, how a config is read, and which class runs the model."""
