"""Chats, choices, log probabilities and stop strings, through the client that users have."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes import (
    CHAT_TEMPLATE,
    FakeExecutor,
    byte_codec,
    byte_tokenizer,
    eventually,
    expected_tokens,
    fake_app,
    fake_engine,
    running,
)
from tests.rings import few
from xgpt.core.errors import InputError
from xrunner.grammar import Grammars
from xrunner.server.api import rendering
from xrunner.server.api.chat import ChatTemplate, load_chat_template
from xrunner.server.api.chat_request import ChatMessage
from xrunner.server.api.directory import read_tokenizer
from xrunner.server.api.text import load_tokenizer
from xrunner.server.api.tools import FunctionCall, ToolCall

TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]
RENDERED = "<system>Be brief.</s><user>hé</s><assistant>"
TOKENS = expected_tokens(TOKENIZER.encode(RENDERED).ids, 500)
TEXT = TOKENIZER.decode(TOKENS)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec())) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=8)
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.token_ids == TOKENS[:8]
    assert choice.message.content == TOKENIZER.decode(TOKENS[:8])
    assert (answer.object, answer.usage.completion_tokens) == ("chat.completion", 8)
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(RENDERED).ids)


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=300, stream=True, stream_options={"include_usage": True}
        )
    )
    *tokens, end = chunks
    assert [chunk.choices[0].delta.role for chunk in tokens] == ["assistant"] + [None] * 299
    assert "".join(chunk.choices[0].delta.content for chunk in tokens) == TOKENIZER.decode(TOKENS[:300])
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * 299 + ["length"]
    assert (end.choices, end.usage.completion_tokens) == ([], 300)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    answer = client.completions.create(
        model="fake", prompt=[[1, 2], [3]], max_tokens=2, stream=True, stream_options=options
    )
    usages = [chunk.usage for chunk in answer]
    assert [usage.completion_tokens for usage in usages] == [1, 2, 3, 4, 4]
    assert {usage.prompt_tokens for usage in usages} == {3}


def test_a_chat_without_max_tokens_fills_the_context(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="fake", messages=MESSAGES).usage
    assert usage.total_tokens == 512


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, n=2, stream=stream)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            tokens[choice.index] += choice.token_ids
    assert tokens == {0: TOKENS[:5], 1: TOKENS[:5]}


def test_choices_of_several_prompts_stand_together(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[[1], [2, 3]], max_tokens=2, n=2)
    assert [choice.token_ids for choice in answer.choices] == [[1, 2], [1, 2], [5, 6], [5, 6]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    wanted = {"model": "fake", "messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**wanted).choices[0].logprobs.content
    assert [entry.token for entry in content] == [TOKENIZER.decode([token]) for token in TOKENS[:3]]
    assert [entry.logprob for entry in content] == [-1, -1, -1]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-1, -2]] * 3
    chunks = list(client.chat.completions.create(**wanted, stream=True))
    assert [chunk.choices[0].logprobs.content for chunk in chunks] == [[entry] for entry in content]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    prompt = TOKENIZER.encode("A").ids
    choice = client.completions.create(model="fake", prompt=prompt, max_tokens=3, logprobs=2).choices[0]
    assert choice.text == "ABC"
    assert choice.logprobs.tokens == ["A", "B", "C"]
    assert choice.logprobs.token_logprobs == [-1, -1, -1]
    assert choice.logprobs.top_logprobs == [{"A": -1, "B": -2}, {"B": -1, "C": -2}, {"C": -1, "D": -2}]
    assert choice.logprobs.text_offset == [0, 1, 2]
    none = client.completions.create(model="fake", prompt=prompt, max_tokens=1, logprobs=0).choices[0]
    assert none.logprobs.top_logprobs == [{"A": -1}]  # as in vLLM; typed clients expect an object for each token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "AB"), (True, "ABCDE")])
def test_a_stop_string_over_several_tokens(client: openai.OpenAI, stream: bool, include: bool, text: str) -> None:
    answer = client.completions.create(
        model="fake",
        prompt=TOKENIZER.encode("A").ids,
        max_tokens=100,
        stop=["CDE", "nowhere"],
        stream=stream,
        extra_body={"include_stop_str_in_output": include},
    )
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "stop"
    assert sum(len(choice.token_ids) for choice in choices) == 5


def test_a_stop_string_frees_the_slot() -> None:
    executor = FakeExecutor(step_s=0.002)
    engine = fake_engine(executor, max_batch=1)
    with (
        running(fake_app(engine, codec=byte_codec())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        for _ in range(3):
            client.completions.create(model="fake", prompt=TOKENIZER.encode("A").ids, max_tokens=500, stop="D")
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        assert 'xgpt_requests_total{finish_reason="stop"} 3.0' in metrics
        assert eventually(lambda: engine.pool.reserved_blocks == 0)


def test_what_may_begin_a_stop_string_comes_out_at_the_end(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="fake", prompt=TOKENIZER.encode("A").ids, max_tokens=3, stop="CDE"
    ).choices[0]
    assert (choice.text, choice.finish_reason) == ("ABC", "length")


def test_stop_token_ids(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="fake", prompt=[40], max_tokens=50, extra_body={"stop_token_ids": [43], "ignore_eos": True}
    ).choices[0]
    assert (choice.token_ids, choice.finish_reason) == ([40, 41, 42, 43], "stop")


def test_what_the_template_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the chat template refuses them: who is tool"):
        client.chat.completions.create(model="fake", messages=[{"role": "tool", "content": "x", "name": "y"}])


def test_content_in_parts(client: openai.OpenAI) -> None:
    """Parts are lines, as in vLLM: two texts without anything between them would read as one word."""
    parts = [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "é"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=2)
    rendered = RENDERED.replace("hé", "h\né")
    assert answer.choices[0].token_ids == expected_tokens(TOKENIZER.encode(rendered).ids, 2)


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2).choices[0].message
    history = [*MESSAGES, first.model_dump() | {"annotations": [], "audio": None}, MESSAGES[1]]
    assert client.chat.completions.create(model="fake", messages=history, max_tokens=2).choices


ODD_SCHEMAS = {
    "not": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
    "if": {"type": "object", "allOf": [{"if": {"required": ["a"]}, "then": {"required": ["b"]}}]},
    "oneOf": {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    "lookahead": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!-)[a-z]+$"}}},
    "uniqueItems": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    "long": {"type": "object", "properties": {f"p{number}": {"description": "x" * 1000} for number in range(100)}},
}


@pytest.mark.parametrize("kind", ODD_SCHEMAS)
def test_a_schema_that_cannot_be_enforced_refuses_no_free_chat(kind: str, tmp_path: Path) -> None:
    """Its function may still be called; arguments of the others keep to their schemas."""
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    plain = {"type": "object", "properties": {"place": {"type": "string"}}}
    schemas = {"odd": ODD_SCHEMAS[kind], "plain": plain}
    tools = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in schemas.items()]
    grammars = Grammars(path, 1000, {2})
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec(), grammars=grammars)) as url:
        body = {"model": "fake", "messages": MESSAGES, "max_tokens": 2, "tools": tools}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"tool_choice": "required"})
        assert answer.status_code == 400 and "tools" in answer.json()["error"]["message"]


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(300)}}


@pytest.mark.parametrize("kind", ["one", "nested", "alternatives"])
def test_a_schema_that_no_output_could_follow_is_refused_before(kind: str, tmp_path: Path) -> None:
    """600 optional properties were accepted, and the answer was 500."""
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    many = WIDE | {"properties": {f"p{number}": {} for number in range(600)}}
    schema = {
        "one": many,
        "nested": {"type": "object", "properties": {"a": {"type": "array", "items": many}}, "required": ["a"]},
        "alternatives": {"anyOf": [WIDE, WIDE | {"description": "x"}]},
    }[kind]
    grammars = Grammars(path, 1000, {2})
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec(), grammars=grammars)) as url:
        function = {"name": "f", "parameters": schema}
        formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for fields, refused in (
            ({"response_format": formatted}, "response_format: json_schema.schema has an object with 600 optional"),
            ({"structured_outputs": {"json": schema}}, "structured_outputs: json has an object with 600 optional"),
            ({"tools": [{"type": "function", "function": function}], "tool_choice": "required"}, "tools: [0].function"),
            ({"tools": [{"type": "function", "function": function | {"strict": True}}]}, "tools: [0].function"),
            ({"tools": [{"type": "function", "function": function}]}, None),
            ({"response_format": formatted | {"json_schema": {"name": "x", "schema": WIDE}}}, None),
        ):
            body = {"model": "fake", "messages": MESSAGES, "max_tokens": 2} | fields
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert (answer.status_code, refused or "") == (400 if refused else 200, refused or "")
            assert refused is None or answer.json()["error"]["message"].startswith(refused)


def test_a_streams_head_does_not_wait_for_its_first_token() -> None:
    """Proxies, and Node's fetch, give up on a connection that stays silent."""
    with running(fake_app(fake_engine(FakeExecutor(step_s=4.0)), codec=byte_codec())) as url:
        body = {"model": "fake", "messages": MESSAGES, "max_tokens": 1, "stream": True}
        begin_s = time.monotonic()
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as answer:
            assert answer.status_code == 200
            assert time.monotonic() - begin_s < 3
            assert "[DONE]" in answer.read().decode()


def test_a_model_is_retrieved(client: openai.OpenAI) -> None:
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_the_chosen_token_is_among_the_most_probable(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[5, 6], max_tokens=3, logprobs=2)
    scores = answer.choices[0].logprobs
    assert all(token in top for token, top in zip(scores.tokens, scores.top_logprobs, strict=True))


def test_pieces_of_a_character_tell_their_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, logprobs=True)
    alphabet = {id_: text for text, id_ in TOKENIZER.get_vocab().items()}
    for token, entry in zip(answer.choices[0].token_ids, answer.choices[0].logprobs.content, strict=True):
        assert entry.bytes is not None
        if token in alphabet and "\ufffd" in entry.token:
            assert bytes(entry.bytes).decode(errors="replace") == entry.token and len(entry.bytes) == 1


def test_a_refusal_is_text(client: openai.OpenAI) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    url = str(client.base_url).removesuffix("v1/")
    body = {"model": "fake", "messages": [*MESSAGES, refusal, *MESSAGES], "max_tokens": 1}
    assert httpx.post(f"{url}v1/chat/completions", json=body).status_code == 200
    body = {"messages": [*MESSAGES, refusal], "continue_final_message": True}
    tokens = httpx.post(f"{url}tokenize", json=body).json()["tokens"]
    assert httpx.post(f"{url}detokenize", json={"tokens": tokens}).json()["prompt"].endswith("no")
    assert httpx.post(f"{url}tokenize", json=body | {"messages": MESSAGES}).status_code == 400


def test_ids_of_other_servers_fit_mistrals_templates() -> None:
    calls = [ToolCall(FunctionCall("f", "{}"), id_) for id_ in ("call_0123456789abcdef", "abcdefgh1")]
    said, result = ChatMessage("assistant", tool_calls=calls), ChatMessage("tool", "x", tool_call_id=calls[0].id)
    shown = [message.for_template(short_ids=True) for message in (said, result)]
    first, second = (call["id"] for call in shown[0]["tool_calls"])
    assert shown[1]["tool_call_id"] == first and len(first) == 9 and first.isalnum() and second == "abcdefgh1"
    assert said.for_template()["tool_calls"][0]["id"] == calls[0].id


def test_a_message_is_continued(client: openai.OpenAI) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The answer is "}]
    body = {"add_generation_prompt": False, "continue_final_message": True}
    answer = client.chat.completions.create(model="fake", messages=begun, max_tokens=2, extra_body=body)
    prompt = RENDERED + "The answer is "
    assert answer.choices[0].token_ids == expected_tokens(TOKENIZER.encode(prompt).ids, 2)


def test_a_chat_of_many_roles_is_refused() -> None:
    """Each role that is not known is compared with those that are: 65,000 of them took a thread for seconds."""
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="33 different roles are too many; at most 32"):
        template.render([{"role": f"role-{number}", "content": "x"} for number in range(33)])


def test_a_message_that_is_shown_in_another_way_is_looked_for_in_little_time() -> None:
    """Python's `rfind` takes quadratic time, and no other thread runs meanwhile: a million characters took minutes."""
    template = ChatTemplate("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    messages = [
        {"role": "user", "content": "a" * 100_000},
        {"role": "assistant", "content": "ab</think>" + "a" * 100_000},
    ]
    begin_s = time.thread_time()
    with pytest.raises(ValueError, match="leaves out the last message"):
        template.render(messages, continue_final_message=True)
    assert time.thread_time() - begin_s < 0.3


@pytest.mark.parametrize("tokenizer", [None, byte_codec(template=None)])
def test_no_template_no_chat(tokenizer) -> None:
    with (
        running(fake_app(fake_engine(FakeExecutor()), codec=tokenizer)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="fake has no chat template") as caught:
            client.chat.completions.create(model="fake", messages=MESSAGES)
        assert caught.value.code == "no_chat_template"


def test_a_text_that_no_context_holds_is_not_even_tokenised(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="9000000 characters are too many: this model") as caught:
        client.completions.create(model="fake", prompt="x" * 9_000_000)
    assert caught.value.code == "context_length_exceeded"


TEMPLATES = {
    "ours": CHAT_TEMPLATE,
    "blocks": """
{% for message in messages %}
    {% if loop.first %}
{{ bos_token }}{{ tools_note | default("no tools") }}
    {% endif %}
    {% if message['role'] == 'skip' %}
        {% continue %}
    {% endif %}
{{ message | tojson }}
    {% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endif %}
{% endfor %}
{{ {"b": 1, "a": "<é>"} | tojson(indent=2) }}""",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, bos_token="<s>", eos_token="</s>")
    messages = [*MESSAGES, {"role": "assistant", "content": "<b>&"}]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_templates_have_helpers_and_no_way_out() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]).isdigit()
    assert ChatTemplate("{{ enable_thinking }}").render([], variables={"enable_thinking": False}) == "False"
    for escape in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ 1 + 'x' }}"):
        with pytest.raises(ValueError):
            ChatTemplate(escape).render([])
    with pytest.raises(InputError, match="line 1"):
        ChatTemplate("{% if %}")


def test_load_chat_template(tmp_path) -> None:
    def rendered() -> str:
        template = load_chat_template(tmp_path)
        assert template is not None
        return template.render([])

    assert load_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{ bos_token }}"})
    )
    assert rendered() == "<s>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config.write_text(json.dumps({"bos_token": "<s>", "chat_template": named}))
    assert rendered() == "yes"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert rendered() == "file <s>"
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    codec = load_tokenizer(tmp_path)
    assert codec is not None and codec.chat_template is not None
    for broken in ("{", "[]"):
        config.write_text(broken)
        with pytest.raises(InputError, match="tokenizer_config"):
            load_tokenizer(tmp_path)


def test_a_template_sees_no_tools_and_no_documents_as_none() -> None:
    names = ("tools", "documents")
    source = (
        "".join(f"{{% if {name} is not none %}}{name} {{% endif %}}" for name in names) + "{{ messages[0].content }}"
    )
    assert ChatTemplate(source).render([{"role": "user", "content": "hi"}]) == "hi"
    given = {"documents": [{"title": "a"}]}
    assert ChatTemplate(source).render([{"role": "user", "content": "hi"}], variables=given) == "documents hi"


@pytest.mark.parametrize(
    "source",
    few(
        [
            "{{ 'x' * 10**10 }}",
            "{{ [1] * (2**40) }}",
            "{{ 10 ** (10 ** 9) }}",
            "{{ (2**60) * ('x' * 2) }}",
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ '%0999999999d' % 1 }}{{ '%01999999999d' % 1 }}",
            "{{ 'x'.center(10 ** 10) }}",
            "{{ 'x' | center(10 ** 10) }}",
            "{% set n = namespace(t='x' * 1000) %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            "{% set n = namespace(t=[1]) %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}",
            "{{ (range(10) | list) * 10 ** 9 }}",
            "{{ 'x' * (65 * 2 ** 20) }}",
            "{{ strftime_now('%999999999d' * 9) }}{{ 1 / 0 }}",
        ],
        2,
    ),
)
def test_a_hostile_template_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first was computed while the checkpoint was loaded: ten gigabytes."""
    monkeypatch.setattr("xrunner.server.api.rendering.RENDER_S", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, InputError)):  # an expression of constants is computed when it is compiled
        ChatTemplate(source).render([])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert ChatTemplate("{{ 2 * 3 ** 2 }}{{ 'ab' * 3 }}{{ 1.5 * 2 }}").render([]) == "18ababab3.0"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[" * 1_000_000),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer.json", TOKENIZER.to_str().replace('"a":', '"aa":1099511627776,"a":').encode()),
        ("tokenizer.json", TOKENIZER.to_str().replace('_processor":null', f'_processor":{[5] * 40_000}').encode()),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}'),
        ("chat_template.jinja", b"x" * 300_000),
        ("chat_template.jinja", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}"),
        ("chat_template.jinja", b"{{ messages[0].content }}{{ '\\ud800' }}"),
    ],
)
def test_a_hostile_checkpoint_is_refused_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError):
        load_chat_template(tmp_path)
        load_tokenizer(tmp_path)


LETTERS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|(?:\r?\n)+|\s+(?!\S)|\s+"


LONG = ("(a+)+$", r"((\w+)\s?)*$", r"\s*\s*\s*x", r"\p{L}*\w*[a-z]*[A-Z]*\d*;", "(?:ab)*(?:ab)*(?:ab)*(?:ab)*c")
"""The first takes exponential time for a prompt of forty letters, the third hours for one of many blanks."""
READ = """
import os, sys
from pathlib import Path
from xgpt.core.errors import InputError
from xrunner.server.api import directory

directory.MOST_TRIAL_S = 0.1
for path in sys.argv[1:]:
    try:
        directory.read_tokenizer(Path(path))
    except InputError as error:
        print(error, flush=True)
os._exit(0)
"""


def with_pattern(directory: Path, pattern: str) -> Path:
    directory.mkdir()
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    whole = json.loads(byte_tokenizer().to_str()) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]}}
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    return directory


def test_an_expression_that_takes_long_is_refused(tmp_path: Path) -> None:
    """In a process of its own: the library goes on until the process ends."""
    read_tokenizer(with_pattern(tmp_path / "letters", LETTERS))
    paths = [with_pattern(tmp_path / str(i), pattern) for i, pattern in enumerate(LONG)]
    ran = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("cannot encode a text") == len(LONG), ran.stdout


def test_a_text_at_which_the_tokenizer_fails_is_refused(tmp_path: Path) -> None:
    """The library panics, which is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": r"(\x{2603}+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(json.loads(byte_tokenizer().to_str()) | {"pre_tokenizer": split})
    )
    with running(fake_app(fake_engine(FakeExecutor()), codec=load_tokenizer(tmp_path))) as url:
        body = {"model": "fake", "prompt": "\u2603" * 100 + "!"}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "cannot encode" in answer.json()["error"]["message"]


def test_many_added_tokens_take_time_in_proportion(tmp_path: Path) -> None:
    """Each was compared with all: 200,000 took minutes."""
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_str())
    tokens = {str(number + 300): {"content": f"<t{number}>"} for number in range(20_000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    started = time.process_time()
    read_tokenizer(tmp_path)
    assert time.process_time() - started < 5


TWICE = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": TWICE}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b" * 100}),
        ("normalizer", {"type": "Prepend", "prepend": "b" * 1000}),
        ("decoder", {"type": "Sequence", "decoders": TWICE}),
    ],
)
def test_a_tokenizer_that_multiplies_its_text_is_refused(part: str, value: dict[str, Any], tmp_path: Path) -> None:
    """A prompt of "aaaa" took 11.3 GiB."""
    whole = json.loads(byte_tokenizer().to_str()) | {part: value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(InputError, match=r"may make a text .* times longer, but at most 64"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "normalizer",
    [
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFKC"},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
                {"type": "Lowercase"},
            ],
        },
    ],
)
def test_the_normalisers_of_real_models_are_accepted(normalizer: dict[str, Any], tmp_path: Path) -> None:
    whole = json.loads(byte_tokenizer().to_str()) | {"normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert read_tokenizer(tmp_path) is not None


def test_a_process_that_renders_and_is_stopped_or_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 1.0)
    template = ChatTemplate("{{ messages | length }}")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        assert template.render([]) == "0"
        process = rendering._idle[-1]._process
        os.kill(process.pid, number)
        if number == signal.SIGSTOP:
            with pytest.raises(ValueError, match="longer than"):
                template.render([])
        else:
            process.wait()
        assert template.render([]) == "0"


def test_two_threads_may_want_the_last_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one had seen a process that the first one took, and its request ended with a server error."""

    class Emptied(list[Any]):
        def __bool__(self) -> bool:
            return True

    monkeypatch.setattr(rendering, "_idle", idle := Emptied())
    assert rendering.render("{{ word }}", {"word": "hello"}) == "hello"
    idle.pop().close()
