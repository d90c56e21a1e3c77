"""What /v1/completions accepts: anything else is a 400 that names the field."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes import SPEC
from xgpt.core.policies import Pool
from xrunner.cluster import messages as m
from xrunner.generation import Generation
from xrunner.server.api.allowance import OutputRule, check_tokens
from xrunner.server.api.errors import ApiError
from xrunner.server.api.parsing import parse_chat, parse_completion

GOOD = {"model": "fake", "prompt": [1, 2, 3]}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
CAPACITY = Pool(400, 1)


def parse(**fields: object):
    return parse_completion(json.dumps(GOOD | fields).encode())


def parse_chat_with(**fields: object):
    return parse_chat(json.dumps(CHAT | fields).encode())


def error_of(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request = parse(**fields)
        request.sampling(0)
        for prompt in request.prompts(1000):
            check_tokens(list(prompt), request, SPEC, CAPACITY, OutputRule())
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"top_p": -0.1}, "top_p", ">= 0"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "never shown"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"top_k": 10**20}, "top_k", "<= 2147483647"),
        ({"top_k": 2**31}, "top_k", "<= 2147483647"),
        ({"max_tokens": 10**20}, "max_tokens", "<= 2147483647"),
        ({"max_tokens": 2**31}, "max_tokens", "<= 2147483647"),
        ({"output_length": 2**31}, "output_length", "<= 2147483647"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids", "<= 2147483647"),
        ({"min_p": 2}, "min_p", "<= 1"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"best_of": 2}, "best_of", "send n"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"logprobs": True}, "logprobs", "Expected `int"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["x", 1]}, "stop", "Expected `str"),
        ({"stop": ["x"] * 17}, "stop", "length <= 16"),
        ({"stop_token_ids": [1000]}, "stop_token_ids", "token id 1000 is outside"),
        ({"suffix": "x"}, "suffix", "does not insert text before a suffix"),
        ({"seed": 2**63}, "seed", "9223372036854775807"),
        ({"presence_penalty": 3}, "presence_penalty", "<= 2"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "not a token id"),
        ({"max_tokens": 0}, "max_tokens", "only with echo"),
        ({"max_tokens": -3}, "max_tokens", ">= 0"),
        ({"max_tokens": "4"}, "max_tokens", "Expected `int"),
        ({"max_tokens": True}, "max_tokens", "Expected `int"),
        ({"max_tokens": 510}, "max_tokens", "context length is 512"),
        ({"max_tokens": 398}, "max_tokens", "K/V memory"),
        ({"output_length": 4, "stop": "x"}, "output_length", "cannot stop earlier"),
        ({"output_length": 0}, "output_length", ">= 1"),
        ({"output_length": 17}, "output_length", "more than max_tokens, 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream: true"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[1], []]}, "prompt", "empty"),
        ({"prompt": [1, [2]]}, "prompt", "mixes token ids and texts"),
        ({"prompt": [1, 1000]}, "prompt", "token id 1000 is outside the vocabulary; send ids from 0 to 999"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [10**40]}, "prompt", "outside the vocabulary"),
        ({"prompt": [1] * 512}, "prompt", "context length is 512"),
        ({"prompt": [1] * 1001}, "prompt", "at most 1000"),
        ({"prompt": None}, "prompt", "Expected"),
        ({"frobnicate": 1}, "frobnicate", "unknown field"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options", "unknown field `x`"),
    ],
)
def test_refused_with_the_field(fields: dict[str, object], param: str, says: str) -> None:
    error = error_of(**fields)
    assert error.status == 400
    assert error.param == param
    assert says in str(error)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "send at least one"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages", "length >= 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "accepts only text"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "which differs"),
        ({"tools": [{}]}, "tools", "missing required field `function`"),
        (
            {"tools": [{"type": "function", "function": {"name": "f\n"}}]},
            "tools",
            "tools[0].function.name: a function's name has 1 to 128 letters",
        ),
        ({"tool_choice": "required"}, "tool_choice", "required needs tools to call"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"prompt": "x"}, "prompt", "unknown field"),
    ],
)
def test_chats_refused_with_the_field(fields: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_with(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in str(caught.value)


HINTS = {
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "skip_special_tokens": True,
    "add_special_tokens": False,
}
OF_CHATS = {
    "verbosity": "low",
    "reasoning_effort": "low",
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "a"},
    "audio": None,
    "web_search_options": None,
}


@pytest.mark.parametrize("field", HINTS)
def test_hints_that_cannot_change_a_text_are_taken(field: str) -> None:
    parse(**{field: HINTS[field]})
    parse_chat_with(**{field: HINTS[field]})


@pytest.mark.parametrize("field", OF_CHATS)
def test_hints_of_chats_are_taken(field: str) -> None:
    parse_chat_with(**{field: OF_CHATS[field]})


@pytest.mark.parametrize(
    "message",
    [
        {"content": None},
        {"content": None, "refusal": "I cannot."},
        {"content": "b", "reasoning_content": "because"},
        {"content": "b", "annotations": [], "audio": None, "id": 17, "type": "text"},
        {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_an_assistants_message_is_taken_as_clients_keep_it(message: dict[str, object]) -> None:
    request = parse_chat_with(messages=[{"role": "user", "content": "hi"}, {"role": "assistant"} | message])
    shown = request.messages[1].for_template()
    assert shown.get("reasoning_content") == message.get("reasoning_content")
    assert shown["content"] is not None


def test_a_least_length_is_taken_where_nothing_else_ends_the_output() -> None:
    request = parse(min_tokens=4, max_tokens=4, stop=["x"], stop_token_ids=[3])
    assert request.ignore_eos and not request.stops and not request.stop_token_ids
    assert parse(min_tokens=2, max_tokens=4, ignore_eos=True).ignore_eos
    assert "min_tokens" in str(error_of(min_tokens=2, max_tokens=4))


def test_counts_may_be_written_with_a_point() -> None:
    request = parse(max_tokens=4.0, n=2.0, prompt="4.0, 5.0")
    assert (request.max_tokens, request.n, request.prompt) == (4, 2, "4.0, 5.0")
    assert parse_completion(b'{"model": "fake", "prompt": "a", "max_tokens": 1e2}').max_tokens == 100
    assert "got `float`" in str(error_of(max_tokens=4.5))
    assert "got `float`" in str(error_of(max_tokens=4.0, prompt=[1.0]))


def test_only_allowed_functions_are_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    named = {"type": "function", "function": {"name": "a"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    request = parse_chat_with(tools=tools, tool_choice=choice)
    assert request.chosen_tools == "required"
    assert [tool.function.name for tool in request.tools] == ["a"]
    with pytest.raises(ApiError, match="no function 'c'"):
        named = named | {"function": {"name": "c"}}
        parse_chat_with(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": {"tools": [named]}})


def test_top_p_of_zero_leaves_the_most_probable_token() -> None:
    assert 0 < parse(top_p=0).sampling(0).top_p < 1e-6


def test_a_prompt_is_cut_at_its_beginning() -> None:
    tokens = list(range(100))
    assert parse(truncate_prompt_tokens=16).kept_of(tokens, 50) == tokens[-16:]
    assert parse(truncate_prompt_tokens=-1).kept_of(tokens, 50) == tokens[-49:]
    assert parse().kept_of(tokens, 50) == tokens


def test_values_without_effect_are_accepted() -> None:
    neutral = {"best_of": 1, "echo": False, "stop": [], "seed": None, "logit_bias": {}, "user": "me"}
    assert check_tokens([1], parse(**neutral), SPEC, CAPACITY, OutputRule()).max_output == 16
    plain = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "top_logprobs": 0}
    assert parse_chat_with(**plain).num_logprobs is None


def test_how_tokens_are_chosen() -> None:
    default = parse().sampling(7)
    assert (default.temperature, default.top_k, default.top_p, default.seed, default.logprobs) == (1, 0, 1, 7, None)
    given = {"temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "presence_penalty": -1, "logprobs": 0}
    chosen = parse(**given).sampling(7)
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0, 0, 0.5, 0.1)
    assert (chosen.presence_penalty, chosen.frequency_penalty, chosen.logprobs) == (-1, 0, 0)
    assert parse_chat_with(logprobs=True).num_logprobs == 0


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**64, 2**64 + 128 * 0x9E3779B97F4A7C15])
def test_whatever_is_asked_for_fits_a_control_message(seed: int) -> None:
    sampling = parse(top_k=2**31 - 1, logit_bias={"3": -1.5, "4": 2}).sampling(seed)
    assert 0 <= sampling.seed < 2**64
    beginning = m.Beginning(Generation(0, (1,), 4, sampling=sampling))
    sent = m.decode_to_worker(m.encode(m.Transfer(1, [], [beginning])))
    assert isinstance(sent, m.Transfer)
    assert sent.begin[0].generation.sampling == sampling


def test_context_and_memory_may_be_filled_to_the_last_token() -> None:
    assert check_tokens([1, 2, 3], parse(max_tokens=509), SPEC, Pool(512, 1), OutputRule()).max_output == 509
    assert check_tokens([1, 2, 3], parse(max_tokens=397), SPEC, CAPACITY, OutputRule()).max_output == 397


def test_a_chat_fills_what_there_is_unless_told() -> None:
    assert check_tokens([1] * 12, parse_chat_with(), SPEC, Pool(10_000, 1), OutputRule()).max_output == 500
    assert check_tokens([1] * 12, parse_chat_with(), SPEC, Pool(100, 1), OutputRule()).max_output == 88
    assert (
        check_tokens([1] * 12, parse_chat_with(max_completion_tokens=7), SPEC, Pool(100, 1), OutputRule()).max_output
        == 7
    )
    with pytest.raises(ApiError, match="context length is 512") as caught:
        check_tokens([1] * 512, parse_chat_with(), SPEC, Pool(10_000, 1), OutputRule())
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["ab", [1]], ["ab", [1]]),
    ],
)
def test_prompt_shapes(prompt: object, expected: list[object]) -> None:
    assert parse(prompt=prompt).prompts(2) == expected


@given(st.binary())
@example(b"")
@example(b"[]")
@example(b"nul")
@example(b'{"model":"\xff"}')
@example(b'{"model":"\\ud800"}')
@example(b'{"model":"\\ud800abcdefgh","prompt":"\\udfff"}')
@example(b'{"prompt":' + b"[" * 100_000)
@example(b'{"temperature":1e999}')
def test_no_body_is_worse_than_a_400(body: bytes) -> None:
    for parse_body in (parse_completion, parse_chat):
        with pytest.raises(ApiError) as caught:
            parse_body(body)
        assert caught.value.status == 400
        assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"
