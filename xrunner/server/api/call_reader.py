"""Extract function calls from an output's text, piece by piece, while the model writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from xrunner.server.api.call_formats import HERMES, Call, CallFormat, ObjectCalls
from xrunner.server.api.tools import MAX_NAME, FunctionCall, ToolCall, ToolChoice, must_call

SPACE = r"\s{0,16}"
NAME = rf"[A-Za-z0-9_.\-]{{0,{MAX_NAME}}}"
MAX_ATTEMPTS = 256
"""Number of attempts to read a whole call. After these, the rest of an output counts as text, since each attempt may
read all of the rest.
"""


class CallPiece(NamedTuple):
    """What a piece of text adds to a call. The first piece has the name and the id, later ones only arguments."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class CallList:
    """The function calls of an output. They can be read as a whole, or in pieces for a stream.

    Args:
        most: largest number of calls. Further calls are left out. None means no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._calls: list[ToolCall] = []
        self._written: list[list[str]] = []
        """Arguments of each call in pieces, since appending to a string copies the string."""
        self._pieces: list[CallPiece] = []

    def begin(self, name: str, id_: str) -> None:
        """Add a call, without arguments so far."""
        self._calls.append(ToolCall(FunctionCall(name, ""), id_))
        self._written.append([])
        self._add(CallPiece(len(self._calls) - 1, id_, name, ""))

    def append(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        if arguments:
            self._written[-1].append(arguments)
            self._add(CallPiece(len(self._calls) - 1, None, None, arguments))

    def _add(self, piece: CallPiece) -> None:
        if self._most is None or len(self._calls) <= self._most:
            self._pieces.append(piece)

    def calls(self) -> list[ToolCall]:
        """Return the calls so far."""
        for call, written in zip(self._calls, self._written, strict=True):
            call.function.arguments = "".join(written)
        return self._calls[: self._most]

    def pieces(self) -> list[CallPiece]:
        """Return the additions to function calls since the last call of this method: at most one piece for each
        function call.
        """
        found: list[CallPiece] = []
        for piece in self._pieces:
            if found and found[-1].number == piece.number:
                found[-1] = found[-1]._replace(arguments=found[-1].arguments + piece.arguments)
            else:
                found.append(piece)
        self._pieces.clear()
        return found


class Calls:
    """Extracts calls from an output's text. Text that may be the beginning of a call is held back.

    Attributes:
        found: the calls so far.

    Args:
        most: largest number of calls. Further calls are left out. None means no limit.
    """

    def __init__(self, choice: ToolChoice, most: int | None = None, format_: CallFormat = HERMES) -> None:
        self.found = CallList(most)
        self._format = format_
        self._held = ""
        self._unread: list[str] = []
        """Pieces after `_held`. These pieces cannot contain the end of a call."""
        self._tail = ""
        """Last characters of the pieces so far: the mark that ends a call may begin there."""
        self._space: list[str] = []
        """White space after a call. It counts as text only if other text follows."""
        self._is_after_call = False
        self._value = JsonObject()
        self._awaited: list[str] = []
        """Marks that are still missing at the end of the present call."""
        self._attempts = 0
        self._must_call = must_call(choice)
        self._state: Literal["text", "opening", "whole", "arguments", "closing"] = "text"
        if self._must_call:
            self._state = "opening"

    def push(self, piece: str) -> str:
        """Read a piece of the output. Return the text that may be sent now."""
        self._unread.append(piece)
        if self._state == "whole" and not self._may_end_with(piece):
            return ""
        return "".join(self._read(is_end=False))

    def end(self) -> str:
        """Return the text that is still held back. An incomplete call ends with the output."""
        return "".join(self._read(is_end=True))

    def _read(self, *, is_end: bool) -> Iterator[str]:
        """Advance through the states until more text is needed. Yield the text to show."""
        self._held = "".join([self._held, *self._unread])
        self._unread.clear()
        steps = {
            "text": self._text,
            "opening": self._opening,
            "whole": self._whole,
            "arguments": self._arguments,
            "closing": self._closing,
        }
        while self._held:
            before = self._state, len(self._held)
            yield from self._shown(steps[self._state](is_end=is_end))
            if (self._state, len(self._held)) == before:
                return

    def _shown(self, text: str) -> Iterator[str]:
        """Yield text, but white space after a call only if more text follows."""
        if not text:
            return
        if self._is_after_call:
            self._space.append(text)
            if not text.strip():
                return
            text = "".join(self._space)
            self._is_after_call = False
        yield text

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _text(self, *, is_end: bool) -> str:
        """Read up to the next trigger."""
        if self._must_call or self._attempts >= MAX_ATTEMPTS:
            return self._take(len(self._held))
        found = self._held.find(self._format.trigger)
        if found >= 0:
            self._state = "opening" if self._format.streams else "whole"
            return self._take(found)
        return self._take(len(self._held) - (0 if is_end else overlap(self._held, self._format.trigger)))

    def _opening(self, *, is_end: bool) -> str:
        """Read a call's object up to its arguments."""
        mark = "" if self._must_call or not isinstance(self._format, ObjectCalls) else self._format.mark
        whole, partial = _openings(self._format.arguments)
        rest = self._held[len(mark) :]
        if (found := whole.match(rest)) is not None:
            self._take(len(mark) + found.end())
            self._begin(found[1], self._format.new_id())
            self._value = JsonObject()
            self._state = "arguments"
        elif is_end or partial.fullmatch(rest) is None:
            self._state = "whole"
        return ""

    def _whole(self, *, is_end: bool) -> str:
        """Read complete calls. If the text contains none, treat it as text."""
        if self._must_call:
            if not is_end:
                return ""
            call = self._format.call_in(self._held)
            if call is None:
                return self._take(len(self._held))
            self._take(len(self._held))
            self._add(call)
            return ""
        trigger = self._format.trigger
        if not is_end and not self._may_be_complete():
            return ""
        self._attempts += 1
        read = self._format.read(self._held)
        self._state = "text"
        if read is None:
            return self._take(len(trigger))
        self._take(read[1])
        for call in read[0]:
            self._add(call)
        return ""

    def _may_be_complete(self) -> bool:
        """Whether the text that is held back may already be a complete call."""
        if not isinstance(self._format, ObjectCalls):
            return False
        closing = self._format.closing
        self._tail = self._held[-len(closing) :]
        return closing in self._held

    def _may_end_with(self, piece: str) -> bool:
        """Whether this further piece may complete a call."""
        if self._must_call or not isinstance(self._format, ObjectCalls):
            return False
        closing = self._format.closing
        text = self._tail + piece
        self._tail = text[-len(closing) :]
        return closing in text

    def _arguments(self, *, is_end: bool) -> str:
        """Read arguments as they are written."""
        end = self._value.feed(self._held)
        self.found.append(self._take(len(self._held) if end is None else end))
        if end is not None:
            self._state = "closing"
            closing = self._format.closing if isinstance(self._format, ObjectCalls) and not self._must_call else ""
            self._awaited = ["}", closing] if closing else ["}"]
        return ""

    def _closing(self, *, is_end: bool) -> str:
        """Read the end of a call's object, and the closing text of its format."""
        while self._awaited:
            mark, self._held = self._awaited[0], self._held.lstrip()
            if self._held.startswith(mark):
                self._take(len(mark))
                del self._awaited[0]
            elif not is_end and mark.startswith(self._held):
                return ""
            else:
                break
        self._state = "text"
        return ""

    def _begin(self, name: str, id_: str) -> None:
        self._is_after_call = True
        self._space.clear()
        self.found.begin(name, id_)

    def _add(self, call: Call) -> None:
        self._begin(call.name, call.id)
        self.found.append(call.arguments)


class JsonObject:
    """Finds where a JSON object ends, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the number of characters up to the end of the object, or None if the object continues."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


@lru_cache(maxsize=8)
def _openings(key: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two patterns. The first matches the beginning of a call's object up to the arguments. The second matches
    any prefix of such a beginning.
    """

    def quoted(word: str) -> list[str]:
        return [*map(re.escape, f'"{word}"')]

    parts = [SPACE, re.escape("{"), SPACE, *quoted("name"), SPACE, ":", SPACE, '"']
    after = ['"', SPACE, ",", SPACE, *quoted(key), SPACE, ":", SPACE]
    nested = ""
    for part in reversed([*parts, NAME, *after]):
        nested = f"(?:{part}{nested})?"
    return re.compile("".join([*parts, f"({NAME})", *after]) + r"(?=\{)"), re.compile(nested)


def overlap(text: str, opening: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `opening`."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if text.endswith(opening[:n])), 0)
