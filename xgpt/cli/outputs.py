"""The options for files that commands write, and the lines about them. `xgpt.core.output_files` writes all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from xgpt.core.output_files import OutputFile

F = TypeVar("F", bound=Callable[..., Any])

WRITTEN = ("output", "engine_output", "calibrate", "timeline", "step_log")
"""Parameters with paths that a command writes. It reads all other paths."""

force_option = click.option(
    "--force", is_flag=True, help="Overwrite any file, even one that xgpt did not write or that this command reads."
)


def output_option(text: str, default: str | None = None, metavar: str = "FILE") -> Callable[[F], F]:
    """Return a decorator that adds -o and --force."""

    def add(command: F) -> F:
        return click.option("-o", "--output", default=default, metavar=metavar, help=text)(force_option(command))

    return add


def output_file(path: str | Path, name: str = "output") -> OutputFile:
    """Return the file that the running command will write to `path`, after the checks that are possible before the
    work.

    Args:
        name: the parameter that gave the path.

    Raises:
        InputError: the file belongs to the user or is read by this command, and --force is not given.
        MachineError: the path cannot be written.
    """
    file = unchecked_file(path, name)
    file.check()
    return file


def unchecked_file(path: str | Path, name: str = "output") -> OutputFile:
    """Return the file that the running command will write to `path`. The path is checked when the file is written, not
    before.

    Raises:
        InputError: `path` is "-", which elsewhere means standard output.
    """
    from xgpt.core.errors import InputError
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
