"""Read outputs in the format of gpt-oss: messages on channels, for reasoning, the answer and calls.

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>final<|message|>Rome.<|return|>
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place":"Rome"}<|call|>

Source: openai-cookbook, articles/openai-harmony.md. OpenAI's own parser reads token ids of its own vocabulary, which it
downloads. This parser reads text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrunner.grammar import json_rule, ranges
from xrunner.server.api.call_formats import Call, CallFormat, Schemas
from xrunner.server.api.call_reader import CallList, overlap
from xrunner.server.api.reasoning import Said
from xrunner.server.api.tools import MAX_NAME

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", START)
"""Tokens that end a message, including those that end an output."""
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS[:3])
OPENINGS = (START, CHANNEL, MESSAGE, " to=", "assistant")
"""Texts with which the head of a message may begin. A text that begins in another way has no head."""
MAX_HEAD = 512
"""Longest head, in characters."""
RECIPIENT = re.compile(rf"to=functions\.([A-Za-z0-9_.-]{{1,{MAX_NAME}}})")


@dataclass(frozen=True, slots=True)
class Harmony(CallFormat):
    """The format of outputs that are messages on channels. Some of these messages are calls of functions."""

    def _mark(self, text: str) -> str:
        return f"<[{self.special[text]}]>"

    def read(self, text: str) -> tuple[list[Call], int] | None:
        """Not implemented, since `HarmonyReader` reads the calls."""
        raise NotImplementedError

    def grammar(self, schemas: Schemas) -> str:
        return (
            "start: (tag | other)* TEXT\n"
            f"other: TEXT <[{ranges(self.free)}]>\ntag: to_function name\n"
            'to_function[lazy]: TEXT "to=functions."\nTEXT: /(.|\\n)*/\n' + self._names(schemas)
        )

    def call(self, schemas: Schemas) -> str:
        return self._answer(schemas, None)

    def answer(self, schemas: Schemas | None, formatted: dict[str, Any]) -> str:
        return self._answer(schemas, formatted)

    def _answer(self, schemas: Schemas | None, formatted: dict[str, Any] | None) -> str:
        """Return the rule for an output: messages of reasoning, then a call or a formatted answer."""
        ways = []
        if schemas:
            ways.append(f'{self._mark(CHANNEL)} "commentary to=functions." name')
        if formatted is not None:
            constrained = f'(" "? {self._mark(CONSTRAIN)} "json")?'
            shown = f'{self._mark(CHANNEL)} "final" {constrained} {self._mark(MESSAGE)} {json_rule(formatted)}'
            ways.append(shown)
        analysis = f'analysis: {self._mark(CHANNEL)} "analysis" {self._mark(MESSAGE)} TEXT {self._mark(END)}'
        analysis += f' {self._mark(START)} "assistant"'
        rules = f"answer: analysis* ({' | '.join(ways)})\n{analysis}\nTEXT: /(.|\\n)*/\n"
        return rules + (self._names(schemas) if schemas else "")

    def _names(self, schemas: Schemas) -> str:
        """Return the rule `name`: the function's name, the rest of the message header, and the arguments."""
        head = f'head: ({self._mark(CHANNEL)} "commentary")? (" "? {self._mark(CONSTRAIN)} "json" | " json")? '
        called = [f"{json.dumps(name)} head {json_rule(schema)}" for name, schema in schemas.items()]
        return f"name: {' | '.join(called)}\n{head}{self._mark(MESSAGE)}\n"


def harmony_of(special: Mapping[str, int]) -> Harmony | None:
    """Return this format if a tokenizer has its tokens, or else None."""
    if not {*MARKS} <= special.keys():
        return None
    return Harmony("", MARKS)


class HarmonyReader:
    """Reads the messages of an output. Text without a message header belongs to the answer.

    Attributes:
        found: the calls so far.

    Args:
        calls: whether function calls are extracted.
        most: largest number of calls. Further calls are left out. None means no limit.
    """

    def __init__(self, format_: Harmony, *, calls: bool, most: int | None = None) -> None:
        self._new_id = format_.new_id
        self._takes_calls = calls
        self._held = ""
        self._in_head = True
        self._shows: str = "text"
        self.found = CallList(most)

    @property
    def is_thinking(self) -> bool:
        """Whether the output is within reasoning now."""
        return not self._in_head and self._shows == "reasoning"

    def push(self, piece: str, *, is_end: bool = False) -> Said:
        """Read a piece of the output. Return the reasoning and the text that may be sent now: the rest if `is_end`."""
        self._held += piece
        said: dict[str, list[str]] = {"reasoning": [], "text": [], "call": []}
        while self._held:
            before = len(self._held), self._in_head
            if self._in_head:
                self._read_head(is_end=is_end)
            else:
                said[self._shows].append(self._body(is_end=is_end))
            if (len(self._held), self._in_head) == before:
                break
        return Said("".join(said["reasoning"]), "".join(said["text"]))

    def _read_head(self, *, is_end: bool) -> None:
        head, found, rest = self._held.partition(MESSAGE)
        if found:
            self._held = rest
            self._begin(head)
        elif (
            is_end
            or len(head) > MAX_HEAD
            or not any(head.startswith(opening) or opening.startswith(head) for opening in OPENINGS)
        ):
            # A head that begins with a mark is no text. What follows a mark in too long a head is.
            begins = next((mark for mark in (START, CHANNEL) if head.startswith(mark)), "")
            self._held = "" if is_end and begins else self._held[len(begins) :]
            self._in_head, self._shows = False, "text"

    def _begin(self, head: str) -> None:
        self._in_head = False
        function = RECIPIENT.search(head)
        channel = head.rpartition(CHANNEL)[2]
        if function is not None and self._takes_calls:
            self._shows = "call"
            self.found.begin(function[1], self._new_id())
        else:
            self._shows = "reasoning" if channel.startswith("analysis") else "text"

    def _body(self, *, is_end: bool) -> str:
        """Read the content of a message, up to its end if that has arrived. Return the text to show."""
        found = [(at, mark) for mark in ENDS if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._held = self._held[:at], self._held[at + (0 if mark == START else len(mark)) :]
            self._in_head = True
        else:
            keep = 0 if is_end else max(overlap(self._held, mark) for mark in ENDS)
            at = len(self._held) - keep
            text, self._held = self._held[:at], self._held[at:]
        if self._shows == "call":
            self.found.append(text)
        return text
