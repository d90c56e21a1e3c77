"""Find models by their Hugging Face id in this machine's cache, without using the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

PREFIX = "hf://"
"""Of a plan's checkpoint that is an id, and not a directory."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_id(name: str) -> bool:
    """Whether a model's name reads as ORGANISATION/MODEL."""
    return _ID.fullmatch(name) is not None and not name.endswith((".yaml", ".yml"))


def id_of(checkpoint: str | None) -> str | None:
    """Return the id that a plan's checkpoint is; None: it is a directory, or there is none."""
    return checkpoint.removeprefix(PREFIX) if checkpoint is not None and checkpoint.startswith(PREFIX) else None


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
