"""Read an output that consists of messages on channels (gpt-oss): each has a head, and a text up to a mark."""

from __future__ import annotations

import re
from typing import Any, Literal

from xrunner.server.api.calls import Call, Extent, overlap
from xrunner.server.api.formats import MESSAGE
from xrunner.server.api.reader import OutputReader
from xrunner.server.api.tools import MAX_NAME

MAX_HEAD = 512
"""Longest head of a message on a channel, in characters."""
HEADS = ("<|channel|>", MESSAGE, " to=", "assistant", "<|start|>")
"""Texts with which the head of a message may begin. A text that begins in another way has no head."""
ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
"""Tokens that end a message, including those that end an output."""
UNENDED = re.compile(
    r"(?:to=functions\.[A-Za-z0-9_.-]+|<\|channel\|>(?:analysis|commentary|final))"
    r"(?: code)?(?: ?<\|constrain\|>)?(?: ?json)?"
)
"""In a head without the mark at its end: what belongs to the head. The rest is the message's text."""
RECIPIENT = re.compile(rf"to=(functions\.)?([A-Za-z0-9_.-]{{1,{MAX_NAME}}})")


class ChannelReader(OutputReader):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shows: Literal["reasoning", "text", "call"] = "text"
        self._has_start = False
        self._step = self._head

    @property
    def is_thinking(self) -> bool:
        return self._step == self._message and self._shows == "reasoning"

    def _head(self) -> None:
        if self._held.startswith("<|start|>"):
            self._take(len("<|start|>"))
            self._has_start = True
            return
        head, found, _ = self._held.partition(MESSAGE)
        if not found:
            head = head[: len(head) - overlap(head, MESSAGE)]
        cut = ENDS.search(head)
        if not self._has_start and not any(head.startswith(each) or each.startswith(head) for each in HEADS):
            self._shows = "text"
            self._go(self._message)
        elif cut is not None or (self._is_end and not found and len(head) <= MAX_HEAD):
            if cut is None:
                self._held = head
            self._open_unended(head[: len(head) if cut is None else cut.start()])
        elif found and len(head) <= MAX_HEAD:
            self._take(len(head) + len(MESSAGE))
            self._open(head)
        elif len(head) > MAX_HEAD:
            self._shows = "text"
            self._go(self._message)

    def _open_unended(self, head: str) -> None:
        """Read a message that has no mark between its head and its text, or is cut off in its head."""
        *_, known = (None, *UNENDED.finditer(head))
        self._take(len(head) if known is None or "commentary" in known[0] else known.end())
        self._open(head if known is None else head[: known.end()])
        self._go(self._message)

    def _open(self, head: str) -> None:
        self._step, self._has_start = self._message, False
        function, channel = RECIPIENT.search(head), head.rpartition(HEADS[0])[2]
        if function is not None and self._takes_calls and (function[1] or function[2] in self._types):
            self._shows = "call"
            self._extent = Extent()
            self._add(Call(function[2], ""))
        else:
            self._shows = "reasoning" if channel.startswith("analysis") else "text"

    def _message(self) -> None:
        found = ENDS.search(self._held)
        marks = ("<|return|>", "<|start|>", "<|end|>", "<|call|>")
        held = 0 if self._is_end else max(overlap(self._held, mark) for mark in marks)
        text = self._take(len(self._held) - held if found is None else found.start())
        if found is not None:
            self._has_start = self._take(len(found[0])) == "<|start|>"
            self._step = self._head
        if self._shows != "call":
            self._said[self._shows].append(text)
        elif self._extent.at >= 0:  # no text after the object belongs to the arguments
            end = self._extent.feed(text)
            read = len(text) if found is not None or self._is_end else self._extent.at
            self.found.append(text[: read if end is None else end])
            if end is None:
                self._held = text[read:] + self._held
            self._extent.at = 0 if end is None else -1
