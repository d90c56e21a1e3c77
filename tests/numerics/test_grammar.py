"""On every placement, outputs keep to JSON schemas and to the functions that they may call, biases move logits, and
turns have the same tokens whether K/V was kept between them or not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch

from tests.attack.client import ADMIN_KEY
from tests.attack.target import FAKE_VLLM, FLAVOURS, Target, attacked, save_checkpoint
from tests.fakes import eventually
from tests.planned import problem_of, scored
from tests.rings import examples
from xgpt.serving.engine_process import build_engine
from xrunner.generation import Generation, SamplingParams, Token

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT = [{"role": "user", "content": "hello"}]
KEYS = [f"a-key-of-its-own-for-turn-{turn}" for turn in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture(
    scope="module", params=["one", *(pytest.param(name, marks=pytest.mark.long) for name in FLAVOURS if name != "one")]
)
def target(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    keys = "".join(f"user{i} {key}\n" for i, key in enumerate(KEYS))
    with attacked(request.param, checkpoint, tmp_path_factory.mktemp("served"), keys=keys) as running:
        yield running


def chat(target: Target, **fields: Any) -> dict[str, Any]:
    body = {"model": target.model, "messages": CHAT, "max_tokens": 400, "temperature": 1.0, **fields}
    status, answer = target.ask("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    choice: dict[str, Any] = json.loads(answer)["choices"][0]
    return choice


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "given", "schema": schema}}


@pytest.mark.skipif(sys.platform != "linux", reason="files are listed in /proc")
def test_the_front_loads_no_torch(target: Target) -> None:
    """It checked the weights: 1.7 s of each start, and memory for as long as it ran."""
    files = [Path(f"/proc/{pid}/maps").read_text() for pid in (target.served.engine, target.served.process.pid)]
    assert ["libtorch" in text for text in files] == [True, False]


@pytest.mark.long
def test_outputs_keep_to_their_schema_while_others_run(target: Target) -> None:
    free = target.probe()

    def ask(seed: int) -> str:
        if seed % 5 == 0:
            assert target.probe() == free
        choice = chat(target, response_format=formatted(SCHEMA), seed=seed)
        assert choice["finish_reason"] == "stop"
        text: str = choice["message"]["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
        return text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(examples(125, 40))))
    assert len(set(texts)) > 0.8 * len(texts)
    assert texts[:3] == [ask(seed) for seed in range(3)]
    choice = chat(target, response_format={"type": "json_object"}, max_tokens=4, temperature=0)
    assert choice["message"]["content"].startswith("{")


def test_functions_are_called(target: Target) -> None:
    for seed in range(examples(10, 4)):
        choice = chat(target, tools=TOOLS, tool_choice="required", seed=seed)
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function" and call["id"].startswith("call_")
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in ("weather", "now")
        jsonschema.validate(arguments, PLACE if call["function"]["name"] == "weather" else {"maxProperties": 0})
    named = {"type": "function", "function": {"name": "weather"}}
    call = chat(target, tools=TOOLS, tool_choice=named)["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert "tool_calls" not in chat(target, tools=TOOLS, tool_choice="auto", max_tokens=10)["message"]


def test_openais_client_takes_calls_and_their_results(target: Target) -> None:
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key=ADMIN_KEY) as client:
        arguments: dict[str, Any] = {
            "model": target.model,
            "tools": TOOLS,
            "tool_choice": "required",
            "max_tokens": 400,
        }
        called = client.chat.completions.create(messages=CHAT, **arguments).choices[0].message  # type: ignore[arg-type]
        assert called.tool_calls
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "12 degrees"}
        messages = [*CHAT, called.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(model=target.model, messages=messages, tools=TOOLS, max_tokens=5)  # type: ignore[arg-type]
        assert again.choices[0].message.role == "assistant"
        streamed = client.chat.completions.create(messages=CHAT, stream=True, temperature=0, **arguments)  # type: ignore[arg-type]
        chunks = [chunk.choices[0] for chunk in streamed]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert {call.index for call in calls} == {0} and len({call.id for call in calls if call.id}) == 1
        pieces = [call.function for call in calls if call.function is not None]
        written = json.loads("".join(piece.arguments or "" for piece in pieces))
        names = [piece.name for piece in pieces if piece.name]
        assert names in (["weather"], ["now"])
        jsonschema.validate(written, PLACE if names == ["weather"] else {"maxProperties": 0})
        assert chunks[-1].finish_reason == "tool_calls"


def test_biases_choose_and_forbid(target: Target) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 6, "temperature": 0}
    free = target.complete(**body)[1]["choices"][0]["token_ids"]
    banned = target.complete(**body, logit_bias={str(free[0]): -100})[1]["choices"][0]["token_ids"]
    assert free[0] not in banned
    assert target.complete(**body, logit_bias={"77": 100})[1]["choices"][0]["token_ids"] == [77] * 6
    for wrong in ({"2048": 1}, {"x": 1}, {"1": 101}, {"-1": 1}):
        assert target.complete(**body, logit_bias=wrong)[0] == 400


def test_echo_begins_with_the_prompt(target: Target) -> None:
    plain = target.complete(prompt="once", max_tokens=4, temperature=0)[1]["choices"][0]
    echoed = target.complete(prompt="once", max_tokens=4, temperature=0, echo=True)[1]["choices"][0]
    assert echoed["text"] == "once" + plain["text"] and echoed["token_ids"] == plain["token_ids"]


def test_a_prompts_tokens_are_scored(target: Target, checkpoint: Path) -> None:
    """As Hugging Face's model scores them, though their keys and values be there already, whole and in a stream."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
    ids = target.ask("POST", "/tokenize", {"prompt": text})[1]
    prompt = json.loads(ids)["tokens"]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 3}
    for _ in range(2):
        status, answer = target.complete(**body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        scores = choice["logprobs"]
        assert [len(values) for values in scores.values()] == [len(prompt) + 2] * 4
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        scored = [row[token].item() for row, token in zip(expected, prompt[1:], strict=False)]
        assert scores["token_logprobs"][1 : len(prompt)] == pytest.approx(scored, abs=1e-3)
        best = [max(top.values()) for top in scores["top_logprobs"][1 : len(prompt)]]
        assert best == pytest.approx(expected[:-1].amax(dim=-1).tolist(), abs=1e-3)
        assert scores["text_offset"][: len(prompt) + 1] == list(range(len(text) + 1))
        assert "".join(scores["tokens"][: len(prompt)]) == text and choice["text"].startswith(text)
    status, answer = target.ask("POST", "/v1/completions", {"model": target.model, **body, "stream": True})
    events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
    first, second = (event["choices"][0]["logprobs"] for event in events)
    assert {name: first[name] + second[name] for name in scores} == scores


def test_texts_and_chats_become_tokens_and_back(target: Target) -> None:
    def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = target.ask("POST", path, body)
        return status, json.loads(answer)

    status, found = ask("/tokenize", {"model": target.model, "prompt": "once"})
    assert status == 200 and found["count"] == len(found["tokens"]) == 4 and found["max_model_len"] == 512
    assert ask("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "once"})
    chat_tokens = ask("/tokenize", {"messages": CHAT})[1]["tokens"]
    status, answer = ask("/v1/chat/completions", {"model": target.model, "messages": CHAT, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == len(chat_tokens)
    for wrong in ({}, {"prompt": "x", "messages": CHAT}):
        assert ask("/tokenize", wrong)[0] == 400
    assert ask("/detokenize", {"tokens": [2048]})[0] == 400


def chats(target: Target, keys: list[str]) -> tuple[list[str], list[int]]:
    """Return the greedy answers of a chat's turns, each sent with its key, and how many prompt tokens each found."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "answer in one word"}]
    answers, cached = [], []
    for turn, key in enumerate(keys):
        messages.append({"role": "user", "content": f"question {turn}"})
        body = {"model": target.model, "messages": messages, "max_tokens": 20, "temperature": 0.0, "logprobs": True}
        headers = target.headers | {"Authorization": f"Bearer {key}"}
        status, raw = target.ask("POST", "/v1/chat/completions", body, headers)
        assert status == 200, raw
        answer = json.loads(raw)
        choice, found = answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        answers.append("".join(token["token"] for token in choice["logprobs"]["content"]))
        cached.append(found)
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return answers, cached


def test_turns_have_the_same_tokens_with_and_without_kept_prefixes(target: Target) -> None:
    if target.flavour == "replicas":
        pytest.skip("turns of one key go to one replica, others to any")
    kept, found = chats(target, KEYS[:1] * len(KEYS))
    # Keys share no K/V, so turns that each come with another key find nothing. The first key's turns were kept.
    anew, none = chats(target, [KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[1]])
    assert found[0] == 0 and all(later > before for before, later in pairwise(found))
    assert none[:4] == [0, 0, 0, 0] and none[4] < found[4]
    assert anew == kept


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": formatted({"type": "nonsense"})}, "response_format"),
        ({"response_format": formatted({"$ref": "https://elsewhere.example/schema"})}, "response_format"),
        ({"response_format": formatted({"enum": ["x" * 70_000]})}, "longer than"),
        ({"response_format": formatted(SCHEMA), "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "required"}, "needs tools to call"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(target: Target, fields: dict[str, Any], said: str) -> None:
    body = {"model": target.model, "messages": CHAT, **fields}
    status, answer = target.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and said in json.loads(answer)["error"]["message"]


@pytest.mark.long
def test_another_plans_worker_keeps_to_grammars(checkpoint: Path) -> None:
    """One with more K/V memory was deployed without them."""
    plan = scored(problem_of(checkpoint, 1), "orca", [[1]], 1, max_batch=4)
    larger = tuple(stage.model_copy(update={"kv_blocks": stage.kv_blocks + 1}) for stage in plan.stages)
    engine = build_engine(plan)
    tokens: list[Token] = []
    try:
        engine.submit(Generation(0, (5, 6, 7), 9))
        engine.step()
        engine.go_over_to(plan.model_copy(update={"stages": larger}))
        engine.step()
        assert engine.is_emptying
        engine.submit(Generation(1, (5, 6, 7), 9, frozenset({2}), sampling=SamplingParams(grammar='start: "yes"')))

        def has_ended() -> bool:
            tokens.extend(token for token in engine.step() or () if token.id == 1)
            return bool(tokens) and tokens[-1].finish is not None

        assert eventually(has_ended, 30)
    finally:
        engine.close()
    letters = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    assert [token.token for token in tokens] == [*map(letters.get, "yes"), 2]


@pytest.mark.long
def test_vllm_keeps_to_none(checkpoint: Path, tmp_path: Path) -> None:
    with attacked(FAKE_VLLM, checkpoint, tmp_path) as target:
        body = {"model": target.model, "messages": CHAT, "response_format": formatted(SCHEMA)}
        status, answer = target.ask("POST", "/v1/chat/completions", body)
        assert status == 400 and "vLLM" in json.loads(answer)["error"]["message"]
