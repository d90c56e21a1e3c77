"""Chats to prompts: the checkpoint's own template, rendered as Hugging Face's tokenizers render it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xgpt.errors import InputError

Message = dict[str, Any]


class ChatTemplate:
    """A compiled template, in a sandbox: it comes with the checkpoint, so it is not to be trusted.

    Args:
        source: Jinja.
        special_tokens: what the template calls them (bos_token, ...), and how they are written.

    Raises:
        InputError: it is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError("chat_template", error.name or "", f"line {error.lineno}: {error.message}") from None
        self._special_tokens = special_tokens or {}

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = True, variables: dict[str, Any] | None = None
    ) -> str:
        """The prompt, special tokens written out.

        Args:
            variables: what else the template shall see.

        Raises:
            ValueError: the template refuses the messages, in its own words.
        """
        given = {"tools": None, "documents": None} | (variables or {}) | self._special_tokens
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(given)
        except Exception as error:  # whatever: it was not written for such messages
            raise ValueError(str(error) or type(error).__name__) from None


def load_chat_template(checkpoint: Path) -> ChatTemplate | None:
    """The template of a checkpoint directory (chat_template.jinja, or in tokenizer_config.json), or None.

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
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    written = {name: _written(token) for name, token in config.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: token for name, token in written.items() if token is not None})


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError("tokenizer_config", str(path), f"it cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError("tokenizer_config", str(path), "it must hold a JSON object")
    return config


def _written(token: object) -> str | None:
    """A special token is a string, or an object with its content beside its options."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML; a prompt is no HTML."""
    return json.dumps(value, indent=indent, **({"ensure_ascii": False} | options))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what training learns from; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
