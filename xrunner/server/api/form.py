"""Describe the form of a chat's output (reasoning, an answer, calls), and provide its grammar and its reader.

With `tool_choice` auto, only the frame of a call is restricted: a call of a declared function has arguments that are a
JSON object. They follow the function's schema if the function is `strict`, or if a function must be called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xrunner.grammar import choice_rule, json_rule, ranges, whole_grammar
from xrunner.server.api.calls import Types
from xrunner.server.api.channels import ChannelReader
from xrunner.server.api.formats import (
    HERMES,
    MESSAGE,
    OBJECTS,
    CallFormat,
    Marks,
    Opening,
    Thought,
    call_format,
    call_formats,
    marks_of,
    pieces,
    thought_after,
)
from xrunner.server.api.reader import OutputReader
from xrunner.server.api.tools import ANY_ARGUMENTS, NO_ARGUMENTS, Function, NamedTool, Tool, ToolChoice, must_call

Schemas = Mapping[str, dict[str, Any]]
"""JSON schemas of functions' arguments, by the functions' names."""
TEXT_RULE = "TEXT: /(.|\\n)*/\n"


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form in which a model writes an output.

    Attributes:
        is_known: whether the checkpoint shows that it has this format of calls.
        marks: marks around reasoning. None means that the model shows no reasoning, or the format of calls includes
            reasoning.
        thought: the reasoning with which the output after a given prompt may begin. None means that the output has no
            reasoning.
        tokens: ids of the tokens with which the marks are written."""

    calls: CallFormat = field(default_factory=lambda: call_formats()[HERMES])
    is_known: bool = False
    marks: Marks | None = None
    thought: Thought | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, template: str, added: Mapping[str, int], tool_template: str = "") -> OutputForm:
        """Return the form of a checkpoint's outputs.

        Args:
            added: ids of the tokenizer's tokens that are not text.
            tool_template: its template for chats with functions, if that is another one."""
        found = call_format(tool_template or template, added)
        calls = (found or call_formats()[HERMES]).written_with(added)
        marks = None if calls.on_channels else marks_of(template, added)
        around = "".join(marks or ())
        return cls(calls, found is not None, marks, tokens={t: id_ for t, id_ in added.items() if t in around})

    def __str__(self) -> str:
        calls = self.calls.families if self.is_known else "none found, so Hermes' is assumed"
        reasoning = "on channels" if self.calls.on_channels else f"{self.marks.begin!r}" if self.marks else "none found"
        is_held = self.grammar((Tool(Function("f", strict=True)),), "auto")
        strict = "" if is_held else "; under tool_choice auto, strict functions are not held to their schemas"
        return f"format of calls: {calls}; marks of reasoning: {reasoning}{strict}"

    def within(self, vocab_size: int) -> OutputForm:
        return replace(self, calls=self.calls.within(vocab_size))

    def after(self, prompt: str) -> OutputForm:
        return replace(self, thought=thought_after(prompt, self.marks))

    def shown(self, choice: ToolChoice) -> frozenset[int]:
        """Return the special tokens that the reader treats as text."""
        is_read = choice != "none" or self.calls.on_channels
        return frozenset(self.tokens.values()) | frozenset(self.calls.special.values() if is_read else ())

    def reader(
        self, choice: ToolChoice, most: int | None = None, types: Mapping[str, Types] | None = None
    ) -> OutputReader | None:
        """Return a reader of one output, or None if the whole output is the answer."""
        takes_calls = choice != "none"
        if not takes_calls and self.thought is None and not self.calls.on_channels:
            return None
        is_call = must_call(choice) and not self.calls.on_channels
        calls = replace(self.calls, openings=OBJECTS, ends=()) if is_call else self.calls
        kind = ChannelReader if calls.on_channels else OutputReader
        return kind(calls, self.thought, takes_calls=takes_calls, is_call=is_call, most=most, types=types)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, formatted: str | None = None) -> str | None:
        """Return the grammar of an output, after any reasoning, or None if the output is not restricted. `formatted`: a
        Lark term of the answer. None means that the answer is free text."""
        schemas = {} if choice == "none" else _schemas(tools, choice)
        if not schemas and formatted is None:
            return None
        if must_call(choice):
            formatted = None
        is_free = formatted is None and not must_call(choice)
        if self.calls.on_channels:
            return self._on_channels(schemas, formatted, is_free=is_free)
        if is_free:
            answer = self._free(schemas)
        elif formatted is None:
            answer = f"answer: {' | '.join(self._called(self.calls.bare, *each) for each in schemas.items())}\n"
        else:
            answer = f"answer: {formatted}{' | calls' if schemas else ''}\n"
            answer += self._only(schemas) if schemas else ""
        if not answer or self.thought is None:
            return answer and f"start: answer\n{answer}{TEXT_RULE}"
        begin, end = (self.terms(mark, self.tokens) for mark in self.thought.marks)
        if is_free and not self.thought.is_open and not end.startswith("<["):
            return None  # a call that is quoted in reasoning could not be distinguished from one in the answer
        free = self.calls.free - {self.tokens.get(self.thought.marks.end)}
        return whole_grammar(
            answer + TEXT_RULE, begin, end, ranges(free), is_open=self.thought.is_open, may_lack_end=is_free
        )

    def terms(self, text: str, special: Mapping[str, int] | None = None) -> str:
        """Return a text as Lark terms, with tokens that are not text by their ids."""
        special = self.calls.special if special is None else special
        if not special:
            return json.dumps(text)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
        return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)

    def _called(self, opening: Opening, name: str, schema: dict[str, Any]) -> str:
        """The text is divided into JSON's tokens: longer pieces could not be distinguished from the beginning of an
        answer that is also an object."""
        head = opening.head.replace("%n", name) if opening.is_object else opening.filled(name)
        parts = re.findall(r'%[_-]|"[^"]*"|[^"%]', head) if opening.is_object else [head]
        before = " ".join("GAP?" if part in ("%_", "%-") else self.terms(part) for part in parts)
        close = 'GAP? "}"' if opening.is_object else f"GAP? {self.terms(opening.close)}" if opening.close else ""
        return f"{before} GAP? {json_rule(schema)} {close}"

    def _only(self, schemas: Schemas) -> str:
        calls = self.calls
        opening = next((each for each in calls.openings if each.has_json), OBJECTS[0])
        called = " | ".join(self._called(opening, *each) for each in schemas.items())
        begin = self.terms(calls.begins[0]) if calls.begins else ""
        ends = f"GAP? {self.terms(calls.ends[0])}" if calls.begins and calls.ends else ""
        if calls.is_list:
            return f'calls: {begin} GAP? "[" GAP? one_call ("," GAP? one_call)* "]" {ends}\none_call: ({called}) GAP?\n'
        if not calls.ends and begin:  # each call has the mark
            return f"calls: one_call+\none_call: {begin} ({called})\n"
        return f"calls: one_call (GAP? one_call)*\none_call: {begin} GAP? ({called}) {ends}\n"

    def _free(self, schemas: Schemas) -> str:
        """Once a call of a declared function has begun, its arguments are JSON. A mark by itself does not begin a call:
        models also write other text after it."""
        calls = self.calls
        openings = [each for each in calls.openings if each.has_json]
        heads = [
            each.head if each.is_object else calls.begins[0] * (each.head[0] == "%") + each.head for each in openings
        ]
        if not heads:
            return self._between_tags({name: each for name, each in schemas.items() if each is not ANY_ARGUMENTS})
        marked = next((token for token in calls.special if heads[0].startswith(token)), None)
        rules, free = [], calls.free
        if marked is None:
            if any(token in head for token in calls.special for head in heads):
                return ""
            loose = [name for name, schema in schemas.items() if schema is ANY_ARGUMENTS]
            groups = [(loose, ANY_ARGUMENTS)] if loose else []
            groups += [([name], schema) for name, schema in schemas.items() if schema is not ANY_ARGUMENTS]
            close = 'WS? "}"' if openings[0].is_object else ""
            for number, (names, schema) in enumerate(groups):
                named = f"({'|'.join(map(re.escape, names))})"
                # A head that the name ends would match before the longer ones do.
                spelt = "|".join(_expression(head, named) for head in heads if not head.endswith("%n%-"))
                # Some models write the object as a string of JSON.
                arguments = "value" if schema is ANY_ARGUMENTS and openings[0].is_object else json_rule(schema)
                rules.append(f"tag_{number}: trigger_{number} WS? {arguments} {close}")
                rules.append(f"trigger_{number}[lazy]: TEXT /{spelt}/")
            rules.append(f"tag: {' | '.join(f'tag_{number}' for number in range(len(groups)))}")
        else:
            # Nothing but calls follows a token of their format. A function that is not declared may have any arguments.
            free = free - {calls.special[marked]}
            held = {name: schema for name, schema in schemas.items() if schema is not ANY_ARGUMENTS}
            others = f"NAME: /[A-Za-z0-9_.-]+/{''.join(f' & ~{json.dumps(name)}' for name in held)}"
            ways: list[str] = []
            for head in heads:
                before, after = head.removeprefix(marked).split("%n")
                for name, schema in [
                    ("NAME", ANY_ARGUMENTS),
                    *((json.dumps(name), each) for name, each in held.items()),
                ]:
                    ways.append(f"{self._parts(before)} {name} {self._parts(after)} WS? {json_rule(schema)}")
            rules += [f"tag: TEXT <[{calls.special[marked]}]> WS? ({' | '.join(ways)})", others]
        return _mixed(rules, free)

    def _between_tags(self, held: Schemas) -> str:
        """Strict functions get their parameters in the schema's order, with values of the schema's types."""
        tagged = (each for each in self.calls.openings if each.tags and each.head.endswith(">"))
        opening = next((each for each in tagged if "%k" not in each.tags[1]), Opening(""))
        texts = (opening.head, opening.close, *opening.tags)
        if held and all(
            text in self.calls.special for each in self.calls.openings for text in (each.inner, each.close)
        ):
            return self._between_tokens(held)
        if not opening.tags or not held or any(token in text for token in self.calls.special for text in texts):
            return ""
        begin, end = opening.tags
        rules = [f"valued[lazy]: TEXT /{_expression(end, '')}/"]
        for number, (name, schema) in enumerate(held.items()):
            parameters = []
            for key, value in schema.get("properties", {}).items():
                rule = _value_rule(value)
                written = "valued" if rule == "TEXT" else f"GAP? {rule} GAP? {json.dumps(end)}"
                is_needed = key in schema.get("required", ())
                tag = json.dumps(begin.replace("%k", key).replace("%q", key).replace("%-", "").replace("%a", ""))
                parameters.append(f"(GAP? {tag} {written}){'' if is_needed else '?'}")
            rules.append(f"tag_{number}: trigger_{number} {' '.join(parameters)} GAP? {json.dumps(opening.close)}")
            rules.append(f"trigger_{number}[lazy]: TEXT /{_expression(opening.head, re.escape(name))}/")
        return _mixed([*rules, f"tag: {' | '.join(f'tag_{number}' for number in range(len(held)))}"], self.calls.free)

    def _between_tokens(self, held: Schemas) -> str:
        """Nothing but calls follows the first token. A function that is not held may have any parameters."""
        (opening,), begin = self.calls.openings, self.calls.begins[0]
        before, after = map(self.terms, opening.tags[0].split("%k"))
        inner, end = self.terms(opening.inner), self.terms(opening.tags[1])
        ways = [f"NAME GAP? ({before} TEXT {after} GAP? {inner} TEXT {end} GAP?)*"]
        for name, schema in held.items():
            needed = schema.get("required", ())
            ways.append(f"{json.dumps(name)} GAP?")
            for key, value in schema.get("properties", {}).items():
                rule = _value_rule(value)
                written = rule if rule == "TEXT" else f"GAP? {rule} GAP?"
                parameter = f"({before} {json.dumps(key)} {after} GAP? {inner} {written} {end} GAP?)"
                ways[-1] += f" {parameter}{'' if key in needed else '?'}"
        names = f"NAME: /[A-Za-z0-9_.-]+/{''.join(f' & ~{json.dumps(name)}' for name in held)}"
        tag = f"tag: TEXT {self.terms(begin)} GAP? ({' | '.join(ways)}) {self.terms(opening.close)}"
        return _mixed([tag, names], self.calls.free - {self.calls.special[begin]})

    def _parts(self, pattern: str) -> str:
        found = re.split(r"(%[i_-])", pattern)
        codes = {"%i": "/[A-Za-z0-9]{9}/" if self.calls.short_ids else "/[0-9]+/", "%_": "WS?", "%-": "WS?"}
        return " ".join(codes.get(part) or self.terms(part) for part in found if part)

    def _on_channels(self, schemas: Schemas, formatted: str | None, *, is_free: bool) -> str:
        channel, message, constrain, start, end = (
            self.terms(mark) for mark in ("<|channel|>", MESSAGE, "<|constrain|>", "<|start|>", "<|end|>")
        )
        head = f'head: ({channel} "commentary")? (" "? {constrain} "json" | " json")? {message}\n'
        if is_free:
            held = {name: schema for name, schema in schemas.items() if schema is not ANY_ARGUMENTS}
            others = f"NAME: /[A-Za-z0-9_.-]+/{''.join(f' & ~{json.dumps(name)}' for name in held)}\n"
            names = [f"NAME head {json_rule(ANY_ARGUMENTS)}"]
            names += [f"{json.dumps(name)} head {json_rule(schema)}" for name, schema in held.items()]
            return (
                f"start: (tag | other)* TEXT\nother: TEXT <[{ranges(self.calls.free)}]>\ntag: to_function name\n"
                f'to_function[lazy]: TEXT "to=functions."\nname: {" | ".join(names)}\n{others}{head}{TEXT_RULE}'
            )
        ways = []
        if schemas:
            called = [f"{json.dumps(name)} head {json_rule(schema)}" for name, schema in schemas.items()]
            ways.append(f'{channel} "commentary to=functions." ({" | ".join(called)})')
        if formatted is not None:
            ways.append(f'{channel} "final" (" "? {constrain} "json")? {message} {formatted}')
        analysis = f'analysis: {channel} "analysis" {message} TEXT {end} {start} "assistant"\n'
        return f"start: analysis* ({' | '.join(ways)})\n{analysis}{head}{TEXT_RULE}"


def _mixed(rules: Sequence[str], free: frozenset[int]) -> str:
    other = f"other: TEXT <[{ranges(free)}]>\n" if free else ""
    return f"answer: (tag{' | other' if free else ''})* text\n{other}text: TEXT\n" + "\n".join(rules) + "\n"


def _value_rule(schema: dict[str, Any]) -> str:
    options, kind = schema.get("enum"), schema.get("type")
    if options and all(isinstance(option, str) for option in options):
        return choice_rule(options)
    return json_rule(schema) if isinstance(kind, str) and kind != "string" else "TEXT"


def _expression(head: str, name: str) -> str:
    """White space at its end is left out."""
    codes = {"%n": name, "%i": "[A-Za-z0-9]+", "%_": "[ \\n]{0,8}", "%-": "[ \\n]{0,8}"}
    return "".join(
        codes.get(piece) or re.escape(piece).replace("/", "\\/").replace("\\\n", "\\n")
        for piece in pieces(head.removesuffix("%_").removesuffix("%-"))
    )


def _schemas(tools: Sequence[Tool], choice: ToolChoice) -> Schemas:
    """Return the schemas of the functions that may be called. If none must be, only those of strict functions hold."""
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    return {
        tool.function.name: (tool.function.parameters or NO_ARGUMENTS)
        if tool.function.strict or must_call(choice)
        else ANY_ARGUMENTS
        for tool in tools
    }
