"""Turn chats into prompts: the checkpoint's own template, rendered as Hugging Face's tokenizers render it."""

from __future__ import annotations

import ctypes
import datetime
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xgpt.core.errors import InputError
from xrunner.server.api.call_formats import call_format

Message = dict[str, Any]

RENDER_S = 10.0
"""Seconds in which a template must render a chat."""
MAX_PRODUCT = 1 << 20
"""Largest number of items of a repeated text or list, and of bits of a power, in a template."""


class ChatTemplate:
    """A compiled template, in a sandbox, since it comes with the checkpoint and is not trusted.

    Args:
        source: Jinja.
        special_tokens: their text, by the names that the template uses (bos_token, ...).

    Raises:
        InputError: it is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError("chat_template", error.name or "", f"line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, TypeError, SyntaxError) as error:  # of what Jinja makes of it, or Python
            raise InputError("chat_template", "", f"it cannot be compiled: {type(error).__name__}") from None
        self._special_tokens = special_tokens or {}
        self.call_format = call_format(source)

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = True, variables: dict[str, Any] | None = None
    ) -> str:
        """Return the prompt, special tokens written out.

        Args:
            variables: further variables of the template.

        Raises:
            ValueError: the template refuses the messages, in its own words.
        """
        given = {"tools": None, "documents": None} | (variables or {}) | self._special_tokens
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            with _limited(RENDER_S):
                return self._template.render(given)
        except Exception as error:  # the template may fail in any way on messages it was not written for
            raise ValueError(str(error) or type(error).__name__) from None


def load_chat_template(checkpoint: Path) -> ChatTemplate | None:
    """Return the template of a checkpoint directory (chat_template.jinja, or in tokenizer_config.json), or None.

    Raises:
        InputError: a file cannot be read, or the template is not valid.
    """
    config = _read_config(checkpoint / "tokenizer_config.json")
    path = checkpoint / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("chat_template", str(path), f"it cannot be read: {error}") from None
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        raise InputError("chat_template", type(source).__name__, "it must be a text, or a list of named templates")
    written = {name: _written(token) for name, token in config.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: token for name, token in written.items() if token is not None})


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("tokenizer_config", str(path), f"it cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError("tokenizer_config", str(path), "it must hold a JSON object")
    return config


def _written(token: object) -> str | None:
    """Return a special token's text: it is a string, or an object with its content among its options."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, indent=indent, **({"ensure_ascii": False} | options))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which no product of numbers, or of a text and a number, can fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            size = abs(right) * left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
        else:
            size = _size(left) * _size(right)
        if size > MAX_PRODUCT:
            raise jinja2.TemplateError(f"a product of {size} items or bits is more than {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)


def _size(value: object) -> int:
    """Return the number of a sequence's items; for a number, its value as a repeat count, or its bits if larger."""
    if isinstance(value, int):
        return max(1, value) if value.bit_length() < 64 else value.bit_length()
    return len(value) if isinstance(value, str | bytes | list | tuple) else 1


class _TooLong(Exception):
    """Raised in a thread that has rendered for too long."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End the block with an exception where it takes longer; a single call into C is ended once it returns."""
    thread, lock, is_over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _TooLong:
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    finally:
        with lock:
            is_over = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
        timer.cancel()


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what training learns from; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
