"""The reader of outputs: what each family writes, in every split, cut off anywhere."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.rings import examples, few
from xrunner.server.api.calls import types_of
from xrunner.server.api.form import OutputForm
from xrunner.server.api.formats import HERMES, Thought, call_format, call_formats, marks_of
from xrunner.server.api.reader import OutputReader
from xrunner.server.api.tools import Tool

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = msgspec.convert(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
    ],
    list[Tool],
)
FORMATS = call_formats()
HARMONY = FORMATS["gpt-oss"]
ROME, OSLO = {"city": "Rome"}, {"city": "Oslo"}
W = "get_weather"
JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
QWEN_CALL = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
CODER = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
SEP, CALL_BEGIN, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
PYTHONIC = "[get_weather(city='Rome', days=3), now()]"
THOUGHT = "<think>\nHm.\n</think>\n\n"
Row = tuple[str, str, str, str, list[tuple[str, Any]]]
OUTPUTS: list[Row] = [
    ("Hermes", f"Sure. {QWEN_CALL}\n{QWEN_CALL}\nOK", "", "Sure. \nOK", [(W, ROME), (W, ROME)]),
    ("Hermes", f"{THOUGHT}{QWEN_CALL}\n", "Hm.", "", [(W, ROME)]),
    (
        "Hermes",
        '<tool_call>{"arguments": {"city": "}{\\""}, "name": "get_weather"}</tool_call>',
        "",
        "",
        [(W, {"city": '}{"'})],
    ),
    (
        "Hermes",
        '<tool_call>{"name":"get_weather","arguments":"{\\"city\\": \\"Rome\\"}"}</tool_call>',
        "",
        "",
        [(W, ROME)],
    ),
    (
        "Hermes",
        '<tool_call>{"name": "nope", "arguments": {\n "a": [1, {}]\n}}</tool_call>',
        "",
        "",
        [("nope", {"a": [1, {}]})],
    ),
    (
        "Hermes",
        "A call begins with <tool_call> in this format.",
        "",
        "A call begins with <tool_call> in this format.",
        [],
    ),
    ("Hermes", f"<tool_call>\n{CODER}\n</tool_call>", "", f"<tool_call>\n{CODER}\n</tool_call>", []),
    (
        "Hermes",
        '<tool_call>{"name": "get_weather"}</tool_call>',
        "",
        '<tool_call>{"name": "get_weather"}</tool_call>',
        [],
    ),
    ("Hermes", "<think>a <tool_call> b</think>no", "a <tool_call> b", "no", []),
    (
        "Qwen3-Coder",
        f"I look.\n<tool_call>\n{CODER}\n</tool_call>",
        "",
        "I look.\n",
        [(W, {"city": "Rome", "days": 3})],
    ),
    ("Qwen3-Coder", f"{CODER}{CODER}", "", "", [(W, {"city": "Rome", "days": 3})] * 2),
    ("Qwen3-Coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "", [("now", {})]),
    (
        "GLM 4.5 and later",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "",
        "",
        [(W, ROME)],
    ),
    ("Seed-OSS", f"<seed:tool_call>\n{CODER}\n</seed:tool_call>", "", "", [(W, {"city": "Rome", "days": 3})]),
    (
        "MiniMax M2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        "",
        [(W, ROME), ("now", {})],
    ),
    (
        "DeepSeek V3",
        f"{THOUGHT}So.<｜tool▁calls▁begin｜>{CALL_BEGIN}get_weather{SEP}{json.dumps(ROME)}{CALL_END}"
        f"{CALL_BEGIN}get_weather{SEP}{json.dumps(OSLO)}{CALL_END}<｜tool▁calls▁end｜>",
        "Hm.",
        "So.",
        [(W, ROME), (W, OSLO)],
    ),
    (
        "DeepSeek V3",
        f"<｜tool▁calls▁begin｜>{CALL_BEGIN}function{SEP}get_weather\n```json\n{json.dumps(ROME)}\n```{CALL_END}\n"
        f"{CALL_BEGIN}function{SEP}now\n```json\n{{}}\n```{CALL_END}<｜tool▁calls▁end｜>",
        "",
        "",
        [(W, ROME), ("now", {})],
    ),
    (
        "Kimi K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        "",
        [(W, ROME)],
    ),
    (
        "Mistral before tokenizer v11",
        f'[TOOL_CALLS] [{JSON_CALL[:-1]}, "id": "abcdef123"}}, {JSON_CALL}]',
        "",
        "",
        [(W, ROME)] * 2,
    ),
    ("Mistral before tokenizer v11", '[TOOL_CALLS]["Rome"]', "", '[TOOL_CALLS]["Rome"]', []),
    (
        "Mistral",
        '[THINK]Hm.[/THINK]So[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
        "Hm.",
        "So",
        [("now", {}), (W, ROME)],
    ),
    ("Mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "Rome"}', "", "", [(W, ROME)]),
    ("Phi-4-mini", f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>", "", "", [(W, ROME)]),
    ("Phi-4-mini", f"functools[{JSON_CALL},{JSON_CALL}]", "", "", [(W, ROME)] * 2),
    ("Phi-4-mini", "Use functools in Python.", "", "Use functools in Python.", []),
    ("Nemotron", f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>", "", "", [(W, ROME)]),
    ("Hunyuan", f"<tool_calls>\n[{JSON_CALL}]\n</tool_calls>", "", "", [(W, ROME)]),
    (
        "Command A",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Rome"}}\n]<|END_ACTION|>',
        "Hm.",
        "",
        [(W, ROME)],
    ),
    (
        "Gemma 4",
        '<|tool_call>call:get_weather{city:<|"|>Ro"}me<|"|>,days:3,o:{a:[true]}}<tool_call|>',
        "",
        "",
        [(W, {"city": 'Ro"}me', "days": 3, "o": {"a": [True]}})],
    ),
    (
        "FunctionGemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
        "",
        "",
        [(W, ROME)],
    ),
    (
        "OLMo 3",
        '<function_calls>\nget_weather(city="Rome")\nnow()\n</function_calls>',
        "",
        "",
        [(W, ROME), ("now", {})],
    ),
    (
        "LFM2",
        f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>Done.",
        "",
        "Done.",
        [(W, {"city": "Rome", "days": 3}), ("now", {})],
    ),
    ("Llama 3.1 and later", JSON_CALL.replace("arguments", "parameters"), "", "", [(W, ROME)]),
    (
        "Llama 3.1 and later",
        f'{JSON_CALL}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        "",
        "",
        [(W, ROME), ("now", {})],
    ),
    (
        "Llama 3.1 and later",
        'Example: {"name": "x", "parameters": {}} done.',
        "",
        'Example: {"name": "x", "parameters": {}} done.',
        [],
    ),
    ("Llama 3.1 and later", f"{PYTHONIC}", "", "", [(W, {"city": "Rome", "days": 3}), ("now", {})]),
    ("Llama 3.1 and later", "[1] and [see(x)] {} get_weather()", "", "[1] and [see(x)] {} get_weather()", []),
    ("gpt-oss", f'{ANALYSIS}{TO}{{"city": "Rome"}} and more<|call|>', "Think.", "", [(W, ROME)]),
    (
        "gpt-oss",
        f'{ANALYSIS} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Ro\\"}}me"}}',
        "Think.",
        "",
        [(W, {"city": 'Ro"}me'})],
    ),
    (
        "gpt-oss",
        f'{ANALYSIS}{TO.replace("get_weather", "nope")}{{"city": "Rome"}}<|call|>',
        "Think.",
        "",
        [("nope", ROME)],
    ),
    ("gpt-oss", f"{ANALYSIS}<|channel|>final<|message|>Rome.<|return|>", "Think.", "Rome.", []),
    ("gpt-oss", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO}{{}}", "", "I look.", [(W, {})]),
    ("gpt-oss", "Rome.", "", "Rome.", []),
    ("gpt-oss", f"{ANALYSIS}<|channel|>fin", "Think.", "", []),
    (
        "gpt-oss",
        f"<|channel|>final<|message|>One.<|end|><|start|>{'assistant' * 80}",
        "",
        f"One.{'assistant' * 80}",
        [],
    ),
]


def reader_of(family: str, output: str, choice: str = "auto") -> OutputReader:
    thought = marks_of(output, ())
    form = OutputForm(FORMATS[family], thought=thought and Thought(thought, False))
    reader = form.reader(choice, types=types_of(TOOLS))  # type: ignore[arg-type]
    assert reader is not None
    return reader


def read(reader: OutputReader, pieces: list[str], *, is_end: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    said = [reader.push(piece) for piece in pieces] + ([reader.push("", is_end=True)] if is_end else [])
    assert not is_end or not reader._held
    calls = [(call.function.name, call.function.arguments) for call in reader.found.calls()]
    return "".join(one.reasoning for one in said), "".join(one.text for one in said), calls


@pytest.mark.parametrize(("family", "output", "reasoning", "text", "calls"), OUTPUTS)
def test_what_a_family_writes_is_read(family: str, output: str, reasoning: str, text: str, calls: list[Any]) -> None:
    said = read(reader_of(family, output), [output])
    assert said[:2] == (reasoning, text)
    assert [(name, json.loads(arguments)) for name, arguments in said[2]] == calls
    assert read(reader_of(family, output), list(output)) == said


@pytest.mark.parametrize(("family", "output"), [row[:2] for row in OUTPUTS])
def test_every_prefix_in_every_split_is_read_to_its_end(family: str, output: str) -> None:
    """However the output is cut into two pieces, and wherever it ends, it is read in the same way."""
    pairs = [(length, cut) for length in range(len(output) + 1) for cut in range(max(length, 1))]
    for length, cut in random.Random(0).sample(pairs, min(len(pairs), examples(20_000, 60))):
        whole, halves = read(reader_of(family, output), [output[:length]]), [output[:cut], output[cut:length]]
        assert sum(map(len, whole[:2])) <= length
        assert read(reader_of(family, output), halves) == whole
        read(reader_of(family, output, "none" if family == "gpt-oss" else "auto"), halves, is_end=False)


@given(st.lists(st.integers(0, 300)), st.sampled_from(OUTPUTS))
def test_the_cut_into_pieces_does_not_matter(cuts: list[int], row: Row) -> None:
    family, output, *_ = row
    edges = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    pieces = [output[start:end] for start, end in itertools.pairwise(edges)]
    reader, found = reader_of(family, output), []
    for piece in pieces:
        reader.push(piece)
        found += reader.found.pieces()
    reader.push("", is_end=True)
    found += reader.found.pieces()
    for number, call in enumerate(reader.found.calls()):
        first, *others = (piece for piece in found if piece.number == number)
        assert (first.name, first.id) == (call.function.name, call.id)
        assert not any(piece.id or piece.name for piece in others)
        assert first.arguments + "".join(piece.arguments for piece in others) == call.function.arguments


MARKS = sorted(
    {text for each in FORMATS.values() for text in (*each.begins, *each.ends, *(o.close for o in each.openings))}
    | {text for each in FORMATS.values() for o in each.openings for text in (o.inner, *o.tags[1:])} - {""}
    | {
        "<think>",
        "</think>",
        "{",
        "}",
        '"',
        "\\",
        "[",
        "]",
        "(",
        ")",
        "\n",
        " ",
        ",",
        "a",
        "get_weather",
        ':"',
        "<|message|>",
    }
    | {opening.filled("get_weather") for each in FORMATS.values() for opening in each.openings}
)


TO_CITY = "<parameter=city></function>"
DSML_CALL = '<｜DSML｜ invoke name="get_weather"></｜DSML｜ invoke>'


@example("gpt-oss", ["a<|end|><|start|>assistant<|channel|>final", "<|message|>", "a<|return|>"], False, False)
@example("gpt-oss", ["<|call|>)<|start|><|end|><|start|><|end|><|channel|>final", "<|message|>"], False, False)
@example("gpt-oss", ["<|call|> <|message|>a<|call|>"], False, False)
@example("gpt-oss", ["<|channel|>final<|mess"], False, False)
@example("Seed-OSS", ["<function=get_weather><seed:tool_call><function=get_weather>", TO_CITY, "a"], False, False)
@example("DeepSeek V3.2", [DSML_CALL, "<｜DSML｜ calls>", DSML_CALL], False, False)
@example("OLMo 3", ["<think>get_weather(</function_calls><function_calls>))[ "], True, False)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(MARKS), max_size=12), st.booleans(), st.booleans())
def test_any_sequence_of_marks_is_read_to_its_end(family: str, parts: list[str], think: bool, must: bool) -> None:
    """Nothing hangs or is lost, and pieces of one character make the same answer as the whole."""
    output = "".join(parts)

    def reader() -> OutputReader:
        return reader_of(family, "<think></think>" if think else "", "required" if must else "auto")

    said = read(reader(), [output])
    assert read(reader(), list(output)) == said
    assert sum(map(len, said[:2])) <= len(output)


@pytest.mark.parametrize(
    ("family", "repeated"),
    few(
        [
            ("Hermes", '<tool_call>{"name":'),
            ("Llama 3.1 and later", "[get_weather("),
            ("Mistral", '[TOOL_CALLS]f[ARGS]{"a'),
            ("gpt-oss", "<|start|><|channel|>"),
            ("Hermes", "<tool_call>x"),
            ("Hermes", '<tool_call>{"a":1}'),
            ("Llama 3.1 and later", '{"name": ['),
            ("Mistral before tokenizer v11", '[TOOL_CALLS]["a'),
            ("Mistral", "[TOOL_CALLS]f[ARGS]{}"),
            ("Qwen3-Coder", "<function=f><parameter=a>"),
            ("Gemma 4", '<|tool_call>call:f{a:<|"|>'),
        ],
        4,
    ),
)
def test_an_output_full_of_marks_takes_no_longer_than_other_text(family: str, repeated: str) -> None:
    """All of the rest was once read at each mark, so that eight times the marks took 64 times as long."""
    took = []
    for marks in (4_000, 32_000):
        text, reader = repeated * marks, reader_of(family, "")
        begin_s = time.process_time()
        _, shown, calls = read(reader, [text[at : at + 4096] for at in range(0, len(text), 4096)])
        took.append(time.process_time() - begin_s)
        assert len(calls) < 1000 and len(shown) <= len(text)
    assert took[1] < 24 * max(took[0], 0.01)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", "Hermes"),
        ("{{ '<tool_call>\n<function=f>' }}", "Qwen3-Coder"),
        ("{{ '<tool_call>f<arg_key>' }}", "GLM 4.5 and later"),
        ("{{ '<|python_tag|>' }}", "Llama 3.1 and later"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name.}',
            "Llama 3.1 and later",
        ),
        ("{{ '[TOOL_CALLS] [' }}", "Mistral before tokenizer v11"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "Mistral"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "DeepSeek V3"),
        ("{{ '<|tool_call>call:' }}", "Gemma 4"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_says_how_calls_are_written(template: str, expected: str | None) -> None:
    assert call_format(template) is (None if expected is None else FORMATS[expected])
    assert str(OutputForm.of(template, {})).startswith(f"format of calls: {expected or 'none found'}")


def test_the_start_says_where_strict_is_not_held() -> None:
    for name, says in (("Hermes", False), ("Gemma 4", True), ("GLM 4.5 and later", True)):
        assert ("strict functions are not held" in str(OutputForm(FORMATS[name]))) == says


def test_tokens_say_how_calls_are_written_if_the_template_does_not() -> None:
    assert call_format("", {"<|tool_call|>": 7}) is FORMATS["Phi-4-mini"]
    assert call_format("<tool_call>", {"<|tool_call|>": 7}) is FORMATS[HERMES]
    assert call_format("", {mark: number for number, mark in enumerate(HARMONY.found)}) is HARMONY


@pytest.mark.parametrize(
    ("output", "num"), [('{"name": "f", "arguments": {}}', 1), ('{"name": "f"', 0), ("[]", 0), ("1", 0)]
)
def test_one_that_must_call_is_read_whole(output: str, num: int) -> None:
    for each in FORMATS:
        if each != "gpt-oss":
            _, text, calls = read(reader_of(each, "", "required"), [output])
            assert len(calls) == num and text == ("" if num else output)


def test_text_before_a_call_goes_out_at_once() -> None:
    reader = reader_of("Hermes", "")
    assert [reader.push(piece).text for piece in ("I look", " <tool", "box")] == ["I look", " ", "<toolbox"]


def test_arguments_are_as_they_were_written() -> None:
    written = '{"city":"Z\\u00fcrich Zürich", "b" : 1.0}'
    _, _, calls = read(
        reader_of("Hermes", ""), [f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>']
    )
    assert calls == [(W, written)]


@pytest.mark.parametrize(
    ("family", "output", "arguments"),
    [
        ("Hermes", QWEN_CALL.partition("Rome")[0], '{"city": "'),
        ("gpt-oss", f'{TO}{{"city": "Ro', '{"city": "Ro'),
        ("Qwen3-Coder", CODER.partition("<parameter=days")[0], '{"city": "Rome"'),
    ],
)
def test_a_call_that_is_cut_off_ends_where_the_output_does(family: str, output: str, arguments: str) -> None:
    assert read(reader_of(family, ""), [output]) == ("", "", [(W, arguments)])


@pytest.mark.parametrize(
    ("types", "written", "value"),
    [
        ("string", "3", "3"),
        ("integer", "3", 3),
        ("boolean", "True", True),
        ("object", '{"a": [1]}', {"a": [1]}),
        ("integer", "three", "three"),
        (["string", "null"], "null", None),
        (["string", "null"], "3", "3"),
        ("number", "NaN", "NaN"),
        (None, "3", 3),
        (None, "a\n\nb", "a\n\nb"),
    ],
)
def test_parameters_between_tags_have_the_types_of_the_schema(types: Any, written: str, value: Any) -> None:
    schema = {} if types is None else {"type": types}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    tools = msgspec.convert([{"type": "function", "function": function}], list[Tool])
    reader = OutputReader(FORMATS["Qwen3-Coder"], types=types_of(tools))
    _, _, ((_, arguments),) = read(reader, [f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"])
    assert json.loads(arguments) == {"a": value} and type(json.loads(arguments)["a"]) is type(value)


@pytest.mark.parametrize(
    ("family", "output", "num"),
    [
        ("Mistral", '[TOOL_CALLS]f[ARGS]{"a": "\\ud800"}', 1),
        (
            "Mistral before tokenizer v11",
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": "\\udc00"}, "id": "\\ud800"}]',
            1,
        ),
        ("Llama 3.1 and later", '{"name": "\\ud800", "parameters": {}}', 0),
        ("Hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>', 1),
        ("OLMo 3", '<function_calls>\nf(a="\\ud800")\n</function_calls>', 1),
    ],
)
def test_half_a_character_in_a_call_makes_no_answer_that_cannot_be_sent(family: str, output: str, num: int) -> None:
    reader = reader_of(family, "")
    _, shown, calls = read(reader, [output])
    assert len(calls) == num and msgspec.json.encode((shown, reader.found.calls()))
    for call in reader.found.calls():
        assert json.loads(call.function.arguments)["a"] in ("\ud800", "\udc00")
        assert call.for_template()["function"]["arguments"] == call.function.arguments


def test_a_prompt_that_opens_reasoning_is_answered_without_a_second_mark() -> None:
    form = OutputForm.of("</think>", {}).after("<think>\n")
    reader = form.reader("none")
    assert reader is not None and reader.is_thinking
    assert read(reader, list("<think>\nHm.\n</think>\n\nYes.")) == ("Hm.", "Yes.", [])


def test_each_format_knows_its_tokens() -> None:
    added = {
        token: number for number, token in enumerate(("[TOOL_CALLS]", "[ARGS]", "<|other|>", '<|"|>', "<|tool_call>"))
    }
    mistral, gemma = (FORMATS[name].written_with(added) for name in ("Mistral", "Gemma 4"))
    assert set(mistral.special) == {"[TOOL_CALLS]", "[ARGS]"} and set(gemma.special) == {'<|"|>', "<|tool_call>"}
    assert mistral.free == frozenset(range(5))
