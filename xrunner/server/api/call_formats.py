"""Read function calls that models write in free text, in the formats that chat templates describe.

A format provides grammar rules (Lark, as llguidance reads it) for the text after its trigger, and a reader of this
text. If the tokenizer has special tokens for a format's marks, the grammar refers to them by id, and outputs show them
as text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from xrunner.grammar import any_of, json_rule, opened_grammar, tagged_grammar
from xrunner.server.api.tools import MAX_NAME

Schemas = Mapping[str, dict[str, Any]]
"""JSON schemas of functions' arguments, by the functions' names."""


class Call(NamedTuple):
    """A function call. `arguments` is JSON text."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """A format in which a model writes calls within free text.

    Attributes:
        trigger: text with which calls begin. One or more calls follow.
        marks: texts for which a tokenizer may have special tokens.
        special: ids of the tokenizer's special tokens for these marks.
        free: ids of tokens that are not text. A model may write each of them anywhere.
        arguments: name of the member of a call's JSON object that holds the arguments.
    """

    trigger: str
    marks: tuple[str, ...] = ()
    arguments: str = "arguments"
    special: Mapping[str, int] = field(default_factory=dict)
    free: frozenset[int] = frozenset()

    def written_with(self, added: Mapping[str, int]) -> Self:
        """Return the format for a tokenizer that has these special tokens."""
        found = {mark: added[mark] for mark in self.marks if mark in added}
        return replace(self, special=found, free=frozenset(added.values()))

    def within(self, vocab_size: int) -> Self:
        """Return the format for a model whose logits cover only the first `vocab_size` tokens."""
        return replace(self, free=frozenset(token for token in self.free if token < vocab_size))

    def grammar(self, schemas: Schemas) -> str:
        """Return the grammar of text that may contain calls."""
        trigger = self.special.get(self.trigger, self.trigger)
        return tagged_grammar(trigger, self.rules(schemas), self.free - {trigger})

    def call(self, schemas: Schemas) -> str:
        """Return the rule `answer` for an output that is one call's object without marks."""
        return f"answer: {any_of(self.opened(schemas))}\n"

    def answer(self, schemas: Schemas | None, formatted: dict[str, Any]) -> str:
        """Return the rule `answer` for an output that is a JSON value of the schema `formatted` or, with `schemas`,
        calls.
        """
        value = f"answer: {json_rule(formatted)}"
        return f"{value}\n" if schemas is None else f"{value} | calls\n{self.only(schemas)}"

    def only(self, schemas: Schemas) -> str:
        """Return the rule `calls` for calls with their marks, and the rules that it needs."""
        return f"calls: ({self.terms(self.trigger)} called)+\n{self.rules(schemas)}\n"

    def rules(self, schemas: Schemas) -> str:
        """Return the rule `called` for the text after the trigger, and the rules that it needs."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """Return whether a call can be read while it is written, because its object begins with the name
        (`call_reader.Calls`).
        """
        return False

    @abstractmethod
    def read(self, text: str) -> tuple[list[Call], int] | None:
        """Return the tool calls at the beginning of `text`, and the index in `text` where they end. Return None if no
        valid call is there. `text` starts with the trigger.
        """

    def begin(self, name: str) -> str:
        """Return the part of a call's object before its arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '

    def opened(self, schemas: Schemas) -> Schemas:
        """Return the schema of each function's arguments, by the text that precedes the arguments in a call."""
        return {self.begin(name): schema for name, schema in schemas.items()}

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def call_of(self, found: Any) -> Call | None:
        """Return the call in a JSON value, or None if it is not a call."""
        match found:
            case {"name": str(name), **rest} if self.arguments in rest and _is_unicode(name):
                id_ = rest.get("id")
                id_ = id_ if isinstance(id_, str) and _is_unicode(id_) else self.new_id()
                return Call(name, _written(rest[self.arguments]), id_)
        return None

    def call_in(self, text: str) -> Call | None:
        """Return the call in a text of JSON, or None if it is not a call."""
        try:
            return self.call_of(json.loads(text))
        except (ValueError, RecursionError):
            return None

    def terms(self, text: str) -> str:
        """Return a text as Lark terms, with its marks as the tokenizer's special tokens."""
        if not self.special:
            return json.dumps(text)
        marks = "|".join(map(re.escape, self.special))
        pieces = [piece for piece in re.split(f"({marks})", text) if piece]
        return " ".join(
            f"<[{self.special[piece]}]>" if piece in self.special else json.dumps(piece) for piece in pieces
        )


@dataclass(frozen=True, slots=True)
class ObjectCalls(CallFormat):
    """A format in which a call is the text `mark`, an object with the name and the arguments, and the text `closing`.
    The trigger is the mark or, without one, the beginning of the object.
    """

    mark: str = ""
    closing: str = ""

    def grammar(self, schemas: Schemas) -> str:
        """Return the grammar of free text with calls. Once a call has begun, its arguments must follow their schema.

        A mark by itself does not start a call: models also write other text after it.
        """
        return opened_grammar(self.opened(schemas), self.free)

    def only(self, schemas: Schemas) -> str:
        opening, closing = (self.terms(mark) if mark else "" for mark in (self.mark, self.closing))
        # The text is divided into JSON's tokens: longer pieces could not be distinguished from the beginning of an
        # answer that is also an object.
        opened = ((re.findall(r'"[^"]*"|[^"]', self.begin(name)), schema) for name, schema in schemas.items())
        called = " | ".join(f'{" ".join(map(json.dumps, words))} {json_rule(schema)} "}}"' for words, schema in opened)
        return (
            "calls: one_call (GAP? one_call)*\n"
            f"one_call: {opening} GAP? ({called}) {f'GAP? {closing}' if closing else ''}\n"
            "GAP: /[ \\n]{1,8}/\n"
        )

    @property
    def streams(self) -> bool:
        return True

    def read(self, text: str) -> tuple[list[Call], int] | None:
        closing = self.closing
        if closing:
            end = text.find(closing)
            call = self.call_in(text[len(self.trigger) : end]) if end > 0 else None
        else:
            _, end = _json_at(text, 0)
            call = self.call_in(text[:end]) if end > 0 else None
        return None if call is None else ([call], end + len(closing))


ID = "[a-zA-Z0-9]{9}"
"""Pattern of the ids that Mistral's templates accept."""


class _MistralIds(CallFormat):
    """The parts that Mistral's formats of calls share. Ids have nine letters or digits."""

    __slots__ = ()

    def new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ListedCalls(_MistralIds):
    """Mistral's format before its eleventh tokenizer: `[TOOL_CALLS]`, then a list of objects with name, arguments and
    perhaps an id."""

    def rules(self, schemas: Schemas) -> str:
        opened = [f"{self.terms(self.begin(name))} {json_rule(schema)}" for name, schema in schemas.items()]
        return (
            'called: " "? "[" one_call (", " one_call)* "]"\n'
            f'one_call: opened_call (", \\"id\\": \\"" /{ID}/ "\\"")? "}}"\n'
            f"opened_call: {' | '.join(opened)}"
        )

    def read(self, text: str) -> tuple[list[Call], int] | None:
        found, end = _json_at(text, len(self.trigger))
        calls = [self.call_of(each) for each in found] if isinstance(found, list) else []
        known = [call for call in calls if call is not None]
        return (known, end) if known and len(known) == len(calls) else None


@dataclass(frozen=True, slots=True)
class HeadedCalls(_MistralIds):
    """Mistral's format since its eleventh tokenizer: `[TOOL_CALLS]`, the name, `[ARGS]`, the arguments; then the next
    call.

    Attributes:
        with_ids: `[CALL_ID]` and an id may follow the name.
    """

    with_ids: bool = False

    def rules(self, schemas: Schemas) -> str:
        id_ = f"({self.terms('[CALL_ID]')} /{ID}/)?" if self.with_ids else ""
        called = [
            f"{self.terms(name)} {id_} {self.terms('[ARGS]')} {json_rule(schema)}" for name, schema in schemas.items()
        ]
        return f"called: {' | '.join(called)}"

    def read(self, text: str) -> tuple[list[Call], int] | None:
        head = _HEAD.match(text, len(self.trigger))
        if head is None:
            return None
        arguments, end = _json_at(text, head.end())
        if not isinstance(arguments, dict):
            return None
        return [Call(head[1], _written(arguments), head[2] or self.new_id())], end


_HEAD = re.compile(rf"\s*([A-Za-z0-9_.-]{{1,{MAX_NAME}}})(?:\[CALL_ID\]({ID}))?\[ARGS\]")

HERMES = ObjectCalls("<tool_call>", ("<tool_call>", "</tool_call>"), mark="<tool_call>", closing="</tool_call>")
"""The format of Hermes and Qwen."""
LLAMA = ObjectCalls('{"name": ', arguments="parameters")
"""The format of Llama 3.1 and later, with or without a preceding <|python_tag|>, which is not shown as text."""
MISTRAL_LIST = ListedCalls("[TOOL_CALLS]", ("[TOOL_CALLS]",))
MISTRAL = HeadedCalls("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"))
MISTRAL_IDS = HeadedCalls("[TOOL_CALLS]", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), with_ids=True)


def call_format(template: str) -> CallFormat:
    """Return the format that a chat template describes, or Hermes' if it describes none."""
    if HERMES.trigger in template:
        return HERMES
    if MISTRAL.trigger in template:
        if "[ARGS]" not in template:
            return MISTRAL_LIST
        return MISTRAL_IDS if "[CALL_ID]" in template else MISTRAL
    return LLAMA if "<|python_tag|>" in template or '"parameters": dictionary' in template else HERMES


def _is_unicode(text: str) -> bool:
    """Return whether a text contains no half of a surrogate pair, which JSON can write as \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _written(value: Any) -> str:
    """Return a value as JSON, in which halves of surrogate pairs stay escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_unicode(text) else json.dumps(value)


def _json_at(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value at `begin`, after spaces, and the index of its end, or None and -1 if there is none."""
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, -1
