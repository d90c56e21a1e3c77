"""JSON and YAML that others wrote, read within bounds: what nests or grows too far is refused before it is built."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import yaml

MOST_NESTED = 100
MOST_NODES = 250_000
"""A YAML stream may have this many values after each alias is replaced by what it stands for. 64 characters of a text
count as another value.
"""
MOST_YAML = 1 << 24
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BROKEN = (ValueError, KeyError, IndexError, TypeError, AttributeError)


class Excess(ValueError):
    """A document nests too deeply, or has too many values."""


def read_json(text: str | bytes, number: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text. `number` reads its numbers.

    Raises:
        ValueError: the text is not JSON.
        Excess: its values nest too deeply.
    """
    try:
        value = json.loads(text, parse_int=number, parse_float=number)
    except RecursionError:
        raise Excess("it nests too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None  # Python's own advice is about Python
    level = [value]
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MOST_NESTED:  # type: ignore[arg-type]
        for _ in range(MOST_NESTED):
            inner = [each.values() if isinstance(each, dict) else each for each in level]
            level = [each for values in inner for each in values if isinstance(each, (dict, list))]
            if not level:
                return value
        raise Excess("it nests too deeply")
    return value


def read_yaml(text: str) -> list[Any]:
    """Return the documents of a YAML stream.

    Raises:
        ValueError: the text is not YAML. The message is one line.
        Excess: its values nest too deeply or contain themselves, or are too many.
    """
    if len(text) > MOST_YAML:
        raise Excess(f"it has over {MOST_YAML >> 20} million characters")
    try:
        _check(yaml.parse(text, LOADER))
        return list(yaml.load_all(text, LOADER))
    except Excess:
        raise
    except (yaml.YAMLError, RecursionError, *BROKEN) as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None


def _check(events: Iterator[Any]) -> None:
    sizes: dict[str | None, int | None] = {}
    open_: list[tuple[str | None, int]] = [(None, 0)]
    for event in events:
        size = 1
        if isinstance(event, yaml.AliasEvent):
            known = sizes.get(event.anchor, 1)  # an unknown anchor is an error of the loader
            if known is None:
                raise Excess("it contains itself")
            size = known
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > MOST_NESTED:
                raise Excess("it nests too deeply")
            if event.anchor is not None:
                sizes[event.anchor] = None
            open_.append((event.anchor, 1))
            continue
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1 + len(event.value) // 64
            if event.anchor is not None:
                sizes[event.anchor] = size
        else:
            continue
        open_[-1] = (open_[-1][0], open_[-1][1] + size)
        if open_[-1][1] > MOST_NODES:
            raise Excess(f"it has over {MOST_NODES:,} values")
