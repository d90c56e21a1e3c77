"""Find models by their Hugging Face id in this machine's cache, without network access."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from xgpt.core.errors import InputError, cut
from xgpt.core.io import configs_dir, load_yaml
from xgpt.core.schema.families import TABLES
from xgpt.core.schema.plan import HUB, is_hub_id


def is_gated(model_id: str) -> bool:
    return model_id.startswith(tuple(TABLES["gated_ids"]))


def is_id(name: str) -> bool:
    return is_hub_id(name) and not name.endswith((".yaml", ".yml"))


def id_of(checkpoint: str | None) -> str | None:
    """Return the hub id of a plan's checkpoint, or None if the checkpoint is a directory or None.

    Raises:
        InputError: the id is malformed.
    """
    if checkpoint is None or not checkpoint.startswith(HUB):
        return None
    model_id = checkpoint.removeprefix(HUB)
    if not is_hub_id(model_id):
        raise InputError("plan.checkpoint", cut(checkpoint), "an id on the hub has the form ORGANISATION/MODEL")
    return model_id


def cached(model_id: str) -> Path | None:
    """Return the directory of a model's main revision in huggingface_hub's cache, or None if it is not there."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{model_id.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[0-9a-f]{1,64}", revision):
        return None
    snapshot = model / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else None


_VARIANTS = re.compile(r"-(instruct|chat|it|hf|thinking|base)(?=-|$)")
"""Words of a model's name that do not change its shape."""


def shipped_as(model_id: str) -> str | None:
    """Return the name of the shipped config for the model with this id, or None if there is no such config. Another
    organisation's model of the same name has the same shape.
    """
    exact = next((name for name, ids in _shipped_ids().items() if model_id in ids), None)
    return exact or _by_plain_name().get(_plain(model_id), (None, ""))[0]


def id_of_name(name: str) -> str | None:
    """Return the hub id that a name without an organisation means, as in Llama-3.3-70B, or None if it is not known."""
    return _by_plain_name().get(_plain(name), (None, None))[1]


def _plain(name: str) -> str:
    name = name.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    return re.sub(r"(?<=[a-z])-(?=\d)", "", _VARIANTS.sub("", name))


@cache
def _by_plain_name() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for shipped, ids in _shipped_ids().items():
        for each in ids:
            found.setdefault(_plain(each), (shipped, each))
    return found


def id_of_shipped(name: str) -> str | None:
    return next(iter(_shipped_ids().get(name, ())), None)


def shipped_ids() -> list[str]:
    return [each for ids in _shipped_ids().values() for each in ids]


@cache
def _shipped_ids() -> dict[str, list[str]]:
    return dict(load_yaml(configs_dir() / "hub_ids.yaml", "hub_ids"))
