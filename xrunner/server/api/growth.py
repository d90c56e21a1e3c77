"""Bound how many times longer a tokenizer may make a text before it divides it into tokens.

A tokenizer.json comes with a checkpoint and is not trusted. Thirty replacements of a by aa make 11 GiB of "aaaa", and
real tokenizers replace a character by at most two.
"""

from __future__ import annotations

import base64
import re
import struct
from typing import Any

from xgpt.core.errors import InputError

MOST_GROWTH = 64
"""Largest factor. Sentencepiece's table of NFKC alone may replace a character by 18."""


def check_growth(parts: dict[str, Any], path: str) -> None:
    """Check how much longer the normaliser, the pre-tokenizer and the decoder of a tokenizer.json make a text.

    Raises:
        InputError: one of them multiplies it too often.
    """
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        factor = _growth(parts.get(name))
        if factor > MOST_GROWTH:
            accepted = (
                f"its {name} may make a text {factor:.3g} times longer, but at most {MOST_GROWTH} times is accepted: "
                "give the tokenizer.json of the checkpoint's model"
            )
            raise InputError("tokenizer", path, accepted)


def _growth(part: Any) -> float:
    if not isinstance(part, dict):
        return 1.0
    factor = 1.0
    for inner in ("normalizers", "pretokenizers", "decoders"):
        for each in part.get(inner) or ():
            factor *= _growth(each)
    match part.get("type"):
        case "Replace":
            factor *= _replaced(part.get("pattern"), str(part.get("content", "")))
        case "Prepend":
            factor *= 1 + len(str(part.get("prepend", "")))
        case "Metaspace":
            factor *= max(1, len(str(part.get("replacement", ""))))
        case "Precompiled":
            factor *= _longest(str(part.get("precompiled_charsmap") or ""))
    return factor


def _replaced(pattern: Any, content: str) -> float:
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str) and pattern["String"]:
        return max(1.0, len(content) / len(pattern["String"]))
    try:
        is_empty = re.compile(str(pattern["Regex"])).match("") is not None
    except (re.error, KeyError, TypeError, OverflowError, RecursionError):
        is_empty = True  # it may match between any two characters
    return max(1.0, len(content) + is_empty)


def _longest(charsmap: str) -> float:
    """Return the length of the longest text in sentencepiece's table: the size of a trie, the trie, and texts that end
    in a zero.
    """
    try:
        table = base64.b64decode(charsmap)
        (size,) = struct.unpack("<I", table[:4])
    except (ValueError, struct.error):
        return 1.0
    return float(max(map(len, table[4 + size :].split(b"\0")), default=1))
