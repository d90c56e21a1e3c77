"""Make options and keyword arguments from the requests that `xgpt.requests` declares."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tools.fields import descriptions
from xgpt.core.policies import Rule
from xgpt.requests import REQUESTS, Option, RequestBase

GROUPS = ("Problem", "Plan", "Bounds", "Search")
"""Groups that help lists first. The others follow in the order of the fields."""


def options_json() -> str:
    """Return the text of xgpt/options.json: every field of every request, in the order of help."""
    document = {command: _fields(request) for command, request in REQUESTS.items()}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _fields(request: type[RequestBase]) -> list[dict[str, Any]]:
    groups = {name: _group(request, name) for name in request.model_fields}
    ranks = {group: rank for rank, group in enumerate(dict.fromkeys([*GROUPS, *groups.values()]))}
    texts = descriptions(request)
    found = [_field(name, field, texts[name], groups[name]) for name, field in request.model_fields.items()]
    used = request.most_used
    for each in found:
        if each["name"] in used:
            each["group"] = "Most used"
    return sorted(
        found, key=lambda each: (-1, used.index(each["name"])) if each["name"] in used else (ranks[each["group"]], 0)
    )


def _group(request: type[RequestBase], name: str) -> str:
    """Return the group of a field, or else of the class that declares it."""
    option = next((one for one in request.model_fields[name].metadata if isinstance(one, Option)), Option())
    if option.group:
        return option.group
    declares = next(base for base in request.__mro__ if name in inspect.get_annotations(base))
    group: str = declares.group  # type: ignore[attr-defined]
    return group


def _field(name: str, field: FieldInfo, text: str, group: str) -> dict[str, Any]:
    option = next((one for one in field.metadata if isinstance(one, Option)), Option())
    default = None if field.is_required() or field.default_factory else field.default
    is_on = default is True
    flag = option.flag
    if flag == "":
        flag = f"--{'no-' if is_on else ''}{name.replace('_', '-')}"
    kind = {"kind": option.kind} if option.kind else _kind(field.annotation, field.metadata)
    return {
        "name": name,
        "flag": flag,
        "group": group,
        "text": text,
        "type": kind,
        "metavar": option.metavar,
        "default": None if default == () else default,
        "unset": option.unset,
        "names": option.names,
        "is_required": option.is_required,
        "is_repeatable": _is_repeatable(field.annotation) or option.kind in ("assigned", "held", "of_class"),
    }


def _is_repeatable(annotation: Any) -> bool:
    return get_origin(annotation) is tuple and get_origin(get_args(annotation)[0]) is not tuple


def _kind(annotation: Any, metadata: list[Any]) -> dict[str, Any]:
    """Return how an option's text is parsed: by its choices, or as a kind of number with limits."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, types.UnionType):
        return _kind(arguments[0], metadata)
    if origin is Literal:
        return {"kind": "choice", "choices": list(arguments)}
    if annotation is bool:
        return {"kind": "flag"}
    if annotation in (int, float):
        limits: dict[str, Any] = {}
        for one in metadata:
            for each in one.metadata if isinstance(one, FieldInfo) else [one]:
                match each:
                    case annotated_types.Ge(least):
                        limits |= {"min": least}
                    case annotated_types.Gt(least):
                        limits |= {"min": least + 1} if annotation is int else {"min": least, "min_open": True}
                    case annotated_types.Le(most):
                        limits |= {"max": most}
                    case annotated_types.Lt(most):
                        limits |= {"max": most, "max_open": True}
        return {"kind": "whole" if annotation is int else "decimal", **limits}
    return {"kind": "text"}


def keywords_pyi() -> str:
    """Return the text of xgpt/keywords.pyi: a typed dictionary for each class of requests, with the same bases."""
    lines = [
        "# ruff: noqa: E501",
        '"""The keyword arguments of `xgpt.api`, as editors and type checkers see them: made from `xgpt.requests`."""',
        "",
        "from collections.abc import Mapping, Sequence",
        "from os import PathLike",
        "from typing import Literal, TypedDict",
        "",
        "from xgpt.core.policies import Rule",
        "from xgpt.core.schema import ClusterSpec, EngineSpec, ModelSpec, Profile, Workload",
    ]
    names = {request: f"{command.title()}Keywords" for command, request in REQUESTS.items()}
    parents = dict.fromkeys(kind for request in names for kind in reversed(request.__mro__))
    kinds = [kind for kind in parents if issubclass(kind, RequestBase) and kind is not RequestBase]
    keys: dict[type[RequestBase], set[str]] = {RequestBase: POSITIONAL}
    for kind in kinds:
        below = [other for other in kinds if issubclass(other, kind) and other is not kind]
        declared_below = {name for other in below for name in inspect.get_annotations(other)}
        inherited = set().union(*(keys[base] for base in kind.__bases__))
        own = [name for name in kind.model_fields if name not in inherited | declared_below]
        keys[kind] = inherited.union(own)
        bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not RequestBase) or "TypedDict"
        lines += ["", f"class {names.get(kind, kind.__name__)}({bases}, total=False):{'' if own else ' ...'}"]
        texts = descriptions(kind)
        for name in own:
            field = kind.model_fields[name]
            lines.append(f"    {name}: {_spelt(field.annotation, optional=not field.is_required())}")
            lines.append(f'    """{texts[name]}"""')
    return "\n".join(lines) + "\n"


POSITIONAL = {"latency_bound_s", "lengths", "trace"}
"""Fields that are separate arguments in `xgpt.api`."""


def _spelt(annotation: Any, *, optional: bool) -> str:
    parts = dict.fromkeys(_parts(annotation))
    return " | ".join([*(part for part in parts if part != "None"), *(["None"] if optional else [])])


def _parts(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _parts(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _parts(argument)
    elif origin is Literal:
        yield f"Literal[{', '.join(json.dumps(value) for value in arguments)}]"
    elif origin is dict:
        yield f"Mapping[{_spelt(arguments[0], optional=False)}, {_spelt(arguments[1], optional=False)}]"
    elif origin is tuple and arguments[-1] is ...:
        yield f"Sequence[{_spelt(arguments[0], optional=False)}]"
    elif origin is tuple:
        yield f"tuple[{', '.join(' | '.join(_parts(argument)) for argument in arguments)}]"
    elif annotation in (str, Path):
        yield from ("str", "PathLike[str]")
    elif annotation is type(None):
        yield "None"
    else:
        assert annotation in (int, float, bool) or issubclass(annotation, BaseModel | Rule), annotation
        yield annotation.__name__
