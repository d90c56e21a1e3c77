"""What /v1/completions accepts: anything else is a 400 that names the field."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes import SPEC
from xrunner.server.protocol import ApiError, check_tokens, parse_request, prompts_of

GOOD = {"model": "fake", "prompt": [1, 2, 3]}


def error_of(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request = parse_request(json.dumps(GOOD | fields).encode())
        for prompt in prompts_of(request):
            check_tokens(list(prompt), request, SPEC)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 0.7}, "temperature", "only greedy"),
        ({"top_p": 0.5}, "top_p", "only greedy"),
        ({"n": 2}, "n", "one choice"),
        ({"best_of": 2}, "best_of", "one choice"),
        ({"echo": True}, "echo", "not implemented"),
        ({"logprobs": 0}, "logprobs", "not implemented"),
        ({"stop": "x"}, "stop", "not implemented"),
        ({"stop": ["x"]}, "stop", "not implemented"),
        ({"suffix": "x"}, "suffix", "not implemented"),
        ({"seed": 1}, "seed", "no random number"),
        ({"presence_penalty": 1}, "presence_penalty", "not implemented"),
        ({"logit_bias": {"1": 1}}, "logit_bias", "not implemented"),
        ({"max_tokens": 0}, "max_tokens", "send 1 or more"),
        ({"max_tokens": -3}, "max_tokens", "-3"),
        ({"max_tokens": "4"}, "max_tokens", "Expected `int"),
        ({"max_tokens": True}, "max_tokens", "Expected `int"),
        ({"max_tokens": 510}, "max_tokens", "context of 512"),
        ({"output_length": 0}, "output_length", "within 1 and 16"),
        ({"output_length": 17}, "output_length", "within 1 and 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only a stream"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[1], []]}, "prompt", "empty"),
        ({"prompt": [1, [2]]}, "prompt", "mixed"),
        ({"prompt": [1, 1000]}, "prompt", "token id 1000 is outside the vocabulary of 1000"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [10**40]}, "prompt", "outside the vocabulary"),
        ({"prompt": [1] * 512}, "prompt", "context of 512"),
        ({"prompt": None}, "prompt", "Expected"),
        ({"frobnicate": 1}, "frobnicate", "unknown field"),
        ({"stream_options": {"x": 1}, "stream": True}, "x", "unknown field"),
    ],
)
def test_refused_with_the_field(fields: dict[str, object], param: str, says: str) -> None:
    error = error_of(**fields)
    assert error.status == 400
    assert error.param == param
    assert says in str(error)


def test_values_without_effect_are_accepted() -> None:
    neutral = {"temperature": 0, "top_p": 1, "n": 1, "best_of": 1, "echo": False, "stop": [], "seed": None}
    assert parse_request(json.dumps(GOOD | neutral | {"user": "me"}).encode()).output_limit == 16


def test_context_may_be_filled_to_the_last_token() -> None:
    request = parse_request(json.dumps(GOOD | {"max_tokens": 509}).encode())
    check_tokens([1, 2, 3], request, SPEC)


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
    assert prompts_of(parse_request(json.dumps(GOOD | {"prompt": prompt}).encode())) == expected


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
    with pytest.raises(ApiError) as caught:
        parse_request(body)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"
