"""The known fields of config.json: fields that are read, and fields without effect.

`transformers` 5 keeps unknown fields in the config, and a model's code may read them. So xgpt's own engine runs no
model with a field that is not in these tables. Plans for other engines name such a field, and assume that it changes no
size. A field that is named like a size is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from xgpt.core.errors import InputError
from xgpt.core.schema.families import FAMILIES, TABLES

BOOKKEEPING, TRAINING, SEARCH, COMMON = (
    frozenset[str](TABLES[name]) for name in ("bookkeeping", "training", "search", "common")
)
"""Fields of any family: without effect on results, only for training, settings of sampling, read for every family."""
NOTHING: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in TABLES["nothing"].items()}
"""Fields of any family that are accepted only with these values, which have no effect."""


def wrong(field: str, value: object, accepted: str) -> InputError:
    """Return the error for a field's value."""
    return InputError(f"config.json: {field}", value, accepted)


class Fields(NamedTuple):
    """The fields that a family's config.json may have in addition to `COMMON`.

    Attributes:
        read: fields that determine the `ModelSpec`.
        only: fields that may switch on an unsupported variant, each with its accepted values.
        without_effect: fields that `transformers` does not read.
        aliases: alternative names of fields. If both names are given, the values must be the same.
        untimed: fields that affect the generated tokens but neither times nor memory. Only families that xgpt's own
            engine does not run have such fields.
    """

    read: frozenset[str]
    only: dict[str, tuple[Any, ...]]
    without_effect: frozenset[str]
    aliases: Mapping[str, str]
    untimed: frozenset[str]


FIELDS: Mapping[str, Fields] = {
    family: Fields(
        frozenset(row["read"]),
        {name: tuple(values) for name, values in row.get("only", {}).items()},
        frozenset(row.get("without_effect", ())),
        row.get("aliases", {}),
        frozenset(row.get("untimed", ())),
    )
    for family, row in FAMILIES.items()
}

SIZE = re.compile(
    r"chunk|conv|depth|dim|expand|expert|freq|group|head|hidden|interval|kernel|layer|mult|num_|_num|pattern|rank|ratio"
    r"|size|state|top_?k|width|window|decoder"
)
"""Matches the names of sizes, and of settings that decide which layers there are."""


def unsupported_fields(family: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a config.json that are not known, or whose values are not, each as "field: value".

    Raises:
        InputError: such a field is named like a size, or contradicts another one. The message names the field.
    """
    known = FIELDS[family]
    passed = (
        known.read
        | known.without_effect
        | known.untimed
        | COMMON
        | ((BOOKKEEPING | TRAINING | SEARCH) - known.only.keys())
    )
    only, found = NOTHING | known.only, list[str]()
    for name, value in config.items():
        if name in only:
            if any(value == accepted and type(value) is type(accepted) for accepted in only[name]):
                continue
            accepted = f"xgpt supports only {' or '.join(repr(one) for one in only[name])}"
        elif name in known.aliases:
            if value not in (None, config.get(known.aliases[name])):
                equal = f"it must equal {known.aliases[name]}, which is {config.get(known.aliases[name])!r}"
                raise wrong(name, value, equal)
            continue
        elif name in passed or _is_off(name, value):
            continue
        else:
            accepted = f"xgpt does not know this field of {family}; remove it if it has no effect on the model"
        if SIZE.search(name):
            raise wrong(name, value, accepted)
        found.append(f"{name}: {value!r}")
    return tuple(sorted(found))


def _is_off(name: str, value: Any) -> bool:
    if value is None or (isinstance(value, (list, dict, str)) and not value):
        return True
    if name.startswith(("use_", "do_", "scale_", "norm_")):
        return False
    return value is False or (value == 0 and type(value) is int and name.endswith("_size"))
