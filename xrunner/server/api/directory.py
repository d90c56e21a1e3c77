"""Read a checkpoint's tokenizer as transformers' `AutoTokenizer` reads it: tokenizer.json and tokenizer_config.json.

Sections of tokenizer.json that cut or pad texts are dropped, since they are for training. Tokens that only
tokenizer_config.json lists are added. A token that tokenizer_config.json lists as special (`eos_token`, ...) becomes
special. tokenizer.json decides which tokens surround a prompt, whatever the value of `add_bos_token`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.io import read_text
from xrunner.server.api.growth import check_growth

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Options that an added token may have."""


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of a checkpoint directory and its tokenizer_config.json, or None if there is no
    tokenizer.json.

    Raises:
        InputError: a file exists but cannot be read.
    """
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    settings = read_settings(checkpoint)
    try:
        content = read_text(path, "tokenizer")
        check_growth(read_json(content), str(path))
        tokenizer = Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add_tokens(tokenizer, settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError("tokenizer", str(path), f"it cannot be read: {error}; fetch the checkpoint again") from None
    return tokenizer, settings


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, empty if there is none.

    Raises:
        InputError: the file is not a JSON object.
    """
    path = checkpoint / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = read_json(read_text(path, "tokenizer_config"))
    except ValueError as error:
        raise InputError(
            "tokenizer_config", str(path), f"it cannot be read as JSON: {error}; fetch the checkpoint again"
        ) from None
    if not isinstance(config, dict):
        raise InputError("tokenizer_config", str(path), "it must contain a JSON object")
    return config


def token_text(token: object) -> str | None:
    """Return a special token's text, or None. `token`: the text, or an object that contains it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in tokenizer_config.json, by name (`eos_token`, ...)."""
    written = {name: token_text(token) for name, token in settings.items() if name.endswith("_token")}
    return {name: text for name, text in written.items() if text is not None}


def _add_tokens(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = special_tokens({name: settings.get(name) for name in SPECIAL_NAMES})
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    listed = [entry for _, entry in sorted((int(id_), entry) for id_, entry in entries if isinstance(entry, dict))]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    others = extra.values() if isinstance(extra, dict) else extra
    for entry in [*listed, *(settings.get(name) for name in named), *others]:
        text = token_text(entry)
        if text is None or text in known:
            continue
        known.add(text)
        options = {name: bool(entry[name]) for name in OPTIONS if name in entry} if isinstance(entry, dict) else {}
        is_special = options.pop("special", entry not in listed) or text in named.values()
        token = AddedToken(text, special=is_special, **options)
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])
