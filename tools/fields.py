"""Read the descriptions of schema types' fields: the string below a field, which pydantic does not store."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from textwrap import dedent
from typing import Any, get_args

from pydantic import BaseModel


def reachable(model: type[BaseModel], seen: list[type[BaseModel]] | None = None) -> Iterator[type[BaseModel]]:
    """Yield a type and the types of its fields, each once, in the order of reading.

    Args:
        seen: types to leave out. Yielded types are added.
    """
    seen = [] if seen is None else seen
    if model in seen:
        return
    seen.append(model)
    yield model
    for field in model.model_fields.values():
        for kind in _models(field.annotation):
            yield from reachable(kind, seen)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field, including fields of base classes. Fields without one are left out."""
    found = {name: field.description for name, field in model.model_fields.items() if field.description}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _own(base)
    return {name: text for name, text in found.items() if name in model.model_fields}


@cache
def _own(model: type[BaseModel]) -> dict[str, str]:
    tree = ast.parse(dedent(inspect.getsource(model))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = dict(_attributes(ast.get_docstring(tree) or ""))
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of a docstring's section Attributes."""
    _, _, section = docstring.partition("Attributes:\n")
    name, words = "", ""
    for line in section.split("\n\n")[0].splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and line.startswith("    ") and not line.startswith("     "):
            if name:
                yield name, words
            name, words = head, rest
        else:
            words += " " + line.strip()
    if name:
        yield name, words
