"""Turn a pydantic ValidationError into one line with the names in the user's file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from xgpt.core.errors import InputError, nearest

_MUST_BE = {
    "int": "it must be a whole number",
    "float": "it must be a number",
    "bool": "it must be true or false",
    "string": "it must be text",
    "tuple": "it must be a list",
    "dict": "it must map names to values",
}


def refusal(error: ValidationError, type_: type[BaseModel], data: Any, field: str = "") -> InputError:
    first = error.errors()[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    names, types = [field] if field else [], [type_]
    loc = first["loc"]
    for part in loc:
        if isinstance(data, list | tuple) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        elif isinstance(data, dict) and (part in data or (part == loc[-1] and kind == "missing")):
            data = data.get(part)
            if kind != "extra_forbidden" or part != loc[-1]:
                types = [model for known in types for model in _models(known.model_fields.get(str(part)))]
        else:
            continue  # the type of a union's member, which is not a name in the file
        names.append(str(part))
    accepted = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace("Input should", "it must")
        .replace("String should", "it must")
    )
    if kind == "missing":
        siblings = [one["loc"][-1] for one in error.errors()[1:] if (one["type"], one["loc"][:-1]) == (kind, loc[:-1])]
        also = " and ".join(f"`{'.'.join([*names[:-1], str(name)])}`" for name in siblings)
        value, accepted = None, f"give a value, also for {also}" if also else "give a value"
    elif kind == "extra_forbidden":
        known = {name for model in types for name in model.model_fields}
        accepted = f"there is no such {'field' if field else 'argument'}"
        accepted += nearest(names[-1], known) or f"; the known ones are {', '.join(sorted(known))}"
    elif kind.startswith("union_tag"):
        names.append(context["discriminator"].strip("'"))
        value = context.get("tag")
        accepted = f"give one of {context['expected_tags']}" if value else "give a value"
    elif kind.startswith("model_"):
        known = {name for model in types for name, each in model.model_fields.items() if each.is_required()}
        accepted = f"it must have the fields {', '.join(sorted(known))}"
    elif kind.endswith(("_type", "_parsing", "_from_float")):
        accepted = _MUST_BE.get(kind.split("_")[0], accepted)
    return InputError(".".join(names), value, accepted)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    annotated = getattr(annotation, "annotation", annotation)
    if isinstance(annotated, type) and issubclass(annotated, BaseModel):
        yield annotated
    for inner in get_args(annotated):
        yield from _models(inner)
