"""Find models by their Hugging Face id in this machine's cache, without using the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from xgpt.core.errors import InputError, cut
from xgpt.core.schema.plan import HUB, is_hub_id


def is_id(name: str) -> bool:
    """Whether a model's name reads as ORGANISATION/MODEL."""
    return is_hub_id(name) and not name.endswith((".yaml", ".yml"))


def id_of(checkpoint: str | None) -> str | None:
    """Return the id that a plan's checkpoint is; None: it is a directory, or there is none.

    Raises:
        InputError: it is no id that the hub allows.
    """
    if checkpoint is None or not checkpoint.startswith(HUB):
        return None
    model_id = checkpoint.removeprefix(HUB)
    if not is_hub_id(model_id):
        raise InputError("plan.checkpoint", cut(checkpoint), "an id on the hub reads as ORGANISATION/MODEL")
    return model_id


def cached(model_id: str) -> Path | None:
    """Return the directory of a model's newest download in huggingface_hub's cache; None: it is not there."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{model_id.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[0-9a-f]{1,64}", revision):
        return None
    found = model / "snapshots" / revision
    return found if (found / "config.json").is_file() else None
