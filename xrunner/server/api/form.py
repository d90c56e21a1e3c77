"""Describe the form of a chat's output (reasoning, an answer, calls), and provide its grammar and its reader."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xrunner.grammar import whole_grammar
from xrunner.server.api.call_formats import HERMES, CallFormat, Schemas
from xrunner.server.api.call_reader import CallList, Calls
from xrunner.server.api.harmony import Harmony, HarmonyReader, harmony_of
from xrunner.server.api.reasoning import Marks, Said, Thought, ThoughtReader, marks_of, thought_after
from xrunner.server.api.tools import ANY_ARGUMENTS, NO_ARGUMENTS, NamedTool, Tool, ToolChoice, must_call


class ChatReader:
    """Reads reasoning at the beginning of an output, then text with calls in it.

    Attributes:
        found: the calls so far.
    """

    def __init__(self, thought: Thought | None, calls: Calls | None) -> None:
        self._thought = None if thought is None else ThoughtReader(thought)
        self._calls = calls
        self.found = CallList(None) if calls is None else calls.found

    @property
    def is_thinking(self) -> bool:
        """Whether the output is within reasoning now."""
        return self._thought is not None and self._thought.is_thinking

    def push(self, piece: str, *, is_end: bool = False) -> Said:
        """Read a piece of the output. Return the reasoning and the text that may be sent now: the rest if `is_end`."""
        said = Said("", piece) if self._thought is None else self._thought.push(piece, is_end=is_end)
        if self._calls is None:
            return said
        text = self._calls.push(said.text)
        return said._replace(text=text + self._calls.end() if is_end else text)


OutputReader = ChatReader | HarmonyReader
"""Splits an output's text into reasoning, answer and calls, piece by piece."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form in which a model writes an output.

    Attributes:
        calls: the format of calls.
        marks: marks around reasoning. None means that the model shows no reasoning, or the format of calls includes
            reasoning.
        thought: the reasoning with which the output after a given prompt may begin. None means that the output has no
            reasoning.
        tokens: ids of the tokens with which the marks are written.
    """

    calls: CallFormat = HERMES
    marks: Marks | None = None
    thought: Thought | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, template: str, format_: CallFormat, added: Mapping[str, int]) -> OutputForm:
        """Return the form of a checkpoint's outputs.

        Args:
            template: the checkpoint's chat template.
            format_: the format of calls that the template describes.
            added: ids of the tokenizer's tokens that are not text.
        """
        if (harmony := harmony_of(added)) is not None:
            return cls(harmony.written_with(added))
        marks = marks_of(template, added)
        around = "".join(marks or ())
        return cls(format_.written_with(added), marks, tokens={t: id_ for t, id_ in added.items() if t in around})

    def within(self, vocab_size: int) -> OutputForm:
        """Return the form for a model whose logits cover only the first `vocab_size` tokens."""
        return replace(self, calls=self.calls.within(vocab_size))

    def after(self, prompt: str) -> OutputForm:
        """Return the form of the output that follows `prompt`."""
        return replace(self, thought=thought_after(prompt, self.marks))

    def shown(self, choice: ToolChoice) -> frozenset[int]:
        """Return the special tokens that the reader treats as text."""
        is_read = choice != "none" or isinstance(self.calls, Harmony)
        return frozenset(self.tokens.values()) | frozenset(self.calls.special.values() if is_read else ())

    def reader(self, choice: ToolChoice, most: int | None = None) -> OutputReader | None:
        """Return a reader of one output, or None if the whole output is the answer.

        Args:
            most: largest number of calls. Further calls are left out. None means no limit.
        """
        takes_calls = choice != "none"
        if isinstance(self.calls, Harmony):
            return HarmonyReader(self.calls, calls=takes_calls, most=most)
        if not takes_calls and self.thought is None:
            return None
        return ChatReader(self.thought, Calls(choice, most, self.calls) if takes_calls else None)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        formatted: dict[str, Any] | None = None,
        free: Container[str] = (),
    ) -> str | None:
        """Return the grammar of an output, after any reasoning, or None if the output is not restricted.

        Args:
            formatted: the JSON schema of the answer. None means that the answer is free text.
            free: functions whose arguments may be any object.
        """
        schemas = None if choice == "none" or not tools else _schemas(tools, choice, free)
        if schemas is not None and must_call(choice):
            rules = self.calls.call(schemas)
        elif formatted is not None:
            rules = self.calls.answer(schemas, formatted)
        else:
            return None if schemas is None else self.calls.grammar(schemas)
        begin, end = ("", "") if self.thought is None else (self.terms(mark) for mark in self.thought.marks)
        is_open = self.thought is not None and self.thought.is_open
        return whole_grammar(rules, begin, end, is_open=is_open)

    def terms(self, mark: str) -> str:
        """Return a mark as Lark terms."""
        return replace(self.calls, special=self.tokens).terms(mark)


def _schemas(tools: Sequence[Tool], choice: ToolChoice, free: Container[str]) -> Schemas:
    """Return the schemas of the functions that may be called."""
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    return {
        tool.function.name: ANY_ARGUMENTS if tool.function.name in free else tool.function.parameters or NO_ARGUMENTS
        for tool in tools
    }
