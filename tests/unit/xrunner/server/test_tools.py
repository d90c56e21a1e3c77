"""Calls in an output's text, and the grammar that a free output keeps to."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attack.target import save_checkpoint
from xrunner.grammar import Grammars
from xrunner.server.api.tools import Calls, NamedFunction, NamedTool, Tool, ToolCall, grammar_of

PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
TOOLS = msgspec.convert([{"type": "function", "function": {"name": "weather", "parameters": PLACE}}], list[Tool])
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place":"Rome"}}\n</tool_call>'


def read(pieces: list[str], choice: str = "auto") -> tuple[str, list[ToolCall]]:
    calls = Calls(choice)  # type: ignore[arg-type]
    text = "".join(calls.push(piece) for piece in pieces)
    rest, found = calls.end()
    return text + rest, found


@given(
    st.lists(st.integers(0, 200)), st.sampled_from([CALL, f"I look. {CALL}", f"{CALL}\n{CALL}", "a <tool b", CALL[:30]])
)
def test_the_cut_into_pieces_does_not_matter(cuts: list[int], text: str) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole, calls = read([text])
    cut_text, cut_calls = read(pieces)
    assert cut_text == whole and [call.function for call in cut_calls] == [call.function for call in calls]
    assert len(calls) == text.count("</tool_call>")
    assert whole == (text if not calls else text.replace(CALL, "") if text.startswith("I") else "")


def test_text_before_a_call_goes_out_at_once() -> None:
    calls = Calls("auto")
    assert calls.push("I look") == "I look" and calls.push(" <tool") == " " and calls.push("box") == "<toolbox"


@pytest.mark.parametrize(
    ("written", "num"), [('{"name": "f", "arguments": {}}', 1), ('{"name": "f"', 0), ("[]", 0), ("1", 0)]
)
def test_one_that_must_call_is_read_whole(written: str, num: int) -> None:
    text, calls = read([written], "required")
    assert len(calls) == num and text == ("" if num else written)


def test_a_free_output_writes_text_or_right_calls(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    grammar = grammar_of(TOOLS, "auto")
    assert grammar is not None and grammars.why_not(grammar) is None
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    of = {character: tokenizer[character] for character in tokenizer if len(character) == 1}

    def allowed(text: str, token: str) -> bool:
        state = grammars.state(grammar, [of[{"\n": "Ċ", " ": "Ġ"}.get(c, c)] for c in text])
        return bool(state.allowed()[2 if token == "end" else of[token]])

    assert allowed("any text", "x") and allowed("any text", "end")
    opened = CALL.partition("Rome")[0]
    assert allowed(opened, "R") and allowed(opened, "O")
    assert not allowed(opened, "P") and not allowed(opened, "end")
    assert allowed(CALL, "end")
    named = grammar_of(TOOLS, NamedTool(NamedFunction("weather")))
    assert named is not None and grammars.why_not(named) is None
    assert grammar_of(TOOLS, "none") is None


def test_a_broken_grammar_ends_the_output(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    state = grammars.state(grammar_of(TOOLS, "required") or "", [5, 6, 7])
    assert state.allowed().nonzero()[0].tolist() == [2]
