"""Calls in an output's text, and the grammar that a free output keeps to."""

from __future__ import annotations

import itertools
import json
import re
import time
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.attack.target import save_checkpoint
from xrunner.generation import NO_TOKEN, SamplingParams, Token
from xrunner.grammar import Grammars, json_grammar
from xrunner.sampling import Sampler
from xrunner.server.api.call_formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_LIST,
    CallFormat,
    call_format,
)
from xrunner.server.api.call_reader import Calls
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.choices import Choice
from xrunner.server.api.form import OutputForm
from xrunner.server.api.parsing import parse_chat
from xrunner.server.api.response_tools import CallItems, Declared, ResponseTool
from xrunner.server.api.text import Detokenizer, TextCodec
from xrunner.server.api.tools import NamedFunction, NamedTool, Tool, ToolCall
from xrunner.server.api.writers import ChatWriter

PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
TOOLS = msgspec.convert([{"type": "function", "function": {"name": "weather", "parameters": PLACE}}], list[Tool])
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place":"Rome"}}\n</tool_call>'


def read(pieces: list[str], choice: str = "auto") -> tuple[str, list[ToolCall]]:
    calls = Calls(choice)  # type: ignore[arg-type]
    text = "".join(calls.push(piece) for piece in pieces)
    return text + calls.end(), calls.found.calls()


@pytest.mark.parametrize(
    ("format_", "repeated"),
    [
        (HERMES, "<tool_call>x"),
        (HERMES, '<tool_call>{"name":'),
        (LLAMA, '{"name": ['),
        (MISTRAL_LIST, '[TOOL_CALLS]["a'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_an_output_full_of_marks_takes_no_longer_than_other_text(format_: CallFormat, repeated: str) -> None:
    """All of the rest was once read at each mark: 1.9 s of the event loop when an output with 30,000 of them ended."""
    text, calls = repeated * 30_000, Calls("auto", format_=format_)
    begin_s = time.process_time()
    shown = [calls.push(text[at : at + 4096]) for at in range(0, len(text), 4096)]
    shown.append(calls.end())
    assert time.process_time() - begin_s < 0.5
    assert "".join(shown) == text[len(repeated) * len(calls.found.calls()) :] and len(calls.found.calls()) < 1000


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


LLAMA_CALL = '{"name": "weather", "parameters": {"place":"Rome"}}'


@given(
    st.lists(st.integers(0, 200)), st.sampled_from([LLAMA_CALL, f"Well: {LLAMA_CALL}; {LLAMA_CALL}", LLAMA_CALL[:30]])
)
def test_llamas_calls_are_read(cuts: list[int], text: str) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    calls = Calls("auto", format_=LLAMA)
    out = "".join(calls.push(text[start:end]) for start, end in itertools.pairwise(edges))
    rest, found = calls.end(), calls.found.calls()
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        ("weather", {"place": "Rome"})
    ] * text.count("Rome")
    assert out + rest == {0: text, 1: "", 2: "Well: ; "}[len(found)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and value}.', LLAMA),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL_LIST),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}", MISTRAL_IDS),
        ("{{ messages }}", HERMES),
    ],
)
def test_a_template_says_how_calls_are_written(template: str, expected: CallFormat) -> None:
    assert call_format(template) == expected


LISTED = '[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "Rome"}, "id": "abcdef123"}'
MISTRALS = {
    f"{LISTED}]": (MISTRAL_LIST, 1, ""),
    f'Well: {LISTED}, {{"name": "weather", "arguments": {{"place": "Rome"}}}}]!': (MISTRAL_LIST, 2, "Well: !"),
    LISTED: (MISTRAL_LIST, 0, LISTED),
    '[TOOL_CALLS]["Rome"]': (MISTRAL_LIST, 0, '[TOOL_CALLS]["Rome"]'),
    'So[TOOL_CALLS]weather[ARGS]{"place": "Rome"}[TOOL_CALLS]weather[ARGS]{"place": "Rome"}': (MISTRAL, 2, "So"),
    "[TOOL_CALLS]weather[ARGS]": (MISTRAL, 0, "[TOOL_CALLS]weather[ARGS]"),
    '[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"place": "Rome"}': (MISTRAL_IDS, 1, ""),
}


@given(st.lists(st.integers(0, 200)), st.sampled_from(sorted(MISTRALS)))
def test_mistrals_calls_are_read(cuts: list[int], written: str) -> None:
    format_, num, text = MISTRALS[written]
    edges = sorted({0, len(written), *(cut for cut in cuts if cut < len(written))})
    calls = Calls("auto", format_=format_)
    out = "".join(calls.push(written[start:end]) for start, end in itertools.pairwise(edges))
    rest, found = calls.end(), calls.found.calls()
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        ("weather", {"place": "Rome"})
    ] * num
    assert out + rest == text
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in found)
    assert "abcdef123" not in written or not found or found[0].id == "abcdef123"


ARGUMENTS = '{"place":"Rome"}'


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    ("format_", "written"),
    [
        (MISTRAL_LIST, f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
        (MISTRAL_LIST, f'a[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}, "id": "abcdef123"}}]'),
        (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
        (MISTRAL_IDS, f"a[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{ARGUMENTS}"),
        (MISTRAL_IDS, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ],
)
def test_a_free_output_writes_text_or_right_calls_of_mistrals(
    tmp_path: Path, format_: CallFormat, written: str, is_special: bool
) -> None:
    """With special tokens for their marks, as Mistral's tokenizers have them, and without."""
    path = save_checkpoint(tmp_path / "small") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    if is_special:
        tokenizer.add_special_tokens(list(MISTRAL_IDS.marks))
        tokenizer.save(str(path))
    grammars = Grammars(path, 2048, {2})
    codec = TextCodec(tokenizer, ChatTemplate("".join(format_.marks)))
    assert set(codec.form.calls.special) == (set(format_.marks) if is_special else set())
    grammar = codec.form.grammar(TOOLS, "auto")
    assert grammar is not None and grammars.why_not(grammar) is None
    ids = tokenizer.encode(written).ids
    state, allowed = grammars.state(grammar), []
    for token in ids:
        mask = state.allowed()
        assert mask is not None and mask[token], tokenizer.decode(ids[: len(allowed)], skip_special_tokens=False)
        allowed.append(set(np.flatnonzero(mask)))
        state.take(token)
    end = state.allowed()
    assert end is not None and end[2]
    place = next(index for index in range(len(ids)) if tokenizer.decode(ids[index:]).startswith("Rome"))
    assert {tokenizer.id_to_token(token) for token in allowed[place]} == {"R", "O"}
    detokenizer = Detokenizer(codec, frozenset(codec.form.calls.special.values()))
    calls = Calls("auto", format_=codec.form.calls)
    text = "".join(calls.push(detokenizer.push(token)) for token in ids)
    rest, found = calls.end(), calls.found.calls()
    assert text + rest == ("a" if written.startswith("a") else "") and len(found) == written.count("weather")


def test_one_that_must_call_keeps_to_the_key_of_its_format() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": "required"}
    request = parse_chat(json.dumps(body).encode())
    assert request.grammar is not None and "arguments" in request.grammar
    request.take_form(OutputForm(LLAMA))
    assert "parameters" in request.grammar


def test_a_free_output_writes_text_or_right_calls_of_llamas(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    grammar = OutputForm(LLAMA).grammar(TOOLS, "auto")
    assert grammar is not None and grammars.why_not(grammar) is None
    vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]

    def allowed(text: str, token: str) -> bool:
        taken = [vocab[{"\n": "Ċ", " ": "Ġ"}.get(c, c)] for c in text]
        mask = grammars.state(grammar, taken).allowed()
        return mask is not None and bool(mask[2 if token == "end" else vocab[token]])

    opened = LLAMA_CALL.partition("Rome")[0]
    assert allowed("any text", "x") and allowed("any text", "end") and allowed(LLAMA_CALL, "end")
    assert allowed(opened, "R") and not allowed(opened, "P") and not allowed(opened, "end")


def test_text_before_a_call_goes_out_at_once() -> None:
    calls = Calls("auto")
    assert calls.push("I look") == "I look" and calls.push(" <tool") == " " and calls.push("box") == "<toolbox"


@pytest.mark.parametrize(("parallel", "num"), [(False, 1), (True, 2), (None, 2)])
def test_calls_come_alone_where_they_may_not_be_parallel(parallel: bool | None, num: int) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "tools": tools,
        "parallel_tool_calls": parallel,
    }
    writer = ChatWriter("m", 0, include_usage=False, continuous=False)
    choice = Choice(0, parse_chat(json.dumps(body).encode()), None, frozenset(), writer)
    assert choice._reader is not None
    choice._reader.push(f"{CALL}\n{CALL}")
    pieces = choice.push(Token(0, 2, "stop")).calls
    assert (
        [piece.name for piece in pieces if piece.name] == ["weather"] * num == [c.function.name for c in choice.calls]
    )


@given(
    st.lists(st.integers(0, 200)), st.sampled_from([("auto", CALL), ("required", CALL[12:-13]), ("auto", LLAMA_CALL)])
)
def test_pieces_of_a_call_make_the_call(cuts: list[int], written: tuple[str, str]) -> None:
    """Name and id first, then arguments as they are written."""
    choice, text = written
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    calls, pieces = Calls(choice, format_=LLAMA if text == LLAMA_CALL else HERMES), []  # type: ignore[arg-type]
    for start, end in itertools.pairwise(edges):
        calls.push(text[start:end])
        pieces += calls.found.pieces()
    calls.end()
    (call,) = calls.found.calls()
    pieces += calls.found.pieces()
    first, *others = pieces
    assert (first.number, first.id, first.name) == (0, call.id, "weather")
    assert all(piece.id is None and piece.name is None for piece in others)
    assert "".join(piece.arguments for piece in pieces) == call.function.arguments == ARGUMENTS


def test_arguments_are_as_they_were_written() -> None:
    _, (call,) = read(['<tool_call>\n{"name": "weather", "arguments": {"place":"Zürich"}}\n</tool_call>'])
    assert call.function.arguments == '{"place":"Zürich"}'
    _, (call,) = read(['<tool_call>{"arguments": {"place":"Zürich"}, "name": "weather"}</tool_call>'])
    assert call.function.arguments == '{"place": "Zürich"}'


@pytest.mark.parametrize(
    "text",
    [
        "A call begins with <tool_call> in this format.",
        "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>{"name": "weather"}</tool_call>',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read([text]) == (text, [])
    assert read(list(text)) == (text, [])


def test_a_call_that_is_cut_off_ends_where_the_output_does() -> None:
    _, (call,) = read([CALL.partition("Rome")[0]])
    assert call.function.arguments == '{"place":"'


@pytest.mark.parametrize(
    ("format_", "text", "num"),
    [
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "\\ud800"}', 1),
        (MISTRAL_LIST, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "\\udc00"}, "id": "\\ud800"}]', 1),
        (LLAMA, '{"name": "\\ud800", "parameters": {}}', 0),
        (HERMES, '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>', 1),
    ],
)
def test_half_a_character_in_a_call_makes_no_answer_that_cannot_be_sent(
    format_: CallFormat, text: str, num: int
) -> None:
    calls = Calls("auto", format_=format_)
    shown = calls.push(text) + calls.end()
    assert len(calls.found.calls()) == num and msgspec.json.encode((shown, calls.found.calls()))
    for call in calls.found.calls():
        assert json.loads(call.function.arguments)["a"] in ("\ud800", "\udc00")
        assert call.for_template()["function"]["arguments"] == call.function.arguments


def test_half_a_character_in_a_custom_tools_input_stays_escaped() -> None:
    calls = CallItems([Declared(None, ResponseTool("custom", "f"))])
    item = calls.item("a", "b", "f", '{"input": "\\ud800"}', "completed")
    assert msgspec.json.encode(item) and item["input"] == '{"input": "\\ud800"}'


ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@pytest.mark.parametrize("is_special", [True, False])
def test_a_models_own_tokens_are_never_masked(tmp_path: Path, is_special: bool) -> None:
    """Added tokens are no text to a grammar, whether the tokenizer calls them special or not, as Qwen's and Hermes'."""
    path = save_checkpoint(tmp_path / "small") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(ADDED)
    tokenizer.save(str(path))
    codec = TextCodec(tokenizer, ChatTemplate("<tool_call>"))
    grammars, grammar = Grammars(path, 2048, {2}), codec.form.grammar(TOOLS, "auto")
    assert grammar is not None and grammars.why_not(grammar) is None
    for text in (CALL, f"<think>Rome?</think>{CALL}", "<think></think>", "<tool_call>x", f"{CALL}\n{CALL}"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        state = grammars.state(grammar)
        for position, token in enumerate(ids):
            mask = state.allowed()
            assert mask is not None and mask[token], (text, position)
            state.take(token)
    calls, detokenizer = Calls("auto"), Detokenizer(codec, frozenset(codec.form.calls.special.values()))
    ids = tokenizer.encode(f"<think>a</think>{CALL}", add_special_tokens=False).ids
    text = "".join(calls.push(detokenizer.push(token)) for token in ids)
    assert text == ("a" if is_special else "<think>a</think>")
    calls.end()
    assert len(calls.found.calls()) == 1


@pytest.mark.parametrize(
    ("written", "num"), [('{"name": "f", "arguments": {}}', 1), ('{"name": "f"', 0), ("[]", 0), ("1", 0)]
)
def test_one_that_must_call_is_read_whole(written: str, num: int) -> None:
    text, calls = read([written], "required")
    assert len(calls) == num and text == ("" if num else written)


def test_a_free_output_writes_text_or_right_calls(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    grammar = OutputForm().grammar(TOOLS, "auto")
    assert grammar is not None and grammars.why_not(grammar) is None
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    ids = {character: tokenizer[character] for character in tokenizer if len(character) == 1}

    def allowed(text: str, token: str) -> bool:
        state = grammars.state(grammar, [ids[{"\n": "Ċ", " ": "Ġ"}.get(c, c)] for c in text])
        return bool(state.allowed()[2 if token == "end" else ids[token]])

    assert allowed("any text", "x") and allowed("any text", "end")
    opened = CALL.partition("Rome")[0]
    assert allowed(opened, "R") and allowed(opened, "O")
    assert not allowed(opened, "P") and not allowed(opened, "end")
    assert allowed(CALL, "end")
    named = OutputForm().grammar(TOOLS, NamedTool(NamedFunction("weather")))
    assert named is not None and grammars.why_not(named) is None
    assert OutputForm().grammar(TOOLS, "none") is None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_a_schema_refers_to_lies_in_it(tmp_path: Path, choice: str) -> None:
    """As SDKs write schemas: with definitions, and with references to the whole of it."""
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    schema = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/To"}, "then": {"$ref": "#"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"To": {"enum": ["Rome"]}},
    }
    tools = msgspec.convert([{"type": "function", "function": {"name": "go", "parameters": schema}}], list[Tool])
    grammar = OutputForm().grammar([*tools, *TOOLS], choice)  # type: ignore[arg-type]
    assert grammar is not None and grammars.why_not(grammar) is None
    opening, end = ("<tool_call>\n", "\n</tool_call>") if choice == "auto" else ("", "")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]

    def ends(arguments: str) -> bool:
        text = f'{opening}{{"name": "go", "arguments": {arguments}}}{end}'
        allowed = grammars.state(grammar, [tokenizer[{"\n": "Ċ", " ": "Ġ"}.get(c, c)] for c in text]).allowed()
        return allowed is not None and bool(allowed[2])

    assert ends('{"to":"Rome"}') and ends('{"to":"Rome","then":{"to":"Rome"}}')
    assert not ends('{"to":"Rome","then":{"name":"go"}}')


def test_a_token_that_ends_an_output_ends_none_in_the_middle(tmp_path: Path) -> None:
    """Though the tokenizer has text for it, as here for token 2: the output would be taken for complete."""
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    assert 2 in vocab.values()
    for text, may_end in (('{"a":"x', False), ('{"a":"x"}', True)):
        grammar = json_grammar(
            {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
        )
        allowed = grammars.state(grammar, [vocab[character] for character in text]).allowed()
        assert allowed is not None and allowed[2] == may_end


def test_a_schema_that_no_output_keeps_is_refused(tmp_path: Path) -> None:
    grammars = Grammars(save_checkpoint(tmp_path / "small") / "tokenizer.json", 2048, {2})
    assert "no output" in (grammars.why_not(json_grammar({"$ref": "#"})) or "")


def test_an_output_that_cannot_be_followed_fails_alone(tmp_path: Path) -> None:
    """Ended as if it were complete, it would be taken for what it was to be."""
    grammars = Grammars(save_checkpoint(tmp_path / "small") / "tokenizer.json", 2048, {2})
    wide = json_grammar({"type": "object", "properties": {f"p{number}": {} for number in range(1500)}})
    assert grammars.why_not(wide) is None
    sampler = Sampler(2048, torch.device("cpu"), grammars)
    sampler.start(0, SamplingParams(temperature=0, grammar=wide))
    sampler.start(1, SamplingParams(temperature=0, grammar=OutputForm().grammar(TOOLS, "required")))
    logits, rows = torch.zeros(2, 2048), np.arange(2)
    for position in range(3):
        tokens, _ = sampler(logits, rows, np.full(2, position, dtype=np.int32))
    assert tokens[0] == NO_TOKEN and "smaller" in sampler.failed[0]
    assert tokens[1] != NO_TOKEN and 1 not in sampler.failed


@pytest.fixture(scope="module")
def many_tokens(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """The grammars of 20,000 tokens of several letters each, as usual tokenizers have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    drawn = np.random.default_rng(0).choice(list("etaoinshrdlucmfw 0123456789".replace(" ", "\u0120")), (20_000, 6))
    tokens = dict.fromkeys([*letters, *("".join(row[: 2 + number % 5]) for number, row in enumerate(drawn))])
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path := tmp_path_factory.mktemp("many") / "tokenizer.json"))
    return Grammars(path, len(tokens) + 1, [len(tokens)])


def followed(grammars: Grammars, schema: dict[str, object], most: int) -> int:
    """Return the number of tokens, drawn among those that are allowed, after which a schema is too large to follow."""
    state, rng = grammars.state(json_grammar(schema)), np.random.default_rng(1)
    for number in range(most):
        if (allowed := state.allowed()) is None:
            return number
        state.take(int(rng.choice(np.flatnonzero(allowed))))
    return most


@pytest.mark.long
def test_a_pattern_that_takes_long_at_each_token_ends_its_own_output(many_tokens: Grammars) -> None:
    """In each of 64 outputs it took 8 ms of every step, and memory for 250,000 states until all had ended."""
    ways = [{"type": "string", "pattern": f"^(.)*{number}.{{300}}$"} for number in range(60)]
    assert followed(many_tokens, {"anyOf": ways}, 25) < 25
    assert followed(many_tokens, {"type": "string", "pattern": "^(.)*[ae].{60}$"}, 800) < 800


def test_a_long_text_without_a_choice_takes_no_time_at_each_token(many_tokens: Grammars) -> None:
    """All of the rest was followed at each token: 9 ms of every step for each of up to 128 outputs."""
    begin_s = time.thread_time()
    assert followed(many_tokens, {"const": "x" * 60_000}, 20) == 20
    assert time.thread_time() - begin_s < 0.1


def test_usual_patterns_and_many_properties_do_not(many_tokens: Grammars) -> None:
    uuid = {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"}
    fields = {"a": uuid, "b": {"type": "array", "items": uuid}, "c": {"type": "string", "maxLength": 200}}
    fields |= {"d": {"type": "string", "format": "date-time"}, "e": {"type": "string", "format": "uri"}}
    assert followed(many_tokens, {"type": "object", "properties": fields, "required": [*fields]}, 150) == 150
    assert (
        followed(many_tokens, {"type": "object", "properties": dict.fromkeys(map(str, range(300)), uuid)}, 150) == 150
    )
    assert followed(many_tokens, {"enum": [f"value number {number}" for number in range(2500)]}, 10) == 10


def test_nothing_is_kept_of_a_schema_that_is_too_long(many_tokens: Grammars) -> None:
    """The answers to 64 of them were remembered with their text, which may be more than a mebibyte each."""
    tracemalloc.start()
    try:
        for number in range(20):
            reason = many_tokens.why_not(json_grammar({"enum": [f"{number} " + "x" * (1 << 20)]}))
            assert reason is not None and reason.startswith("it is longer than")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 << 20
