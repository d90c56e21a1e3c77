"""Separate a model's reasoning from its answer while the output is generated.

Models write their reasoning between two marks. Most chat templates contain the marks, in order to remove reasoning from
earlier messages. If a template does not, the marks are among the tokenizer's tokens. A template may already begin the
reasoning in the prompt, or both begin and end it. So the prompt shows whether an output begins within reasoning.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, NamedTuple

from xrunner.server.api.call_reader import overlap


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
"""Known marks: DeepSeek, Qwen, GLM, Kimi, MiniMax, Nemotron, OLMo and most others; Mistral; Seed-OSS; Command A; Gemma
4."""
MAX_SPACE = 64
"""Largest number of white-space characters that are held back until other text follows."""


def marks_of(template: str, tokens: Container[str]) -> Marks | None:
    """Return the marks around a model's reasoning, from its chat template or its added tokens. Return None if neither
    has marks.
    """
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


class Said(NamedTuple):
    """The texts that a piece of an output adds to the model's reasoning and to its answer."""

    reasoning: str
    text: str


class ThoughtReader:
    """Extracts reasoning at the beginning of an output, and drops white space next to the marks."""

    def __init__(self, thought: Thought) -> None:
        self._begin, self._end = thought.marks
        self._held = ""
        self._state: Literal["before", "begun", "thinking", "after", "text"] = "begun" if thought.is_open else "before"

    @property
    def is_thinking(self) -> bool:
        """Return whether the output is within reasoning now."""
        return self._state in ("begun", "thinking")

    def push(self, piece: str, *, is_end: bool = False) -> Said:
        """Read a piece of the output. Return the reasoning and the text that may be sent now: the rest if `is_end`."""
        if self._state == "text":
            return Said("", piece)
        self._held += piece
        reasoning = ""
        if self._state == "before":
            rest = self._held.lstrip()
            if rest.startswith(self._begin):
                self._held, self._state = rest[len(self._begin) :], "begun"
            elif is_end or not self._begin.startswith(rest) or len(self._held) > MAX_SPACE:
                self._state = "text"
        if self._state == "begun":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "thinking"
        if self._state == "thinking":
            reasoning = self._thinking(is_end=is_end)
        if self._state == "after":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "text"
        text = ""
        if self._state == "text":
            text, self._held = self._held, ""
        return Said(reasoning, text)

    def _thinking(self, *, is_end: bool) -> str:
        if (at := self._held.find(self._end)) >= 0:
            reasoning, self._held, self._state = self._held[:at], self._held[at + len(self._end) :], "after"
            return reasoning.rstrip()
        if is_end:
            reasoning, self._held = self._held, ""
            return reasoning.rstrip()
        out = self._held[: len(self._held) - overlap(self._held, self._end)]
        if len(shown := out.rstrip()) < len(out) - MAX_SPACE:
            shown = out
        self._held = self._held[len(shown) :]
        return shown
