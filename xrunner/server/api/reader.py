"""Read an output piece by piece while the model writes it: separate reasoning, the answer and calls.

One reader serves all formats (`formats`) but messages on channels (`channels`). It is always in one state, whose step
takes characters from the text that is held back. A step that takes none ends the reading until more text comes, so
every output is read in finite time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from xrunner.server.api.calls import (
    TEXT,
    Call,
    CallList,
    Extent,
    Types,
    call_in,
    is_object,
    json_of_literals,
    new_id,
    overlap,
    parameter,
)
from xrunner.server.api.formats import MEMBER, CallFormat, Opening, Pattern, Thought, compiled

MAX_SPACE = 64
"""Largest number of white-space characters that are held back until other text follows."""
MAX_CALLS = 256
"""Largest number of calls, and of attempts to read one as a whole. After these, the rest of an output is text."""


class Said(NamedTuple):
    reasoning: str
    text: str


class OutputReader:
    """Reads one output. `is_call`: whether the output, after reasoning, is one call's object without marks."""

    def __init__(
        self,
        format_: CallFormat,
        thought: Thought | None = None,
        *,
        takes_calls: bool = True,
        is_call: bool = False,
        most: int | None = None,
        types: Mapping[str, Types] | None = None,
    ) -> None:
        self.found = CallList(most)
        self._format = format_
        self._begins = () if is_call else format_.begins
        self._takes_calls = takes_calls
        self._is_call = is_call
        self._types = types or {}
        self._held = ""
        self._unread: list[str] = []
        """Pieces after `_held`, none of which has a character that the state waits for."""
        self._awaited, self._is_end = "", False
        self._said: dict[str, list[str]] = {"reasoning": [], "text": []}
        self._space: list[str] = []
        """White space after a call. It counts as text only if other text follows."""
        self._is_after_call = False
        self._inner: OutputReader | None = None
        """Reads what may be calls at the end of reasoning that has no mark at its end."""
        self._fed = 0
        self._attempts = 0
        self._extent = Extent()
        self._opening = Opening("")
        self._name = self._key = self._attribute = ""
        self._num_parameters = 0
        self._expected: list[str] = []
        """Texts that may still follow the last call."""
        heads = [each.head[0] for each in format_.openings if each.head[0] != "%"]
        triggers = [*dict.fromkeys((*self._begins, *format_.around) if self._begins else heads)]
        self._triggers, self._trigger = triggers, re.compile("|".join(map(re.escape, triggers)))
        self._answer: Callable[[], None] = self._call if is_call else self._first if takes_calls else self._text
        self._step = self._answer
        if thought is not None:
            self._mark = thought.marks
            self._step = self._begun if thought.is_open else self._before

    @property
    def is_thinking(self) -> bool:
        return self._step in (self._begun, self._thinking)

    def push(self, piece: str, *, is_end: bool = False) -> Said:
        """Read a piece of the output. Return the reasoning and the text that may be sent now: the rest if `is_end`."""
        self._unread.append(piece)
        if self._awaited and self._awaited not in piece and not is_end:
            return Said("", "")
        self._held = "".join([self._held, *self._unread])
        self._unread.clear()
        self._is_end = is_end
        length = -1
        while self._held and len(self._held) != length:
            length = len(self._held)
            self._step()
        said = Said(*map("".join, self._said.values()))
        for parts in self._said.values():
            parts.clear()
        return said

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _go(self, step: Callable[[], None]) -> None:
        self._step, self._awaited = step, ""
        if self._held:
            step()

    def _show(self, text: str) -> None:
        """Show text of the answer, but white space after a call only if more text follows."""
        if self._is_after_call:
            self._space.append(text)
            if not text.strip():
                return
            text = "".join(self._space)
            self._space.clear()
            self._is_after_call = False
        self._said["text"].append(text)

    # Reasoning at the beginning of an output. White space next to its marks is dropped.

    def _before(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith(self._mark.begin):
            self._held = rest[len(self._mark.begin) :]
            self._step = self._begun
        elif self._is_end or not self._mark.begin.startswith(rest) or len(self._held) > MAX_SPACE:
            self._go(self._answer)

    def _begun(self) -> None:
        self._held = self._held.lstrip()
        if self._held.startswith(self._mark.begin):
            self._take(len(self._mark.begin))
        elif self._is_end or not self._mark.begin.startswith(self._held):
            self._go(self._thinking)

    def _thinking(self) -> None:
        if (at := self._held.find(self._mark.end)) >= 0:
            self._said["reasoning"].append(self._take(at).rstrip())
            self._take(len(self._mark.end))
            self._step, self._inner = self._after, None
            return
        begins = self._begins if self._takes_calls else ()
        if begins and (found := self._trigger.search(self._held)) is not None:
            self._call_in_reasoning(found.start())
            return
        held = 0 if self._is_end else max(overlap(self._held, mark) for mark in (self._mark.end, *begins))
        out = self._held[: len(self._held) - held]
        shown = out.rstrip()
        if not self._is_end and len(shown) < len(out) - MAX_SPACE:
            shown = out
        self._said["reasoning"].append(shown)
        self._take(len(self._held) if self._is_end else len(shown))

    def _call_in_reasoning(self, at: int) -> None:
        """Hold back what begins like a call until it is known whether the reasoning ends here or goes on behind it."""
        if self._inner is None:
            shown = self._held[:at].rstrip()
            self._said["reasoning"].append(self._take(len(shown)))
            self._inner, self._fed = OutputReader(self._format, types=self._types), at - len(shown)
        text = self._inner.push(self._held[self._fed :], is_end=self._is_end).text
        self._fed = len(self._held)
        calls = self._inner.found.calls()
        is_whole = bool(calls) and all(is_object(call.function.arguments) for call in calls)
        if text.strip() or (self._is_end and not is_whole):
            held = 0 if self._is_end else overlap(self._held, self._mark.end)
            shown = self._held[: len(self._held) - held].rstrip()
            self._said["reasoning"].append(self._take(len(self._held) if self._is_end else len(shown))[: len(shown)])
            self._inner = None
        elif self._is_end:
            self._take(len(self._held))
            for call in calls:
                self._add(Call(call.function.name, call.function.arguments, call.id))

    def _after(self) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._go(self._answer)

    # The answer, with calls in it.

    def _first(self) -> None:
        """Some models leave out the mark before an answer that is a call."""
        whole = self._match(0, is_marked=False) if self._held.lstrip()[:1] in ("", "{", "[") else None
        if isinstance(whole, tuple) and whole[0].is_object:
            self._begin(*whole)
        elif whole != "partial":
            self._go(self._text)

    def _text(self) -> None:
        is_text = not self._takes_calls or max(len(self.found), self._attempts) >= MAX_CALLS
        if is_text or (self._is_call and len(self.found)):
            self._show(self._take(len(self._held)))
        elif (found := self._trigger.search(self._held)) is not None:
            self._show(self._take(found.start()))
            self._go(self._call)
        else:
            held = 0 if self._is_end else max(overlap(self._held, trigger) for trigger in self._triggers)
            self._show(self._take(len(self._held) - held))

    def _call(self) -> None:
        begin = next((each for each in self._triggers if self._held.startswith(each)), "") if self._begins else ""
        whole = self._match(len(begin)) or (self._match(0) if begin else None)
        if isinstance(whole, tuple):
            self._begin(*whole)
        elif whole != "partial" and (begin or not any(map(self._may_begin, self._begins))):
            at = len(begin) + self._gap(len(begin))
            is_object = self._held.startswith("{", at) and any(each.is_object for each in self._format.openings)
            if (begin or self._is_call) and is_object:
                self._extent = Extent(at=at)
                self._go(self._whole)
            else:
                text = self._take(max(1, len(begin)))
                self._show("" if begin in self._format.around else text)
                self._step = self._text

    def _gap(self, at: int) -> int:
        found = re.compile(r"\s{0,16}(?:\[\s{0,16})?" if self._format.is_list else r"\s{0,16}").match(self._held, at)
        return found.end() - at if found else 0

    def _match(self, at: int, *, is_marked: bool = True) -> tuple[Opening, re.Match[str]] | Literal["partial"] | None:
        """`partial`: more text is needed."""
        at += self._gap(at)
        for opening in self._format.openings:
            pattern = opening.pattern
            if (found := pattern.whole.match(self._held, at)) is not None:
                if (is_marked and (self._begins or self._is_call)) or found["name"] in self._types:
                    return opening, found
            elif not self._is_end and pattern.partial.fullmatch(self._held, at) is not None:
                return "partial"
        return None

    def _begin(self, opening: Opening, found: re.Match[str]) -> None:
        self._opening, self._name = opening, found["name"]
        if opening.quotes:
            self._extent = Extent(opening.quotes, found.end(), 1)
            self._begin_at = found.end()
            self._go(self._literals)
            return
        id_ = found["id"] if "id" in found.groupdict() and self._format.short_ids else None
        self._add(Call(self._name, "", id_))
        self._take(found.end())
        self._extent = Extent()
        self._num_parameters = 0
        self._step = self._parameters if opening.tags else self._object

    def _add(self, call: Call) -> None:
        self._is_after_call = True
        self._space.clear()
        self._expected = list(self._format.after)
        self.found.begin(call.name, call.id or new_id(short=self._format.short_ids))
        self.found.append(call.arguments)

    def _object(self) -> None:
        end = self._extent.feed(self._held)
        self.found.append(self._take(len(self._held) if end is None and self._is_end else end or self._extent.at))
        self._extent.at = 0
        if end is not None:
            self._step = self._between

    def _whole(self) -> None:
        self._awaited = "}"
        if (end := self._extent.feed(self._held)) is None and not self._is_end:
            return
        self._attempts += 1
        begin = next((each for each in self._begins if self._held.startswith(each)), "")
        begin = self._held[: len(begin) + self._gap(len(begin))]
        call = None if end is None else call_in(self._held[len(begin) : end])
        self._finish(end, call)

    def _literals(self) -> None:
        self._awaited = self._opening.close
        if (end := self._extent.feed(self._held)) is None and not self._is_end:
            return
        self._attempts += 1
        text = None if end is None else self._held[self._begin_at : end - 1]
        arguments = None if text is None else json_of_literals(text, self._opening.quotes)
        self._finish(end, None if arguments is None else Call(self._name, arguments))

    def _finish(self, end: int | None, call: Call | None) -> None:
        text, self._awaited = self._take(len(self._held) if end is None else end), ""
        if call is None:
            self._show(text)
            self._step = self._text
        else:
            self._add(call)
            self._step = self._between

    def _parameters(self) -> None:
        begin, end = self._opening.tags[0], self._end_tag()
        self._held = self._held.lstrip()
        if self._held.startswith(end):  # some models write it twice
            self._take(len(end))
            return
        pattern = compiled(begin)
        if (found := pattern.whole.match(self._held)) is not None:
            self._take(found.end())
            self._key, self._attribute = found["key"], found.groupdict().get("attribute") or ""
            self._step = self._value
        elif self._is_end and pattern.partial.fullmatch(self._held) is not None:
            self._take(len(self._held))  # the output was cut off here
        elif not (
            any(self._may_begin(mark) for mark in (self._opening.close, end))
            or pattern.partial.fullmatch(self._held) is not None
        ):
            self.found.append("}" if self._num_parameters else "{}")
            self._go(self._between)

    def _end_tag(self) -> str:
        return self._opening.tags[1].replace("%k", self._key)

    def _may_begin(self, mark: str) -> bool:
        return not self._is_end and len(self._held) < len(mark) and mark.startswith(self._held)

    def _value(self) -> None:
        """Read a parameter's value. White space next to its tags is dropped if it is a line break."""
        begin, mark = compiled(self._opening.tags[0]), self._end_tag()
        types = self._types.get(self._name, {})
        end, size = self._value_end(begin, mark)
        if end < 0 and not self._is_end:
            return
        value = self._held[: max(end, 0)]
        for found in begin.whole.finditer(value):  # some models leave closing tags out
            before = value[: found.start()]
            if found["key"] in types and before.endswith("\n") and mark not in value:
                end, size = found.start(), 0
                break
        text = self._take(len(self._held) if end < 0 else end)
        self._take(size)
        if end >= 0:
            if (inner := self._opening.inner) and text.lstrip().startswith(inner):
                text = text.lstrip().removeprefix(inner)
            self._add_parameter(text.removeprefix("\n").removesuffix("\n"), types)
        self._go(self._parameters)

    def _add_parameter(self, text: str, types: Types) -> None:
        declared = frozenset() if 'string="false"' in self._attribute else frozenset({TEXT})
        kinds = types.get(self._key, declared) or ("string=" in self._attribute and declared) or frozenset()
        value = parameter(text, kinds)
        members = f"{json.dumps(self._key, ensure_ascii=False)}: {value}"
        if self._key in ("arguments", "input") and types and self._key not in types and is_object(text):
            members = text.strip()[1:-1]  # some models write all arguments as one
        self.found.append((", " if self._num_parameters else "{") + members)
        self._num_parameters += 1

    def _value_end(self, tag: Pattern, mark: str) -> tuple[int, int]:
        """Return where a parameter's value ends and the length of its closing tag, or -1 if more text is needed. A
        closing tag that nothing of a call follows belongs to the value."""
        follows = (self._opening.close, mark, *self._format.after, *self._begins)
        first = at = self._held.find(mark)
        while at >= 0:
            rest = self._held[at + len(mark) :].lstrip()
            if (not rest and self._is_end) or rest.startswith(follows) or tag.whole.match(rest):
                return at, len(mark)
            if not self._is_end and (any(each.startswith(rest) for each in follows) or tag.partial.fullmatch(rest)):
                return -1, 0
            at = self._held.find(mark, at + 1)
        if not self._is_end:
            return -1, 0
        if first >= 0:
            return first, len(mark)
        if (at := self._held.rfind(self._opening.close)) < 0:
            return -1, 0
        value = self._held[:at].rstrip()
        found = re.search(r"\s*(</[^<>\n]*>)$", value)
        is_misspelt = found is not None and found[1].startswith(mark[: len(mark) // 2])
        return (found.start(), at - found.start()) if found is not None and is_misspelt else (at, 0)

    def _between(self) -> None:
        rest = self._held.lstrip()
        self._space.append(self._take(len(self._held) - len(rest)))
        has_more = self._opening.is_object and "}" in self._expected
        if not rest:
            return
        if has_more and (found := MEMBER.whole.match(rest)) is not None:
            self._take(found.end())
        elif has_more and not self._is_end and MEMBER.partial.fullmatch(rest) is not None:
            return
        elif (mark := next((each for each in self._expected if rest.startswith(each)), None)) is not None:
            self._expected.remove(mark)
            self._space.clear()
            self._take(len(mark))
        elif any(each.startswith(rest) for each in self._expected):
            self._take(len(rest) if self._is_end else 0)
        elif not self._is_call and len(self.found) < MAX_CALLS and self._match(0) is not None:
            self._go(self._call)
        else:
            self._go(self._text)
