"""What chats' outputs are made of: reasoning, an answer, calls; through HTTP, and what outputs are held to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.attack.target import save_checkpoint
from tests.fakes import VOCAB_SIZE, SayingExecutor, byte_tokenizer, fake_app, fake_engine, running
from xrunner.grammar import Grammars, json_rule
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.form import OutputForm
from xrunner.server.api.formats import ALL_MARKS, Marks, call_formats, thought_after
from xrunner.server.api.parsing import parse_chat
from xrunner.server.api.text import TextCodec
from xrunner.server.api.tools import Tool

LLAMA, MISTRAL_LIST = call_formats()["Llama 3.1 and later"], call_formats()["Mistral before tokenizer v11"]
NAMES = ("Hermes", "Mistral", "DeepSeek V3", "Qwen3-Coder", "gpt-oss")
HERMES, MISTRAL, DEEPSEEK, QWEN_CODER, HARMONY = (call_formats()[name] for name in NAMES)
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if open %}<think>
{% elif closed %}<think>

</think>

{% endif %}{% endif %}{# past reasoning ends at </think> #}"""
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
TOOLS = msgspec.convert([TOOL], list[Tool])
VALUE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
STRICT = msgspec.convert([TOOL | {"function": TOOL["function"] | {"strict": True}}], list[Tool])
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place":"Rome"}}\n</tool_call>'


def harmony_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in HARMONY.found])
    return tokenizer


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """URLs of a server of a model that writes reasoning between marks, and of one that writes on channels."""
    with ExitStack() as at_end:
        urls = {}
        for family, tokenizer in (("think", byte_tokenizer()), ("harmony", harmony_tokenizer())):
            codec, engine = TextCodec(tokenizer, ChatTemplate(TEMPLATE)), fake_engine(SayingExecutor(tokenizer))
            app = fake_app(engine, codec=codec, eos_token_ids=frozenset({VOCAB_SIZE - 1}))
            urls[family] = at_end.enter_context(running(app))
        yield urls


def ask(url: str, said: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": f"SAY[{said}]YAS"}]} | fields
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def ask_streamed(url: str, said: str, **fields: Any) -> dict[str, str]:
    """The members of all deltas, put together; arguments of calls as `arguments`."""
    body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": f"SAY[{said}]YAS"}]} | fields
    parts: dict[str, str] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                delta = choice["delta"]
                assert not (delta.get("content") and delta.get("reasoning_content"))
                for call in delta.pop("tool_calls", ()):
                    parts["arguments"] = parts.get("arguments", "") + call["function"]["arguments"]
                for name, value in delta.items():
                    parts[name] = parts.get(name, "") + value
    return parts


THINKING = {
    "<think>\nLet me see\n</think>\n\nIt is Rome.": ("Let me see", "It is Rome.", None),
    "\n<think>hm</think>Rome ": ("hm", "Rome ", None),
    "It is <think> Rome": (None, "It is <think> Rome", None),
    "<thinking is hard": (None, "<thinking is hard", None),
    "<think>never ends\n": ("never ends", "", None),
    f"<think>I look.</think>\n{CALL}": ("I look.", None, '{"place":"Rome"}'),
    f"<think>{CALL}</think>no": (CALL, "no", None),
}
HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CHANNELS = {
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Rome.": (
        "Hm.",
        "Rome.",
        None,
    ),
    "<|channel|>final<|message|>Rome.": (None, "Rome.", None),
    "Rome.": (None, "Rome.", None),
    f'{HM}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"place":"Rome"}}<|call|>': (
        "Hm.",
        None,
        '{"place":"Rome"}',
    ),
    ' to=functions.weather<|channel|>commentary json<|message|>{"place":"Rome"}': (None, None, '{"place":"Rome"}'),
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary"
    '<|message|>{"place":"Rome"}<|call|>': (None, "I look.", '{"place":"Rome"}'),
    "<|channel|>analysis<|message|>never ends": ("never ends", "", None),
}
WRITTEN = [("think", *each) for each in THINKING.items()] + [("harmony", *each) for each in CHANNELS.items()]


@pytest.mark.parametrize(("family", "said", "right"), WRITTEN)
def test_reasoning_and_calls_come_apart_from_the_answer(
    servers: dict[str, str], family: str, said: str, right: tuple[str | None, str | None, str | None]
) -> None:
    url = servers[family]
    reasoning, content, arguments = right
    choice = ask(url, said, tools=[TOOL])
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    calls = message.get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])
    assert choice["finish_reason"] == ("stop" if arguments is None else "tool_calls")
    parts = ask_streamed(url, said, tools=[TOOL])
    assert (parts.get("reasoning_content"), parts["content"] or None) == (reasoning, content or None)
    assert parts.get("arguments") == arguments


@pytest.mark.parametrize(("family", "begin"), [("think", "<think>"), ("harmony", "<|channel|>analysis<|message|>")])
def test_stop_strings_end_the_answer_and_not_the_reasoning(servers: dict[str, str], family: str, begin: str) -> None:
    end = "</think>" if family == "think" else "<|end|><|start|>assistant<|channel|>final<|message|>"
    said = f"{begin}I restate Question: here.{end}Answer: 42 Question: no"
    choice = ask(servers[family], said, stop=["Question:"])
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I restate Question: here.", "Answer: 42 ")
    parts = ask_streamed(servers[family], said, stop=["Question:"])
    assert choice["finish_reason"] == "stop" and parts["content"] == "Answer: 42 "


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({"choice": ["yes", 'né/"']}, ["yes", 'né/"'], ["no", "yesno", ""]),
        ({"regex": r"a/b\d{2}"}, ["a/b12"], ["a/b1"]),
        ({"json": VALUE}, ['{"n": 1}'], ['{"n": 3}']),
        ({"json_object": True}, ["{}", '{"a" : [1]}'], ["1"]),
    ],
)
def test_vllms_restrictions_hold(small: Path, wanted: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammars, tokenizer, _ = grammars_of(small, [], special=False)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "structured_outputs": wanted}
    grammar = parse_chat(json.dumps(body).encode()).grammar
    assert all(holds(grammars, tokenizer, grammar, text) for text in right)
    assert not any(holds(grammars, tokenizer, grammar, text) for text in wrong)


def test_a_prompt_says_whether_an_output_begins_with_reasoning(servers: dict[str, str]) -> None:
    url = servers["think"]
    said = "I see\n</think>\n\nRome"
    opened = ask(url, said, chat_template_kwargs={"open": True})["message"]
    assert (opened["reasoning_content"], opened["content"]) == ("I see", "Rome")
    closed = ask(url, "<think>a</think>", chat_template_kwargs={"closed": True})["message"]
    assert "reasoning_content" not in closed and closed["content"] == "<think>a</think>"


def test_tokens_of_reasoning_are_counted(servers: dict[str, str]) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "SAY[<think>abc</think>d]YAS"}]}
    think, harmony = (
        httpx.post(f"{servers[family]}/v1/chat/completions", json=body).json()["usage"] for family in servers
    )
    assert think["completion_tokens_details"] == {"reasoning_tokens": len("abc</think>")}
    assert "completion_tokens_details" not in harmony


@pytest.mark.parametrize("marks", ALL_MARKS)
def test_a_template_or_a_tokenizer_says_what_stands_around_reasoning(marks: Marks) -> None:
    assert OutputForm.of(f"content.split('{marks.end}')", {}).marks == marks
    assert OutputForm.of("", {marks.begin.strip(): 1, marks.end: 2}).marks == marks
    assert OutputForm.of("", {}).marks is None
    assert thought_after("<a>", None) is None


def holds(grammars: Grammars, tokenizer: Tokenizer, grammar: str | None, text: str) -> bool:
    """Whether an output may be this text, and end there."""
    assert grammar is not None and grammars.why_not(grammar) is None, grammars.why_not(grammar or "")
    state = grammars.state(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        mask = state.allowed()
        if mask is None or not mask[token]:
            return False
        state.take(token)
    mask = state.allowed()
    return mask is not None and bool(np.flatnonzero(mask)[0] >= 0 and mask[2])


OBJECT_CALL = '{"name": "weather", "arguments": {"place":"Rome"}}'


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("small")) / "tokenizer.json"


def grammars_of(path: Path, added: list[str], *, special: bool) -> tuple[Grammars, Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer.from_file(str(path))
    tokens = [AddedToken(text, special=special, normalized=False) for text in added]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    saved = path.with_name(f"{len(added)}{special}.json")
    tokenizer.save(str(saved))
    return Grammars(saved, 2048, {2}), tokenizer, {text: tokenizer.token_to_id(text) for text in added}


@pytest.mark.parametrize("added", [[], ["<think>", "</think>"]])
def test_an_output_that_is_held_to_something_may_think_first(small: Path, added: list[str]) -> None:
    grammars, tokenizer, tokens = grammars_of(small, added, special=False)
    form = OutputForm.of("</think>", tokens)
    for grammar_of, right, wrong in (
        (lambda form: form.grammar((), "none", json_rule(VALUE)), '{"n":1}', '{"n":3}'),
        (lambda form: form.grammar(TOOLS, "required"), OBJECT_CALL, OBJECT_CALL.replace("Rome", "Paris")),
    ):
        free, opened, closed = (grammar_of(form.after(prompt)) for prompt in ("a", "<think>\n", "</think>\n\n"))
        for text, may in ((right, True), (wrong, False)):
            assert holds(grammars, tokenizer, free, text) == may
            assert holds(grammars, tokenizer, free, f"<think>Hm, {{.\n</think>\n\n{text}") == may
            assert holds(grammars, tokenizer, opened, f"Hm, {{.</think>\n{text}") == may
            assert holds(grammars, tokenizer, closed, text) == may
        assert not holds(grammars, tokenizer, opened, right)
        assert not holds(grammars, tokenizer, closed, f"<think>a</think>{right}")


@pytest.mark.parametrize(
    ("form", "call"),
    [
        (OutputForm(HERMES), CALL),
        (OutputForm(LLAMA), '{"name": "weather", "parameters": {"place":"Rome"}}'),
        (OutputForm(MISTRAL), '[TOOL_CALLS]weather[ARGS]{"place":"Rome"}'),
        (OutputForm(MISTRAL_LIST), '[TOOL_CALLS][{"name": "weather", "arguments": {"place":"Rome"}}]'),
        (
            OutputForm(DEEPSEEK),
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"place":"Rome"}<｜tool▁call▁end｜>```',
        ),
        (OutputForm(QWEN_CODER), '<tool_call>{"name": "weather", "arguments": {"place":"Rome"}}</tool_call>'),
    ],
)
def test_an_output_with_functions_and_a_format_is_one_or_the_other(small: Path, form: OutputForm, call: str) -> None:
    grammars, tokenizer, _ = grammars_of(small, [], special=False)
    grammar = form.grammar(STRICT, "auto", json_rule(VALUE))
    assert holds(grammars, tokenizer, grammar, call) and holds(grammars, tokenizer, grammar, '{"n":2}')
    assert not holds(grammars, tokenizer, grammar, "text") and not holds(grammars, tokenizer, grammar, '{"n":3}')
    assert not holds(grammars, tokenizer, grammar, call.replace("Rome", "Paris"))
    assert form.grammar(STRICT, "none", json_rule(VALUE)) == form.grammar((), "auto", json_rule(VALUE))


def test_outputs_of_gpt_oss_are_held_on_their_channels(small: Path) -> None:
    grammars, tokenizer, tokens = grammars_of(small, list(HARMONY.found), special=True)
    form = OutputForm.of("", tokens)
    analysis = "<|channel|>analysis<|message|>Hm, {.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place":"Rome"}'
    final = '<|channel|>final<|message|>{"n":1}'
    free = form.grammar(STRICT, "auto")
    for text in ("Rome.", analysis, f"{analysis}{call}", "<|channel|>final<|message|>Rome.", call):
        assert holds(grammars, tokenizer, free, text)
    assert not holds(grammars, tokenizer, free, call.replace("Rome", "Paris"))
    both, required, formatted = (
        form.grammar(STRICT, "auto", json_rule(VALUE)),
        form.grammar(TOOLS, "required", json_rule(VALUE)),
        form.grammar((), "none", json_rule(VALUE)),
    )
    for begun in ("", analysis):
        assert [holds(grammars, tokenizer, each, begun + call) for each in (both, required, formatted)] == [1, 1, 0]
        assert [holds(grammars, tokenizer, each, begun + final) for each in (both, required, formatted)] == [1, 0, 1]


HEADS = {
    "Hermes": ('<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>", HERMES),
    "spaces": ('<tool_call>{ "name":"weather" , "arguments":', " }</tool_call>", HERMES),
    "other key": ('<tool_call>{"name": "weather", "parameters": ', "}</tool_call>", HERMES),
    "Llama": ('{"name": "weather", "parameters": ', "}", LLAMA),
    "Mistral's list": ('[TOOL_CALLS][{"name": "weather", "arguments": ', "}]", MISTRAL_LIST),
    "Mistral": ("[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]now[ARGS]{}", MISTRAL),
    "Mistral's ids": ("[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]", "", MISTRAL),
    "DeepSeek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        DEEPSEEK,
    ),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        DEEPSEEK,
    ),
    "gpt-oss": ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>", "", HARMONY),
}


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("kind", HEADS)
def test_a_free_output_writes_text_or_calls_with_json(small: Path, kind: str, with_tokens: bool) -> None:
    """The arguments are any JSON. Those of a strict function follow its schema. Other text is free."""
    head, end, format_ = HEADS[kind]
    texts = [
        *format_.begins,
        *format_.ends,
        "[ARGS]",
        "[CALL_ID]",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|message|>",
    ]
    marks = [*dict.fromkeys(text for text in [*texts, "<|constrain|>"] if text[0] in "<[" and with_tokens)]
    if format_ is HARMONY and not with_tokens:
        return  # this format is recognised by its tokens
    grammars, tokenizer, tokens = grammars_of(small, marks, special=True)
    form = OutputForm(format_.written_with(tokens))
    free, strict = (form.grammar(tools, "auto") for tools in (TOOLS, STRICT))
    for document in DOCUMENTS:
        assert holds(
            grammars, tokenizer, free, f"So.{head}{document}{end}" if format_ is not HARMONY else head + document
        ), document
    for grammar in (free, strict):
        assert holds(grammars, tokenizer, grammar, 'Any text: {"name": ') and holds(grammars, tokenizer, grammar, "")
        assert holds(grammars, tokenizer, grammar, head.replace("weather", "nope") + '{"a": 1}' + end)
        assert holds(grammars, tokenizer, grammar, f'{head}{{"place": "Rome"}}{end}')
        assert not any(holds(grammars, tokenizer, grammar, head + document) for document in NO_DOCUMENTS)
        is_string = holds(grammars, tokenizer, grammar, head + '"{\\"place\\": \\"Rome\\"}"' + end)
        assert is_string == (grammar == free and format_ in (HERMES, LLAMA, MISTRAL_LIST))
    assert not holds(grammars, tokenizer, strict, f'{head}{{"place": "Paris"}}{end}')


TAGGED = {
    "Qwen3-Coder": (
        "<tool_call>\n<function=weather>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="weather">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "GLM 4.5 and later": ("<tool_call>weather\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
}


@pytest.mark.parametrize(
    ("kind", "with_tokens"),
    [(kind, tokens) for kind in TAGGED for tokens in (True, False) if tokens or kind[:3] != "GLM"],
)
def test_parameters_of_a_strict_function_have_its_types(small: Path, kind: str, with_tokens: bool) -> None:
    head, parameter, end = TAGGED[kind]
    format_ = call_formats()[kind]
    marks = [text for text in (*format_.begins, *format_.ends) if text.endswith("tool_call>")] * with_tokens
    if kind.startswith("GLM"):  # a name ends where a token follows
        marks += ["</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    grammars, tokenizer, tokens = grammars_of(small, marks, special=True)
    form = OutputForm(format_.written_with(tokens))
    properties = {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}, "note": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["place"]}
    strict = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
    tools = msgspec.convert([strict, {"type": "function", "function": {"name": "now"}}], list[Tool])
    grammar = form.grammar(tools, "auto")

    def is_held(*given: tuple[str, str]) -> bool:
        text = f"So. {head}{''.join(parameter.format(*each) for each in given)}{end}"
        return not holds(grammars, tokenizer, grammar, text)

    assert grammar is not None and holds(grammars, tokenizer, grammar, "Any text: <function=, <invoke.")
    assert holds(grammars, tokenizer, grammar, f"{head}{end}".replace("weather", "now"))
    assert not is_held(("place", "Rome"))
    assert not is_held(("place", "Oslo"), ("days", "3"), ("note", "a <b>\n</c>"))
    assert is_held(("place", "Paris")) and is_held(("place", "Rome"), ("days", "three")) and is_held(("days", "3"))
    assert is_held(("place", "Rome"), ("nope", "x"))


DOCUMENTS = (
    *("{}", "{ }", "{\n}", '{"place":"Rome"}', '{"place": "Rome"}', '{"place" : "Rome"}', '{ "place":"Rome" }'),
    *('{\n  "place": "Rome",\n  "days": [1, 2]\n}', '{\t"a":\t1\r\n}', '{"b":1,"a":"x"}', '{"a":"x","b":1,"c":null}'),
    *(
        '{"a":"caf\\u00e9"}',
        '{"a":"a\\u00fcb \\ud83d\\ude00"}',
        '{"a":"\\u0000"}',
        '{"a":"a\\/b"}',
        '{"a":"\\b\\f\\n\\r\\t"}',
    ),
    *(
        '{"a":"\\"q\\" \\\\n"}',
        '{"a":"\x7f"}',
        '{"a":"Zürich 😀"}',
        '{"\\u0061":"x"}',
        '{"":""}',
        '{"a b":1}',
        '{"a":" "}',
    ),
    *('{"n":1.0}', '{"n":-0}', '{"n":1e2}', '{"n":1E+2}', '{"n":0.5e-7}', '{"n":12345678901234567890}', '{"n":true}'),
    *('{"a":[]}', '{"a":[ ]}', '{"a":[1 , 2]}', '{"a":[[],{}]}', '{"a":{"b":{"c":{}}}}', '{"a":[{"b":[null,false]}]}'),
    '{"a":"' + "x" * 300 + '"}',
)
NO_DOCUMENTS = ("<", '{"a":1,}', '{"a":01}', "{a:1}", '{"a":"\\x"}', '{"a":"\n"}', "{'a':1}")


def test_there_are_as_many_documents_as_were_refused_before() -> None:
    assert len(DOCUMENTS) == 37 and all(isinstance(json.loads(each), dict) for each in DOCUMENTS)


@pytest.mark.parametrize("marks", [[], ["<think>", "</think>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"]])
def test_reasoning_is_free_also_where_it_quotes_a_call(small: Path, marks: list[str]) -> None:
    grammars, tokenizer, tokens = grammars_of(small, marks, special=False)
    form = OutputForm.of("</think><tool_call>", tokens)
    quoted = f'maybe {CALL[:50]} no, {{"name": "weather", "arguments": {{"place"'
    for opened, begin in ((form.after("<think>\n"), ""), (form.after("a"), "<think>\n")):
        for tools, choice, value, right, wrong in (
            (STRICT, "auto", None, CALL, CALL.replace("Rome", "Paris")),
            (TOOLS, "auto", None, CALL.replace("Rome", "Paris"), CALL.replace('"Rome"', "Rome")),
            (STRICT, "required", None, OBJECT_CALL, OBJECT_CALL.replace("Rome", "Paris")),
            ((), "none", json_rule(VALUE), '{"n": 1}', '{"n": 3}'),
        ):
            grammar = opened.grammar(tools, choice, value)  # type: ignore[arg-type]
            if not marks and begin and choice == "auto":
                assert grammar is None
                continue
            assert holds(grammars, tokenizer, grammar, f"{begin}{quoted}</think>\n\n{right}")
            assert not holds(grammars, tokenizer, grammar, f"{begin}{quoted}</think>\n\n{wrong}")
            assert holds(grammars, tokenizer, grammar, begin + quoted) == (choice == "auto")


def sentencepiece() -> Tokenizer:
    """As Llama 2's: words begin with a mark, and a decoder takes the first space away."""
    words = ["<unk>", "▁Rome", "▁is", "▁a", "▁city"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_goes_on_with_the_text_of_its_prompt(stream: bool) -> None:
    """Its first space is one of the text."""
    with running(fake_app(fake_engine(SayingExecutor(byte_tokenizer(), 2)), codec=TextCodec(sentencepiece()))) as url:
        body = {"model": "fake", "prompt": [3, 4], "max_tokens": 1, "stream": stream}
        answer = httpx.post(f"{url}/v1/completions", json=body).text
        echoed = httpx.post(f"{url}/v1/completions", json=body | {"echo": True}).text
    assert '"text":" is"' in answer and '"text":"a city is"' in echoed


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed_and_scored_without_an_output(servers: dict[str, str], stream: bool) -> None:
    url = servers["think"]
    body = {"model": "fake", "prompt": "ab", "max_tokens": 0, "echo": True, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body).text
    assert answer.count('"text":"ab","token_ids":[]') == 1 and '"finish_reason":"length"' in answer
    if not stream:
        assert json.loads(answer)["usage"]["completion_tokens"] == 0


def test_reasoning_reaches_templates_by_the_names_that_they_have() -> None:
    for name in ("reasoning_content", "thinking"):
        shown = ChatTemplate(
            "{% for message in messages %}{{ message." + name + " }}|{{ message.content }}{% endfor %}"
        )
        message = {"role": "assistant", "content": "Rome", "reasoning": "hm", "reasoning_content": "hm"}
        assert shown.render([message]) == "hm|Rome"
        # gpt-oss' template refuses both beside calls.
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        assert ("hm" in shown.render([message | {"tool_calls": [call]}])) == (name == "reasoning_content")


def test_a_model_answers_to_each_of_its_names() -> None:
    names = ("gpt-4o", "org/model")
    with running(
        fake_app(fake_engine(SayingExecutor(byte_tokenizer())), names=names, codec=TextCodec(byte_tokenizer()))
    ) as url:
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == list(names)
        for name in names:
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert httpx.post(f"{url}/v1/completions", json=body).json()["model"] == name
            assert httpx.get(f"{url}/v1/models/{name}").json()["id"] == name
        refused = httpx.post(f"{url}/v1/completions", json={"model": "fake", "prompt": "a"})
    assert refused.status_code == 404 and "gpt-4o" in refused.json()["error"]["message"]
