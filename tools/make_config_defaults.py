"""Write the values that transformers gives to sizes which a config.json leaves out.

    python -m tools.make_config_defaults

Only single numbers are written, because readers compute lists from the number of layers. Sizes that a class derives
from other sizes, such as K/V heads from heads, are also left to the readers.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from xgpt.checkpoints.readers.planned import PLAIN

TABLE = Path(__file__).parent.parent / "xgpt" / "checkpoints" / "defaults.json"
ALSO = ("gemma3_text",)
"""Families that xgpt runs and whose official configs leave sizes out."""
SIZES = ("size", "dim", "heads", "layers", "experts", "rank", "topk", "window", "freq", "interval", "width", "tok")
SIZES += ("embeddings", "tie_word", "groups", "conv", "expand", "state", "replace", "moe", "multiplier", "adjust")
SIZES += ("multiple_of", "cache", "gating", "scalar", "pattern", "head", "hc_mult", "query", "eq_v")
LEFT_OUT = (
    "initializer",
    "layer_types",
    "dropout",
    "coef",
    "chunk_size_feed_forward",
    "swa_",
    "token_id",
    "mtp",
    "nextn",
)


def main() -> None:
    table: dict[str, dict[str, float | bool]] = {}
    for family in sorted({*PLAIN, *ALSO}):
        if family not in CONFIG_MAPPING:
            continue
        values = CONFIG_MAPPING[family]().to_dict()
        table[family] = {
            name: value
            for name, value in sorted(values.items())
            if isinstance(value, (bool, int, float))
            and getattr(CONFIG_MAPPING[family], name, value) is not None  # otherwise it follows from other sizes
            and any(part in name for part in SIZES)
            and not any(part in name for part in LEFT_OUT)
        }
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(table)} families of transformers {__version__}")


if __name__ == "__main__":
    main()
