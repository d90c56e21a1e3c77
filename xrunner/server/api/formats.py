"""The formats in which models write reasoning and calls of functions, as data.

configs/call_formats.yaml has a row for each format of calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from xgpt.core.io import configs_dir, load_yaml
from xrunner.server.api.tools import MAX_NAME


class Marks(NamedTuple):
    begin: str
    end: str


ALL_MARKS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<mm:think>", "</mm:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|channel>thought\n", "<channel|>"),
)
"""DeepSeek, Qwen, GLM, Kimi, MiniMax M2, Nemotron, OLMo and most others; Mistral; Seed-OSS; MiniMax M3;
Command A; Gemma 4."""

SPACE = r"[ \t\r\n]{0,16}"
CODES = {
    "%n": rf"(?P<name>[A-Za-z0-9_.\-]{{1,{MAX_NAME}}})",
    "%i": r"(?P<id>[A-Za-z0-9_.:\-]{1,64})",
    "%k": r"(?P<key>[^<>\"/\n][^<>\"\n]{0,255})",
    "%q": r"(?P<key>[^\"\n]{1,256})",
    "%a": r"(?P<attribute>[^<>\n]{0,32})",
    "%m": r"\w{1,32}",
    "%v": r"[^\"\\]{0,256}",
    "%_": SPACE,
    "%-": SPACE,
}
"""In a pattern: a function's name, a call's id, a parameter's name (%q: in quotes) and its attribute, a member's name
and its text, and white space that is optional and that models usually write (%_) or leave out (%-)."""


class Pattern(NamedTuple):
    """A pattern as regular expressions: for the whole, and for any beginning of it."""

    whole: re.Pattern[str]
    partial: re.Pattern[str]


def pieces(pattern: str) -> list[str]:
    return re.findall(r"%[nikqamv_-]|.", pattern, re.DOTALL)


@lru_cache(maxsize=256)
def compiled(pattern: str, follows: str = "") -> Pattern:
    """Return a pattern as regular expressions. `follows`: the expression of the text that must follow."""
    parts = [CODES.get(piece) or re.escape(piece) for piece in pieces(pattern)]
    partial = ""
    for part in reversed(parts):
        partial = f"(?:{re.sub('[?]P<[a-z]+>', '?:', part)}{partial})?"
    return Pattern(re.compile("".join(parts) + follows), re.compile(partial))


@dataclass(frozen=True, slots=True)
class Opening:
    """A way to begin a call.

    Attributes:
        head: pattern of the text from the call's beginning to its arguments.
        tags: for arguments that are parameters between tags: the tags around a value.
        inner: a tag that may follow the first one. Some models leave it out.
        quotes: for arguments that are keys and values in another notation than JSON: its quotes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    head: str
    close: str = ""
    tags: tuple[str, ...] = ()
    inner: str = ""
    quotes: tuple[str, ...] = ()

    @property
    def pattern(self) -> Pattern:
        if self.tags:
            return compiled(f"{self.head}%-", r"(?=[<\]])")
        return compiled(self.head, r"(?=\{)" if self.has_json else "")

    @property
    def has_json(self) -> bool:
        return not (self.tags or self.quotes)

    @property
    def is_object(self) -> bool:
        return self.head.startswith("{")

    def filled(self, name: str) -> str:
        """Return the text before the arguments in a call of a function, as models usually write it."""
        return re.sub(r"%[n_-]", lambda code: {"%n": name, "%_": " ", "%-": ""}[code[0]], self.head)


def objects(*keys: str) -> tuple[Opening, ...]:
    """Return the beginnings of calls that are objects. `keys`: the names of the member with the arguments."""
    kinds = ('"name"', '"type"%-:%_"function"%-,%_"name"', '"function"')
    return tuple(Opening(f'{{%-{kind}%-:%_"%n"%-,%_"{key}"%-:%_', close="}") for kind in kinds for key in keys)


MEMBER = compiled(',%_"%m"%-:%_"%v"')
"""A member after the arguments in a call's object, such as an id."""
OBJECTS = objects("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls.

    Attributes:
        found: texts, all of which are in a chat template or among the tokens of a checkpoint with this format.
        begins: texts with which calls may begin. Without one, only calls of declared functions are recognised: if
            `begins` has texts, only objects with which an answer begins.
        around: texts around several calls, which are never text of the answer.
        openings: ways to begin a call after that, and to begin a further one. The first is the usual one.
        objects: if calls may be JSON objects, the names of the member with the arguments.
        is_list: whether calls stand in brackets, with commas between them.
        short_ids: whether templates accept only ids of nine letters or digits.
        special: ids of the tokens with which the format's texts are written.
        free: ids of tokens that are not text. A model may write each of them anywhere."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    families: str
    found: tuple[str, ...]
    begins: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    openings: tuple[Opening, ...] = ()
    objects: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_list: bool = False
    short_ids: bool = False
    on_channels: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    free: frozenset[int] = frozenset()

    def written_with(self, added: Mapping[str, int]) -> CallFormat:
        """Return the format for a tokenizer that has these tokens which are not text."""
        texts = [*self.begins, *self.ends]
        texts += (
            text for each in self.openings for text in (each.head, each.close, *each.quotes, *each.tags, each.inner)
        )
        found = {token: id_ for token, id_ in added.items() if any(token in text for text in texts)}
        return replace(self, special=found, free=frozenset(added.values()))

    def within(self, vocab_size: int) -> CallFormat:
        """Return the format for a model whose logits cover only the first `vocab_size` tokens."""
        return replace(self, free=frozenset(token for token in self.free if token < vocab_size))

    @property
    def bare(self) -> Opening:
        """Return how a call begins that is an object without marks."""
        return next((each for each in self.openings if each.is_object and "%i" not in each.head), OBJECTS[0])

    @property
    def after(self) -> tuple[str, ...]:
        """Return the texts that may follow a call, each at most once."""
        return (*dict.fromkeys(each.close for each in self.openings if each.close), *self.ends, *(",]" * self.is_list))


MESSAGE = "<|message|>"
HERMES = "Hermes"


@cache
def call_formats() -> dict[str, CallFormat]:
    """Return the formats of configs/call_formats.yaml by the first of their families."""
    found = load_yaml(configs_dir() / "call_formats.yaml", "call_formats")
    rows = TypeAdapter(tuple[CallFormat, ...]).validate_python(found)
    formats = (replace(each, openings=(*each.openings, *objects(*each.objects))) for each in rows)
    return {each.families.partition(",")[0]: each for each in formats}


def call_format(template: str, tokens: Collection[str] = ()) -> CallFormat | None:
    """Return the format that a chat template describes or, if it describes none, that the tokens show."""
    formats = call_formats()
    tried = [(each, tokens) for each in formats.values() if each.on_channels]
    tried += [(each, place) for place in (template, tokens) for each in formats.values() if not each.on_channels]
    found = next((each for each, place in tried if all(text in place for text in each.found)), None)
    return formats["Llama 3.1 and later"] if found is None and '"parameters": dictionary' in template else found


def marks_of(template: str, tokens: Collection[str]) -> Marks | None:
    return next((m for m in ALL_MARKS if m.end in template or (m.begin.strip() in tokens and m.end in tokens)), None)


class Thought(NamedTuple):
    """The marks of the reasoning with which an output may begin.

    Attributes:
        is_open: whether the prompt ends within reasoning. The output then continues the reasoning."""

    marks: Marks
    is_open: bool


def thought_after(prompt: str, marks: Marks | None) -> Thought | None:
    """Return the reasoning with which the output after a prompt may begin, or None if it begins without reasoning."""
    if marks is None or (end := prompt.rstrip()).endswith(marks.end):
        return None
    return Thought(marks, end.endswith(marks.begin.rstrip()))
