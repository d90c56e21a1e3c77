"""Write options, keyword arguments and docs/reference from the code: `python -m tools.make_reference`."""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import MagicMock

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import xgpt
from tools.fields import descriptions, reachable
from tools.make_schema import OUTPUTS
from tools.request_options import keywords_pyi, options_json
from xgpt import api
from xgpt.cli import COMMANDS
from xgpt.cli import commands as declared
from xgpt.core.schema import ModelSpec, Plan, Profile
from xgpt.core.schema.fleet import FleetPlan
from xrunner.server.observe.metrics import Metrics

ROOT = Path(__file__).parent.parent
TITLES = {"Args": "Arguments", "Yields": "Yields", "Raises": "Errors"}
OF_A_MODEL = tuple(reachable(ModelSpec))
EXIT_CODES = """| exit code | meaning |
|---|---|
| 0 | done |
| 1 | infeasible; the message names bounds that can be kept |
| 2 | bad input: a field, its value, and what is accepted |
| 3 | the machine cannot do it: devices, memory, a port |
| 4 | internal error; `XGPT_TRACEBACK=1` shows where |
| 130 | interrupted; a server has then finished its running requests (0 after SIGTERM) |

An error is one line on standard error. With `--json`, standard output carries one JSON document and nothing else; its
JSON schema: {schemas}."""


def metrics() -> str:
    """Return the page on a server's metrics, as its code declares them."""
    watch = MagicMock()
    watch.plan.constraint.counts_from = "arrival"
    declared_metrics = Metrics(MagicMock(), watch)
    declared_metrics.tell_lost_steps(lambda: 0.0)
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | {family.documentation} |"
        for family in declared_metrics.families()
    ]
    head = "Generated from the server's code. `/metrics` shows these metrics in Prometheus's text format."
    return "\n".join(["# Metrics", "", head, "", "| metric | type | meaning |", "|---|---|---|", *rows, ""])


def commands() -> str:
    """Return the page on the command line: each command's help, arguments and options."""
    schemas = ", ".join(f"[{name}](schemas/{name}.json)" for name in OUTPUTS)
    parts = ["# Commands", "Generated from the command line's own help.", EXIT_CODES.format(schemas=schemas)]
    said: dict[str, str] = {}
    for name in COMMANDS:
        command = getattr(declared, name)
        context = click.Context(command, info_name=f"xgpt {name}")
        parts += [f"## xgpt {name}", _help(command.help or ""), f"```\n{_usage(command, context)}\n```"]
        rows = {_option(each, context): each.opts[-1] for each in command.params if isinstance(each, click.Option)}
        own = [row for row in rows if row not in said]
        parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *own]))
        parts += [
            f"As in [{first}](#{first.replace(' ', '-')}): "
            + ", ".join(f"`{option}`" for row, option in rows.items() if said.get(row) == first)
            for first in dict.fromkeys(said[row] for row in rows if row in said)
        ]
        said = dict.fromkeys(own, f"xgpt {name}") | said
    return "\n\n".join(parts) + "\n"


def _usage(command: click.Command, context: click.Context) -> str:
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def _help(text: str) -> str:
    """Return click's help as Markdown. Paragraphs whose lines click does not rewrap become blocks of code."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if lines and lines[0].strip() == "\b":
            title, *rest = [line.rstrip() for line in lines[1:]]
            paragraphs.append(
                f"{title.strip()}\n\n```\n" + "\n".join(line.strip() for line in rest if line.strip()) + "\n```"
            )
        else:
            paragraphs.append(_escaped(" ".join(line.strip() for line in lines)))
    return "\n\n".join(paragraphs)


def _option(option: click.Option, context: click.Context) -> str:
    names = " / ".join(f"`{name}`" for name in option.opts)
    takes = "" if option.is_flag else f" {_escaped(option.make_metavar(context))}"
    help_, _, default = (option.help or "").rstrip().partition("  [default: ")
    if option.required:
        default = "required"
    elif not default and not option.is_flag and isinstance(option.default, str | int | float):  # not unset
        default = str(option.default)
    return f"| {names}{takes} | {_escaped(default.rstrip(']'))} | {_escaped(help_)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def files() -> str:
    """Return the page on every type of plan.json, profile.json and fleet.json, field by field."""
    parts = [
        "# Files",
        "Generated from the types that read and write them. The JSON schema of plan.json is "
        "`configs/schema/plan.schema.json`; it also has the fields of a model (`ModelSpec`), which are read from its "
        "config.json. Unknown fields, NaN and infinities are refused.",
    ]
    seen = list(OF_A_MODEL)
    for title, root in (("plan.json", Plan), ("profile.json", Profile), ("fleet.json", FleetPlan)):
        parts.append(f"## {title}")
        for model in reachable(root, seen):
            parts += [f"### {model.__name__}", _docstring(model), _fields(model)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _docstring(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").partition("Attributes:")[0].strip().replace("\n    ", "\n")


def _fields(model: type[BaseModel]) -> str:
    said = descriptions(model)
    rows = [
        f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {_escaped(said.get(name, ''))} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " \\| ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " \\| ".join(_type(argument) for argument in arguments)
    if annotation is type(None):
        return "null"
    if origin is dict:
        return f"object of {_type(arguments[1])}"
    if origin in (tuple, list):
        inner = [argument for argument in arguments if argument is not ...]
        inner_types = ", ".join(_type(argument) for argument in inner)
        return f"list of {inner_types}" if len(inner) < len(arguments) or origin is list else f"[{inner_types}]"
    if annotation in OF_A_MODEL:
        return f"`{annotation.__name__}`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {int: "integer", float: "number", str: "string", bool: "boolean"}.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined or isinstance(field.default, BaseModel):
        return "empty"
    return "null" if field.default is None else f"`{field.default}`"


def python() -> str:
    """Return the page on the Python API: each function's purpose, example, arguments and errors."""
    parts = [
        "# Python",
        "Generated from the docstrings of `xgpt.api`. Keyword arguments are the command line's options by "
        "their names in Python; those after `*` can only be given by keyword. [Examples](../examples.md).",
        "Errors are subclasses of `xgpt.XgptError`: `InputError` (bad input), `InfeasibleError` (no plan keeps the "
        "bounds) and `MachineError` (the machine cannot do it).",
    ]
    said: dict[str, str] = {}
    for name in (name for name in xgpt.__all__ if not name.endswith("Error")):
        function = getattr(api, name)
        text, *sections = re.split(r"\n\n(Args|Yields|Raises):\n", inspect.getdoc(function) or "")
        parts += [f"## {name}", f"`xgpt.{name}{_signature(function)}`", _paragraphs(text)]
        titled = zip(sections[::2], sections[1::2], strict=True)
        parts += [f"{TITLES[title]}:\n\n{_entries(lines, name, said)}" for title, lines in titled]
    return "\n\n".join(parts) + "\n"


def _signature(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    positional = [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    return f"({', '.join([*positional, *(['*, ...'] if len(positional) < len(parameters) else [])])})"


def _paragraphs(text: str) -> str:
    """Return a docstring as Markdown: indented blocks and sessions become blocks of code."""
    found = []
    for paragraph in text.split("\n\n"):
        is_code = paragraph.startswith((">>> ", "    "))
        found.append(
            f"```python\n{textwrap.dedent(paragraph)}\n```" if is_code else _escaped(" ".join(paragraph.split()))
        )
    return "\n\n".join(found)


def _entries(lines: str, function: str, said: dict[str, str]) -> str:
    """Return the entries of a docstring's section as a list. What an earlier function says is named there only."""
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", textwrap.dedent(lines))]
    own = [entry.partition(": ") for entry in entries if entry not in said]
    found = [f"- `{name}`: {_escaped(text)}" for name, _, text in own]
    for first in dict.fromkeys(said[entry] for entry in entries if entry in said):
        names = ", ".join(f"`{entry.partition(': ')[0]}`" for entry in entries if said.get(entry) == first)
        found.append(f"- as in [{first}](#{first}): {names}")
    said |= {entry: function for entry in entries if entry not in said}
    return "\n".join(found)


def examples() -> str:
    """Return the page on every file of examples/ and its purpose."""
    parts = ["# Examples", "Each example is a file of `examples/` that runs as it is: `python examples/what_if.py`."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        docstring, code = path.read_text().removeprefix('"""').split('"""', 1)
        parts += [f"## {path.name}", _escaped(" ".join(docstring.split())), f"```python\n{code.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


PAGES = {
    "reference/commands.md": commands,
    "reference/files.md": files,
    "reference/metrics.md": metrics,
    "reference/python.md": python,
    "examples.md": examples,
}
"""The pages in docs, and the functions that return them."""


if __name__ == "__main__":
    made_of = {ROOT / "xgpt" / "options.json": options_json(), ROOT / "xgpt" / "keywords.pyi": keywords_pyi()}
    if any(path.read_text() != text for path, text in made_of.items()):
        for path, text in made_of.items():
            path.write_text(text)
        # Importing the command line reads the options.
        os.execv(sys.executable, [sys.executable, "-m", "tools.make_reference"])
    for name, write in PAGES.items():
        (ROOT / "docs" / name).write_text(write())
