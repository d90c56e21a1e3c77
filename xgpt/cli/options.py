"""Make each command's options from the fields of its request in `xgpt.requests`. Help lists options in groups."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from xgpt.cli.values import KINDS, Decimal, Whole
from xgpt.core.errors import InputError

if TYPE_CHECKING:
    from xgpt.core.io import ConfigKind
    from xgpt.core.output_files import OutputFile


F = TypeVar("F", bound=Callable[..., Any])
FILES = dict.fromkeys(("serve", "export", "ui", "doctor"), "plain") | {
    "compare": "compare",
    "check": "loop",
    "tune": "loop",
    "watch": "loop",
    "completion": "completion",
}
"""By command: the file that runs it instead of run.py. These commands need fewer or more imports."""
OUTPUT = "Output"
"""Group of the options that are not fields of a request."""
RESEARCH = "Research"
"""The last group: `xgpt.requests.RESEARCH`."""


@cache
def _declared() -> dict[str, list[dict[str, Any]]]:
    """Return the fields of each command's request, from the generated file options.json."""
    found: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).parents[1].joinpath("options.json").read_bytes())
    return found


class RequestOption(click.Option):
    """An option that is a field of the command's request."""

    group = OUTPUT


class Command(click.Command):
    """A command whose help lists options in groups, the most used options first."""

    most_used: tuple[str, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(self.group_of(param), []).append(record)
        for group, records in groups.items():
            with formatter.section(f"{group} options" if len(groups) > 1 else "Options"):
                formatter.write_dl(records)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        groups = [self.group_of(param) for param in self.params]
        first = ["Most used", *(group for group in groups if group != RESEARCH), OUTPUT, RESEARCH]
        ranks = {group: rank for rank, group in enumerate(dict.fromkeys(first))}
        return sorted(super().get_params(ctx), key=lambda param: ranks.get(self.group_of(param), len(ranks)))

    def group_of(self, param: click.Parameter) -> str:
        return "Most used" if param.name in self.most_used else getattr(param, "group", OUTPUT)


def command(name: str, most_used: tuple[str, ...] = ()) -> Callable[[F], Command]:
    """Return a decorator that makes a command with the options of the command's request. The command calls the function
    `name` in the module that runs it.

    Args:
        most_used: further options that help lists first. They are not fields of the request.
    """

    def make(function: F) -> Command:
        fields = _declared().get(name, [])
        flags = {field["name"]: field["flag"] for field in fields if field["flag"]}
        for field in reversed([field for field in fields if field["flag"]]):
            function = _option(field, flags)(function)
        decorated = click.command(name, cls=Command)(function)
        decorated.callback = partial(_run, name)
        decorated.most_used = most_used
        return decorated

    return make


def _run(name: str, **params: Any) -> Any:
    file = FILES.get(name, "run")
    return getattr(importlib.import_module(f"xgpt.cli.{file}"), name)(**params)


def _option(field: dict[str, Any], flags: dict[str, str]) -> Callable[[F], F]:
    text = fields_as_options(field["text"], flags)
    settings: dict[str, Any] = {"default": field["default"], "metavar": field["metavar"] or None}
    if field["type"]["kind"] == "flag":
        settings = {"is_flag": True, "default": field["default"], "flag_value": not field["default"]}
        settings["show_default"] = False
        if field["default"]:
            text = f"Do not {text[0].lower()}{text[1:]}"
    else:
        settings["type"] = _type(field["type"])
    if field["unset"]:
        text += f"  [default: {fields_as_options(field['unset'], flags)}]"
    if field["is_repeatable"]:
        settings |= {"multiple": True, "default": None}
    if field["type"]["kind"] in ("held", "assigned"):
        settings["callback"] = lambda context, option, pairs: dict(pairs)
    if field["name"] == "latency_bound_s":
        settings["callback"] = _is_bounded
    if field["names"]:
        settings["shell_complete"] = _names(field["names"])
    if field["is_required"]:
        settings["required"] = True
        del settings["default"]  # click would count a default of None as a given value
    add = click.option(field["flag"], field["name"], cls=RequestOption, help=text, **settings)

    def add_in_group(function: F) -> F:
        function = add(function)
        function.__click_params__[-1].group = field["group"]  # type: ignore[attr-defined]
        return function

    return add_in_group


def _type(field: dict[str, Any]) -> Any:
    kind, limits = field["kind"], {name: value for name, value in field.items() if name != "kind"}
    match kind:
        case "text":
            return str
        case "choice":
            return click.Choice(field["choices"])
        case "whole":
            return Whole(**limits)
        case "decimal":
            return Decimal(**limits)
    return KINDS[kind]


def fields_as_options(text: str, flags: dict[str, str]) -> str:
    """Return a text with fields written as options: --sla for `sla`, and --sla request for `sla=request`."""

    def option(match: re.Match[str]) -> str:
        name, _, value = match[1].partition("=")
        return " ".join(filter(None, (flags[name], value))) if name in flags else match[0]

    return re.sub(r"`([a-z_]+(?:=[^`]*)?)`", option, text)


def given() -> dict[str, Any]:
    """Return the values that the user gave for fields of the running command's request."""
    context = click.get_current_context()
    options = [param.name for param in context.command.params if isinstance(param, RequestOption)]
    default = click.core.ParameterSource.DEFAULT
    return {str(name): context.params[name] for name in options if context.get_parameter_source(name) is not default}


def _names(kind: ConfigKind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a function with which a shell completes the names of shipped configs, and files."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from xgpt.core.io import config_names

        found = [CompletionItem(name) for name in config_names(kind) if name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]

    return complete


def _is_bounded(context: click.Context, option: click.Parameter, bound_s: float | None) -> float | None:
    """Return the latency bound, after checking that some bound is given: this one or another."""
    parts = [context.params.get(name) for name in ("ttft_s", "tpot_s", "session_wait_s", "session_time_s")]
    is_given = context.get_parameter_source("latency_bound_s") is not click.core.ParameterSource.DEFAULT
    has_plan = any(param.name == "plan" for param in context.command.params)  # whose bounds then count
    if not (is_given or has_plan or context.resilient_parsing) and all(part is None for part in parts):
        raise click.UsageError(
            "Missing option '--latency-bound'; give it in seconds, or give --ttft or --tpot", context
        )
    return bound_s


def refuse_idle(names: Collection[str], accepted: str) -> None:
    """Check that the user gave none of the running command's options in `names`. They would have no effect.

    Args:
        accepted: end of the error message: what the options need to have an effect.

    Raises:
        InputError: such an option was given.
    """
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise InputError(name, context.params[name], accepted)


explain_option = click.option(
    "--explain", is_flag=True, help="Also print the proof, ranges, other policies' plans, and the profile."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


WRITTEN = ("output", "engine_output", "calibrate", "timeline", "step_log")
"""Parameters with paths that a command writes. All other paths are read."""

force_option = click.option(
    "--force", is_flag=True, help="Overwrite any file, even one that xgpt did not write or that this command reads."
)


def output_option(text: str, default: str | None = None, metavar: str = "FILE") -> Callable[[F], F]:
    """Return a decorator that adds -o and --force."""

    def add(command: F) -> F:
        return click.option("-o", "--output", default=default, metavar=metavar, help=text)(force_option(command))

    return add


def output_file(path: str | Path, name: str = "output") -> OutputFile:
    """Check now whether the running command can later write to `path`, and return the file to write.

    Raises:
        InputError: the command would overwrite a file of the user or a file that it reads, and --force is not given.
        MachineError: the path cannot be written.
    """
    file = unchecked_file(path, name)
    file.check()
    return file


def unchecked_file(path: str | Path, name: str = "output") -> OutputFile:
    """Return the file that the running command will write to `path`. Whether it can be written is checked only then.

    Raises:
        InputError: `path` is "-", which means standard output in other tools.
    """
    from xgpt.core.output_files import OutputFile

    if str(path) == "-":
        raise InputError(name, "-", "give a file, or --json to print its content instead")
    params = click.get_current_context().params
    inputs = (text for key, value in params.items() if key not in WRITTEN for text in _texts(value))
    return OutputFile(Path(path), name, force=params["force"], inputs=inputs)


def write(file: OutputFile, text: str) -> None:
    """Write a file, and print its path on standard error.

    Raises:
        XgptError: as `OutputFile.write` does.
    """
    file.write(text)
    click.echo(f"wrote {file.path}", err=True)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield value.rpartition("=")[0]  # CLUSTER=PRICE
        yield from (part.rpartition("=")[0] for part in value.split(",") if "," in value)
    elif isinstance(value, Iterable):
        for part in value:
            yield from _texts(part)
