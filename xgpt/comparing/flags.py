"""Read an engine's command line as the engine does. Flags may be prefixes or negations, or contain underscores, and
config files may give them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from xgpt.core.documents import read_json, read_yaml
from xgpt.core.errors import InputError, nearest
from xgpt.core.io import load_yaml
from xgpt.core.schema import DType

T = TypeVar("T")

DTYPES: dict[str, DType | None] = {
    "auto": None, "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32",
    "float32": "float32",
}  # fmt: skip
"""Data types by the names that all engines use."""
NO_TABLES = "xgpt has no step times for it"
CAPTURED = "xgpt has step times only for captured CUDA graphs"
VARIABLE = "it is a shell variable: write its value, or give it with --set NAME=VALUE"

Given = dict[str, str]
"""Values of flags by the flags' long names. A value is a text. It is "yes" or "no" for a switch, and JSON for a value
given in parts.
"""


@cache
def tables() -> dict[str, Any]:
    """Return versions, flags, aliases and quantisations of released engines, whose file `python -m tools.make_flags`
    writes, and xgpt's verdicts on them.
    """
    here = Path(__file__).parent
    (verdicts,) = read_yaml((here / "verdicts.yaml").read_text(encoding="utf-8"))
    return verdicts | json.loads((here / "engine_flags.json").read_text(encoding="utf-8"))


def verdicts(engine: str, verdict: str) -> dict[str, tuple[str, Any]]:
    """Return the flags (or regular expressions for their names) that change an engine's speed or memory in a way that
    xgpt does not score: for each, the reason and the values without effect, or the fields of its value that change it.

    Args:
        verdict: refused, or noted for flags that change speed a little.
    """
    rows = tables()[verdict].get(engine, {}).items()
    flags = ((why, each if isinstance(each, dict) else {key: ["no"] for key in each}) for why, each in rows)
    return {name: (why, values) for why, each in flags for name, values in each.items()}


@dataclass(frozen=True)
class FlagTable:
    """The flags of an engine.

    Attributes:
        engine: name and version of the engine, for messages.
        takes: for each flag's long name without dashes, what the flag takes: nothing, switch (nothing, with a --no-
            form), value, optional or many.
        aliases: other names of flags, with dashes.
        abbreviates: whether the engine accepts an unambiguous prefix of a flag, as argparse does.
        earlier: the same as `takes`, for flags that only earlier versions have.
    """

    engine: str
    takes: Mapping[str, str]
    aliases: Mapping[str, str]
    abbreviates: bool = True
    earlier: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: str, name: str, *, abbreviates: bool = True) -> FlagTable:
        """Return the table of an engine's release."""
        document = tables()
        takes, earlier = document["takes"][engine], document["takes"].get(f"{engine}, earlier", {})
        aliases = document["aliases"][engine]
        return cls(f"{name} {document['versions'][engine]}", takes, aliases, abbreviates, earlier)

    def read(self, words: list[str]) -> tuple[Given, list[str]]:
        """Return the flags in a command's words, and the words that belong to no flag. Flags have forms such as `--flag
        value`, `--flag=value`, `-tp 4`, `-O3` and `--flag.field value`.

        Raises:
            InputError: a flag is not known, or the value of a flag is missing.
        """
        given: Given = {}
        free: list[str] = []
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not is_flag(word):
                free.append(word)
                continue
            name, equals, value = word.partition("=")
            if word.startswith("-O"):
                value = word[2:].removeprefix("=")
                name, equals = "--optimization-level", "=" if value else ""
            name, dot, inner = name.partition(".")
            name, is_on = self.name_of(name)
            takes = self.takes.get(name) or self.earlier[name]
            if takes in ("nothing", "switch"):
                if equals or dot:
                    raise InputError(f"current: --{name}", value, "it is a switch and takes no value")
                given[name] = "yes" if is_on else "no"
                continue
            values = [value] if equals else []
            most = {"value": 1, "optional": 1, "many": len(words)}[takes]
            while not equals and at < len(words) and len(values) < most and not is_flag(words[at]):
                values.append(words[at])
                at += 1
            if not values and takes != "optional":
                raise InputError(f"current: --{name}", "", "give a value")
            text = " ".join(values) or ("yes" if takes == "optional" else "")
            given[name] = json.dumps(_with_part(parts_of(given.get(name)), inner.split("."), text)) if dot else text
        return given, free

    def words(self, given: Given) -> list[str]:
        words: list[str] = []
        for name, value in given.items():
            values = value.split() if self.takes.get(name) == "many" else [value]
            words += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(value, [f"--{name}", *values])
        return words

    def name_of(self, word: str) -> tuple[str, bool]:
        """Return the long name of the flag that `word` spells, and whether `word` switches the flag on.

        Raises:
            InputError: there is no such flag, or an abbreviation is ambiguous. For an unknown flag, the message
                suggests the closest one if any is close. It suggests a flag that begins with `--no-` or `--disable-`
                only for a word that begins so, too.
        """
        word = word.replace("_", "-")
        names = self._names()
        if word in names:
            return names[word]
        begun = {name for name in names if self.abbreviates and word.startswith("--") and name.startswith(word)}
        meant = {names[name] for name in begun}
        if len(meant) == 1:
            return meant.pop()
        if meant:
            raise InputError("current", word, f"it may mean one of {', '.join(sorted(begun))}: write it in full")
        off = _is_off(word)
        near = nearest(word, [name for name in names if _is_off(name) == off])
        raise InputError("current", word, f"{self.engine} has no such flag{near or '; correct it, or leave it out'}")

    def _names(self) -> dict[str, tuple[str, bool]]:
        all_ = {**self.earlier, **self.takes}
        names = {f"--{flag}": (flag, True) for flag in all_}
        names |= {f"--no-{flag}": (flag, False) for flag, takes in all_.items() if takes == "switch"}
        return names | {alias: (flag, True) for alias, flag in self.aliases.items()}

    def read_config(self, path: str) -> Given:
        """Return the flags in a YAML file, as `vllm serve --config` reads the file.

        Raises:
            InputError: the file contains something else, or refers to another file.
        """
        data = load_yaml(Path(path), "current: --config")
        if not isinstance(data, dict):
            raise InputError("current: --config", path, "it must contain flags as a YAML mapping (`flag: value`)")
        words: list[str] = []
        for key, value in data.items():
            if isinstance(value, bool):
                words.append(f"--{key}" if value else f"--no-{key}")
            elif isinstance(value, list):
                words += [f"--{key}", *map(str, value)] if value else []
            else:
                words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
        given, _ = self.read(words)
        if "config" in given:
            raise InputError("current: --config", path, "it refers to another config file; put all flags into one")
        return given


def parts_of(text: str | None) -> dict[str, Any]:
    """Return a flag's value so far as a JSON object, or an empty object if there is none."""
    try:
        value = read_json(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _with_part(value: dict[str, Any], names: list[str], text: str) -> dict[str, Any]:
    name, *rest = names
    inner = value.get(name)
    return value | {name: _with_part(inner if isinstance(inner, dict) else {}, rest, text) if rest else text}


def is_flag(word: str) -> bool:
    """Return whether a word is a flag. A negative number is not a flag."""
    return word.startswith("-") and len(word) > 1 and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _is_off(word: str) -> bool:
    return word.startswith(("--no-", "--disable-"))


def value_of(given: Given, name: str, read: Callable[[str], T | None], default: T) -> T:
    """Return the value of a flag, or its default.

    Raises:
        InputError: the value cannot be read.
    """
    if name not in given:
        return default
    if given[name].startswith("$"):
        raise InputError(f"current: --{name}", given[name], VARIABLE)
    try:
        return cast(T, read(given[name]))
    except ValueError as error:
        raise InputError(f"current: --{name}", given[name], str(error)) from None


def judge(given: Given, engine: str) -> list[str]:
    """Return a note for each kind of flags that change speed a little and no sizes, which xgpt does not score.

    Raises:
        InputError: a flag changes speed or memory in another way that xgpt does not score.
    """
    refused, noted = verdicts(engine, "refused"), verdicts(engine, "noted")
    said: dict[str, list[str]] = {}
    for name, text in given.items():
        value = rest = _without(text, tables()["neutral_parts"].get(name, {}))
        scored, values = _verdict(noted, name)
        if isinstance(values, dict):
            rest = _without(value, values)
        if rest != value or (not isinstance(values, dict) and scored and value not in (*values, "{}")):
            said.setdefault(scored, []).append(f"--{name} {value}".removesuffix(" yes"))
        why, values = _verdict(refused, name)
        if why and rest not in (*values, "{}"):
            raise InputError(f"current: --{name}", rest, f"{why}; leave the flag out to compare without it")
    return [f"{', '.join(flags)}: {scored}" for scored, flags in said.items()]


def _verdict(among: Mapping[str, tuple[str, Any]], name: str) -> tuple[str, Any]:
    return among.get(name) or next((among[each] for each in among if re.fullmatch(each, name)), ("", ()))


def _without(text: str, fields: Mapping[str, Sequence[object]]) -> str:
    if not text.startswith("{"):
        return text
    try:
        return json.dumps(_without_fields(read_json(text), fields), sort_keys=True)
    except ValueError:
        return text


def _without_fields(value: dict[str, object], fields: Mapping[str, Sequence[object]]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, part in value.items():
        if name in fields and (not fields[name] or part in fields[name]):
            continue
        inner = _without_fields(part, fields) if fields and isinstance(part, dict) else part
        if inner != {} or part == {}:
            kept[name] = inner
    return kept


def types_of(
    given: Given, engine: str, dtypes: Mapping[str, DType | None]
) -> tuple[DType | None, DType | None, str | None]:
    """Return the data type of weights, the data type of K/V (None: the model's), and the checkpoint's quantisation.

    Args:
        dtypes: data types by the engine's names.

    Raises:
        InputError: a data type or the quantisation is not known.
    """
    kv_names, weights_names = tables()["eight_bit_kv"][engine], tables()["eight_bit_weights"][engine]
    weights = value_of(given, "quantization", str, "") or None
    kv, name = value_of(given, "kv-cache-dtype", str, "auto"), value_of(given, "dtype", str, "auto")
    for flag, value, known in (("kv-cache-dtype", kv, (*dtypes, *kv_names)), ("dtype", name, tuple(dtypes))):
        if value not in known:
            raise InputError(f"current: --{flag}", value, f"give one of {', '.join(known)}")
    kv_dtype: DType | None = "float8" if kv in kv_names else dtypes[kv] or dtypes[name]
    return ("float8", kv_dtype, None) if weights in weights_names else (dtypes[name], kv_dtype, weights)


def count(text: str) -> int:
    """Return the number in a text, which must be a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise ValueError("give a whole number, at least 1")
    return int(text)


def share(text: str) -> float:
    """Return the number in a text, which must be above 0 and at most 1."""
    if not re.fullmatch(r"[01]?\.?\d*", text) or not text.strip(".") or not 0 < float(text) <= 1:
        raise ValueError("give a share above 0, at most 1")
    return float(text)
