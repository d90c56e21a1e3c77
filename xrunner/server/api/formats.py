"""The formats in which models write reasoning and calls of functions, as data.

A row of `CALL_FORMATS` says which texts show that a checkpoint has the format, what precedes a call, and how the call
begins, holds its arguments and ends. `reader` reads outputs by these rows, and `form` makes grammars from them.

Sources: the chat templates of the named models; openai-cookbook, articles/openai-harmony.md; ai.google.dev,
gemma/docs/functiongemma/formatting-and-best-practices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from xrunner.server.api.tools import MAX_NAME


class Marks(NamedTuple):
    """The marks around a model's reasoning."""

    begin: str
    end: str


ALL_MARKS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|channel>thought\n", "<channel|>"),
)
"""DeepSeek, Qwen, GLM, Kimi, MiniMax, Nemotron, OLMo and most others; Mistral; Seed-OSS; Command A; Gemma 4."""

SPACE = r"[ \t\r\n]{0,16}"
CODES = {
    "%n": rf"(?P<name>[A-Za-z0-9_.\-]{{1,{MAX_NAME}}})",
    "%i": r"(?P<id>[A-Za-z0-9_.:\-]{1,64})",
    "%k": r"(?P<key>[^<>\"\n]{1,256})",
    "%m": r"\w{1,32}",
    "%v": r"[^\"\\]{0,256}",
    "%_": SPACE,
    "%-": SPACE,
}
"""In a pattern: a function's name, a call's id, a parameter's name, a member's name and its text, and white space that
is optional and that models usually write (%_) or leave out (%-)."""


class Pattern(NamedTuple):
    """A pattern as regular expressions: for the whole, and for any beginning of it."""

    whole: re.Pattern[str]
    partial: re.Pattern[str]


def pieces(pattern: str) -> list[str]:
    """Return the codes and characters of a pattern."""
    return re.findall(r"%[nikmv_-]|.", pattern, re.DOTALL)


@lru_cache(maxsize=256)
def compiled(pattern: str, follows: str = "") -> Pattern:
    """Return a pattern as regular expressions. `follows`: the expression of the text that must follow."""
    parts = [CODES.get(piece) or re.escape(piece) for piece in pieces(pattern)]
    partial = ""
    for part in reversed(parts):
        partial = f"(?:{re.sub('[?]P<[a-z]+>', '?:', part)}{partial})?"
    return Pattern(re.compile("".join(parts) + follows), re.compile(partial))


class Tags(NamedTuple):
    """Arguments as parameters with tags around each value. `begin` and `end` are the tags."""

    begin: str
    end: str


class Literals(NamedTuple):
    """Arguments as keys and values between brackets, in a notation that differs from JSON in its quotes and keys."""

    quotes: tuple[str, ...]


PYTHON = Literals(('"', "'"))


@dataclass(frozen=True, slots=True)
class Opening:
    """A way to begin a call.

    Attributes:
        head: pattern of the text from the call's beginning to its arguments.
        arguments: the notation of the arguments. None means a JSON object.
        close: text that ends the call.
    """

    head: str
    arguments: Tags | Literals | None = None
    close: str = ""

    @property
    def pattern(self) -> Pattern:
        if isinstance(self.arguments, Tags):
            return compiled(f"{self.head}%-", "(?=<)")
        return compiled(self.head, r"(?=\{)" if self.arguments is None else "")

    @property
    def is_object(self) -> bool:
        """Return whether the whole call is a JSON object."""
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
        families: who writes it.
        found: texts, all of which are in a chat template or among the tokens of a checkpoint with this format.
        begins: texts with which calls may begin. Without one, only calls of declared functions are recognised.
        openings: ways to begin a call after that, and to begin a further one. The first is the usual one.
        ends: texts that may follow a call.
        is_list: whether calls stand in brackets, with commas between them.
        short_ids: whether templates accept only ids of nine letters or digits.
        on_channels: whether the whole output consists of messages on channels.
        special: ids of the tokens with which the format's texts are written.
        free: ids of tokens that are not text. A model may write each of them anywhere.
    """

    families: str
    found: tuple[str, ...]
    begins: tuple[str, ...]
    openings: tuple[Opening, ...]
    ends: tuple[str, ...] = ()
    is_list: bool = False
    short_ids: bool = False
    on_channels: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    free: frozenset[int] = frozenset()

    def written_with(self, added: Mapping[str, int]) -> CallFormat:
        """Return the format for a tokenizer that has these tokens which are not text."""
        quotes = (
            mark for each in self.openings if isinstance(each.arguments, Literals) for mark in each.arguments.quotes
        )
        texts = [
            *self.begins,
            *self.ends,
            *quotes,
            *(text for each in self.openings for text in (each.head, each.close)),
        ]
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
HARMONY = CallFormat(
    "gpt-oss",
    ("<|start|>", "<|channel|>", MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    ("<|start|>", "<|channel|>"),
    (Opening(f"<|channel|>commentary to=functions.%n <|constrain|>json{MESSAGE}"),),
    ("<|end|>", "<|call|>", "<|return|>"),
    on_channels=True,
)
HERMES = CallFormat("Hermes, Qwen", ("<tool_call>",), ("<tool_call>",), OBJECTS, ("</tool_call>",))
QWEN_CODER = CallFormat(
    "Qwen3-Coder",
    ("<tool_call>", "<function="),
    ("<tool_call>", "<function="),
    (Opening("<function=%n>", Tags("<parameter=%k>", "</parameter>"), "</function>"),),
    ("</tool_call>",),
)
LLAMA = CallFormat(
    "Llama 3.1 and later",
    ("<|python_tag|>",),
    (),
    (*objects("parameters", "arguments"), Opening("[%n(", PYTHON, ")"), Opening("%n(", PYTHON, ")")),
    (";", ",", "]"),
)
MISTRAL_LIST = CallFormat(
    "Mistral before tokenizer v11", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), OBJECTS, is_list=True, short_ids=True
)
MISTRAL = CallFormat(
    "Mistral",
    ("[TOOL_CALLS]", "[ARGS]"),
    ("[TOOL_CALLS]",),
    (Opening("%n[ARGS]%-"), Opening("%n[CALL_ID]%i[ARGS]%-"), Opening("%n%-")),
    short_ids=True,
)
DEEPSEEK = CallFormat(
    "DeepSeek V3, R1",
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    (
        Opening("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%n\n```json\n", close="<｜tool▁call▁end｜>"),
        Opening("<｜tool▁call▁begin｜>%n<｜tool▁sep｜>%-", close="<｜tool▁call▁end｜>"),
    ),
    ("```", "<｜tool▁calls▁end｜>"),
)
CALL_FORMATS = (
    DEEPSEEK,
    CallFormat(
        "Kimi K2",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        tuple(
            Opening(f"<|tool_call_begin|>%-{name}:%i%-<|tool_call_argument_begin|>%-", close="<|tool_call_end|>")
            for name in ("functions.%n", "%n")
        ),
        ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    CallFormat(
        "GLM 4.5 and later",
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        (Opening("%n", Tags("<arg_key>%k</arg_key>%-<arg_value>", "</arg_value>"), "</tool_call>"),),
    ),
    QWEN_CODER,
    CallFormat(
        "Seed-OSS",
        ("<seed:tool_call>",),
        ("<seed:tool_call>",),
        (Opening("<function=%n>", Tags("<parameter=%k>", "</parameter>"), "</function>"),),
        ("</seed:tool_call>",),
    ),
    CallFormat(
        "MiniMax M2",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>",),
        (Opening('<invoke name="%n">', Tags('<parameter name="%k">', "</parameter>"), "</invoke>"),),
        ("</minimax:tool_call>",),
    ),
    HERMES,
    MISTRAL,
    MISTRAL_LIST,
    CallFormat(
        "Gemma 4",
        ("<|tool_call>",),
        ("<|tool_call>",),
        (Opening("call:%n{", Literals(('<|"|>', '"', "'")), "}"),),
        ("<tool_call|>",),
    ),
    CallFormat(
        "FunctionGemma",
        ("<start_function_call>",),
        ("<start_function_call>",),
        (Opening("call:%n{", Literals(("<escape>", '"', "'")), "}"),),
        ("<end_function_call>",),
    ),
    CallFormat(
        "Phi-4-mini, Granite",
        ("<|tool_call|>",),
        ("<|tool_call|>", "<|tool_calls|>", "functools"),
        OBJECTS,
        ("<|/tool_call|>", "<|/tool_calls|>"),
        is_list=True,
    ),
    CallFormat("Nemotron", ("<TOOLCALL>",), ("<TOOLCALL>",), OBJECTS, ("</TOOLCALL>",), is_list=True),
    CallFormat("Hunyuan, Jamba", ("<tool_calls>",), ("<tool_calls>",), OBJECTS, ("</tool_calls>",), is_list=True),
    CallFormat(
        "Command A",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        (Opening('{%-"tool_call_id":%_"%i",%_"tool_name":%_"%n",%_"parameters":%_', close="}"), *OBJECTS),
        ("<|END_ACTION|>",),
        is_list=True,
    ),
    CallFormat(
        "OLMo 3",
        ("<function_calls>",),
        ("<function_calls>",),
        (Opening("%n(", PYTHON, ")"),),
        ("</function_calls>",),
    ),
    CallFormat(
        "LFM2",
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>",),
        (Opening("%n(", PYTHON, ")"),),
        ("<|tool_call_end|>",),
        is_list=True,
    ),
    LLAMA,
)
"""The formats that are recognised by a checkpoint's template or tokens, more special ones first."""


def call_format(template: str, tokens: Collection[str] = ()) -> CallFormat | None:
    """Return the format that a chat template describes or, if it describes none, that the tokens show."""
    if all(token in tokens for token in HARMONY.found):
        return HARMONY
    for place in (template, tokens):
        if (
            found := next((each for each in CALL_FORMATS if all(text in place for text in each.found)), None)
        ) is not None:
            return found
    return LLAMA if '"parameters": dictionary' in template else None


def marks_of(template: str, tokens: Collection[str]) -> Marks | None:
    """Return the marks around a model's reasoning, from its chat template or its tokens, or None if neither has any."""
    return next((m for m in ALL_MARKS if m.end in template or (m.begin.strip() in tokens and m.end in tokens)), None)


class Thought(NamedTuple):
    """The marks of the reasoning with which an output may begin.

    Attributes:
        is_open: whether the prompt ends within reasoning. The output then continues the reasoning.
    """

    marks: Marks
    is_open: bool


def thought_after(prompt: str, marks: Marks | None) -> Thought | None:
    """Return the reasoning with which the output after a prompt may begin, or None if it begins without reasoning."""
    if marks is None or (end := prompt.rstrip()).endswith(marks.end):
        return None
    return Thought(marks, end.endswith(marks.begin.rstrip()))
