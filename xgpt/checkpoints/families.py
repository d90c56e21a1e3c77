"""Find the language model in a config.json, and the values that transformers uses for missing fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from xgpt.checkpoints.readers.planned import PLANNED
from xgpt.core.errors import InputError
from xgpt.core.schema.families import FAMILIES, TABLES

ALIASES: Mapping[str, str] = TABLES["aliases"]
"""Families that are read in the same way as another family with the same fields."""
NOT_READ: Mapping[str, str] = TABLES["not_read"]
"""Families that xgpt does not read, with the reason."""
GATED_TOWERS = tuple(TABLES["gated_towers"])
PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""If a model also reads images or sound, one of these fields of config.json contains the language model."""
TOWERS = ("vision_config", "audio_config")
"""Fields of config.json that describe the encoders of images and sound."""
LAYERS = ("vt_num_hidden_layers", "depth", "num_hidden_layers", "encoder_layers")
"""Fields that state the number of layers of these encoders."""


def language_model(config: dict[str, Any], source: str) -> tuple[str, dict[str, Any]]:
    """Return the family and the config of a model's language part.

    Raises:
        InputError: the family is not known.
    """
    outer = config.get("model_type")
    if (why := NOT_READ.get(f"{outer}")) is not None:
        raise InputError(f"{source}: model_type", outer, f"xgpt does not plan this family: {why}")
    for name in PARTS:
        if isinstance(part := config.get(name), dict):
            kept = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
            outside = {field: config[field] for field in kept if field in config}
            inner = part.get("model_type")
            if inner is None or _known(inner) is None:
                inner = inner if _known(f"{outer}") is None else outer
            return language_model(outside | part | {"model_type": inner}, source)
    family = _known(f"{outer}")
    if family is None:
        says = f"xgpt plans only these families: {', '.join(sorted(known_families()))}"
        raise InputError(f"{source}: model_type", outer, says)
    return family, config


def tower_params(config: Mapping[str, Any]) -> int:
    """Estimate the number of weights in a model's image and sound encoders.

    Counted are, for each block, the attention and two or three matrices of the feed-forward block, and two matrices
    that merge several patches into a token. Positions, norms and patch embeddings are not counted.
    """
    inner = config.get("thinker_config")
    parts = [config, inner] if isinstance(inner, dict) else [config]
    towers = [part.get(name) for part in parts for name in TOWERS]
    return sum(_tower(tower) for tower in towers if isinstance(tower, dict))


def tower_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of `Tower` for the encoder of images, or None if its sizes are not known."""
    found = config.get("vision_config")
    if not isinstance(found, dict):
        return None
    hidden = found.get("embed_dim") or found.get("hidden_size")
    inner = found.get("intermediate_size") or int((found.get("mlp_ratio") or 4) * (hidden or 0))
    kind, deep = str(config.get("model_type")), found.get("deepstack_visual_indexes")
    item = next((tokens for name, tokens in TABLES["largest_image"].items() if kind.startswith(name)), 1)
    merge = found.get("spatial_merge_size") or found.get("pooling_kernel_size") or config.get("spatial_merge_size")
    patches = merge**2 if type(merge) is int else round((config.get("downsample_ratio") or 0.5) ** -2)
    if type(tokens := config.get("mm_tokens_per_image")) is int and {"image_size", "patch_size"} <= found.keys():
        item, patches = tokens, (found["image_size"] // found["patch_size"]) ** 2 // tokens
    if type(hidden) is not int or type(inner) is not int or min(hidden, inner, patches, item) < 1:
        return None
    outputs = 1 + len(deep) if isinstance(deep, list) else 1
    return {"hidden_size": hidden, "ffn_size": inner, "patches": patches, "item_tokens": item, "outputs": outputs}


def _tower(config: Mapping[str, Any]) -> int:
    def first(*names: str) -> int:
        return next((config[name] for name in names if isinstance(config.get(name), int)), 0)

    hidden, layers = first("vt_hidden_size", "embed_dim", "hidden_size", "d_model"), first(*LAYERS)
    inner = first("vt_intermediate_size", "intermediate_size", "encoder_ffn_dim") or 4 * hidden
    has_gate = config.get("hidden_act") == "silu" or str(config.get("model_type")).startswith(GATED_TOWERS)
    merged = hidden * max(1, first("spatial_merge_size")) ** 2
    out = first("out_hidden_size") or (first("hidden_size") if "embed_dim" in config else 0)
    deep = config.get("deepstack_visual_indexes")
    mergers = 1 + len(deep) if isinstance(deep, list) else 1
    return layers * (4 * hidden**2 + (3 if has_gate else 2) * hidden * inner) + mergers * merged * (merged + out)


def known_families() -> set[str]:
    return {*FAMILIES, *PLANNED, *ALIASES}


def _known(family: str) -> str | None:
    family = ALIASES.get(family, family)
    return family if family in FAMILIES or family in PLANNED else None


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    return dict(json.loads((Path(__file__).parent / "defaults.json").read_text(encoding="utf-8")))


def given_by_default(family: str) -> dict[str, Any]:
    """Return the values that transformers uses for fields that a config.json leaves out."""
    return _defaults().get(family, {})
