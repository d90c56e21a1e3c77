"""Read a checkpoint's tokenizer as transformers' `AutoTokenizer` reads it: tokenizer.json and tokenizer_config.json.

Sections of tokenizer.json that cut or pad texts are dropped, since they are for training. Tokens that only
tokenizer_config.json lists are added. A token that tokenizer_config.json lists as special (`eos_token`, ...) becomes
special. tokenizer.json decides which tokens surround a prompt, whatever the value of `add_bos_token`."""

from __future__ import annotations

import base64
import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from xgpt.checkpoints.files import read_object
from xgpt.core.documents import read_json
from xgpt.core.errors import InputError, cut
from xgpt.core.io import read_text

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Options that an added token may have."""
MOST_GROWTH = 64
"""Largest factor by which a tokenizer may make a text longer before it divides it into tokens. A tokenizer.json is not
trusted: thirty replacements of a by aa make 11 GiB of "aaaa". Sentencepiece's table of NFKC alone may replace a
character by 18, and real tokenizers by at most two."""

MOST_AROUND = 64 << 10
"""Largest size of the section that states the tokens around a prompt. Reading it takes quadratic time."""
RUN, MOST_TRIAL_S = 1000, 2.0
"""Length of the runs of equal characters that a tokenizer must encode when it is loaded, and the processor time that it
may need for all of them. Real tokenizers need milliseconds."""
TRIED = " \n\ta1A._'\u00e9\u4e2d\u044f\u05d0\u0301\U0001f600"


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of a checkpoint directory and its tokenizer_config.json, or None if there is no
    tokenizer.json. Raises InputError: a file exists but cannot be read."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    settings = read_settings(checkpoint)
    try:
        content = read_text(path, "tokenizer")
        parts = read_json(content)
        _check_growth(parts, str(path))
        tokenizer = Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add_tokens(tokenizer, settings)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the library's errors are plain Exceptions, and its panics are none
        says = f"it cannot be read: {cut(str(error))}; fetch the checkpoint again"
        raise InputError("tokenizer", str(path), says) from None
    _check_encodes(tokenizer, list(_expressions(parts)), path)
    return tokenizer, settings


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, empty if there is none. Raises InputError: the file is not a JSON object."""
    return read_object(checkpoint / "tokenizer_config.json", "tokenizer_config") or {}


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
    added: list[AddedToken] = []
    for number, entry in enumerate([*listed, *(settings.get(name) for name in named), *others]):
        text = token_text(entry)
        if text is None or text in known:
            continue
        known.add(text)
        options = {name: bool(entry[name]) for name in OPTIONS if name in entry} if isinstance(entry, dict) else {}
        is_special = options.pop("special", number >= len(listed)) or text in named.values()
        added.append(AddedToken(text, special=is_special, **options))
    tokenizer.add_tokens(added)  # each call takes time for all tokens


def _check_growth(parts: dict[str, Any], path: str) -> None:
    if (size := len(json.dumps(parts.get("post_processor")))) > MOST_AROUND:
        accepted = f"its post_processor has {size} characters, but at most {MOST_AROUND} are accepted"
        raise InputError("tokenizer", path, f"{accepted}: give the tokenizer.json of the checkpoint's model")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        factor = _growth(parts.get(name))
        if factor > MOST_GROWTH:
            accepted = (
                f"its {name} may make a text {factor:.3g} times longer, but at most {MOST_GROWTH} times is accepted: "
                "give the tokenizer.json of the checkpoint's model"
            )
            raise InputError("tokenizer", path, accepted)


def _expressions(part: Any) -> Iterator[str]:
    """Yield the regular expressions in a tokenizer.json."""
    for name, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if name == "Regex":
            yield str(value)
        elif name not in ("vocab", "merges"):
            yield from _expressions(value)


def _check_encodes(tokenizer: Tokenizer, patterns: list[str], path: Path) -> None:
    """Encode a text as a check: some tokenizers can be read but fail at every text, and some need exponential time. The
    library has no time limit, so a thread that takes too long is left to the end of the process."""
    text, failed = _trial(patterns), ""

    def encode() -> None:
        nonlocal failed
        try:
            for add_special_tokens in (False, True):
                tokenizer.decode(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except BaseException as error:  # the library's panics are not Exceptions
            failed = cut(str(error)) or "it failed"

    thread = threading.Thread(target=encode, daemon=True)
    end_s = time.process_time() + MOST_TRIAL_S
    thread.start()
    while thread.is_alive() and time.process_time() < end_s:
        thread.join(0.02)
    if thread.is_alive():
        failed = f"{RUN} equal characters take it more than {MOST_TRIAL_S:g} s"
    if failed:
        accepted = f"it cannot encode a text ({failed}): give the tokenizer.json of the checkpoint's model"
        raise InputError("tokenizer", str(path), accepted)


def _trial(patterns: list[str]) -> str:
    """Return a text with a long run of each character that may matter to the tokenizer's regular expressions, and then
    each once, so that a search for what must follow a run does not fail at once."""
    units = sorted({*TRIED, *"".join(patterns), *(word for each in patterns for word in re.findall(r"\w+", each))})
    return "Hello, world" + "".join((unit * RUN)[:RUN] + "\x01" for unit in units) + "\x01".join(units)


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
    in a zero."""
    try:
        table = base64.b64decode(charsmap)
        (size,) = struct.unpack("<I", table[:4])
    except (ValueError, struct.error):
        return 1.0
    return float(max(map(len, table[4 + size :].split(b"\0")), default=1))
