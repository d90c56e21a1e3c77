"""Render chat templates in a process with limited memory. `rendering` starts it as `python sandbox.py`.

Templates come with checkpoints and are not trusted. Jinja's sandbox allows them no files or private attributes. This
module imports no other module of xgpt. Messages are JSON, each preceded by its length in eight bytes."""

from __future__ import annotations

import datetime
import json
import resource
import sys
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 1 << 30
"""Largest address space of the process, in bytes."""


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, indent=indent, **({"ensure_ascii": False} | options))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """Renders {% generation %} ... {% endgeneration %} as its contents, since the tag only marks text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """Return a compiled template. Raises any error of Jinja or Python that its source causes."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the rendered text of a template, or one of three errors. `broken` means that the template cannot be
    compiled, `refused` that it raised an error, `surrogate` that it wrote half of a character."""
    try:
        template = compiled(asked["source"])
    except jinja2.TemplateSyntaxError as error:
        return {"broken": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"broken": f"it cannot be compiled: {type(error).__name__}"}
    try:
        text = template.render(asked["given"])
        text.encode()
    except MemoryError:
        raise
    except UnicodeEncodeError:
        return {"surrogate": True}
    except Exception as error:  # a template may fail in any way on messages for which it was not written
        return {"refused": str(error) or type(error).__name__}
    return {"text": text}


def main() -> None:
    """Answer requests until standard input closes or memory is used up."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    read, write = sys.stdin.buffer, sys.stdout.buffer
    while head := read.read(8):
        is_full = False
        try:
            content = json.dumps(answer(json.loads(read.read(int.from_bytes(head, "little"))))).encode()
        except (MemoryError, RecursionError) as error:
            is_full = isinstance(error, MemoryError)
            says = f"it needs more than {MAX_BYTES >> 20} MiB of memory" if is_full else "it nests too deeply"
            content = json.dumps({"refused": says}).encode()
        write.write(len(content).to_bytes(8, "little") + content)
        write.flush()
        if is_full:
            return


if __name__ == "__main__":
    main()
