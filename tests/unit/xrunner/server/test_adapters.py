"""OpenAI's Responses and Anthropic's Messages, through HTTP: what reaches the model, and how answers are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.fakes import VOCAB_SIZE, SayingExecutor, byte_tokenizer, fake_app, fake_engine, running
from xrunner.server.access.keys import ApiKeys
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import TextCodec

if TYPE_CHECKING:
    import openai
    from openai.types.responses import Response

TEMPLATE = """{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or () %}!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking is false %}<think></think>
{%- endif %}"""
CODEC = TextCodec(byte_tokenizer(), ChatTemplate(TEMPLATE))
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place":"Rome"}}\n</tool_call>'
SAID = f"<think>Let me see.</think>I look.{CALL}"


@pytest.fixture(scope="module")
def app_parts() -> Iterator[tuple[str, SayingExecutor]]:
    executor = SayingExecutor(byte_tokenizer())
    app = fake_app(fake_engine(executor), codec=CODEC, eos_token_ids=frozenset({VOCAB_SIZE - 1}))
    with running(app) as url:
        yield url, executor


@pytest.fixture(scope="module")
def url(app_parts: tuple[str, SayingExecutor]) -> str:
    return app_parts[0]


def say(text: str) -> str:
    return f"SAY[{text}]YAS"


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": "fake"} | fields)


def events(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each one's name is its type."""
    text = post(url, path, stream=True, **fields).text
    found = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [name for name, _ in found] == [f"event: {each['type']}" for each in documents]
    return documents


TOOL = {"type": "function", "name": "weather", "parameters": PLACE}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    import openai  # takes half a second, which every process that collects this file would pay

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def parts(response: Response) -> list[Any]:
    """What a response has, without ids."""
    found: list[Any] = []
    for item in response.output:
        match item.type:
            case "reasoning":
                found.append([part.text for part in item.content or ()])
            case "message":
                found.append("".join(part.text for part in item.content if part.type == "output_text"))
            case "function_call":
                found.append((item.name, json.loads(item.arguments)))
    return found


def test_a_response_has_reasoning_text_and_calls(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input=say(SAID), tools=[TOOL], metadata={"a": "b"})
    assert parts(response) == [["Let me see."], "I look.", ("weather", {"place": "Rome"})]
    assert (response.status, response.store, response.metadata, response.tools[0].name) == (
        "completed",
        False,
        {"a": "b"},
        "weather",
    )
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("Let me see.</think>")


def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input=say(SAID), tools=[TOOL]) as stream:
        streamed = list(stream)
        final = stream.get_final_response()
    assert parts(final) == [["Let me see."], "I look.", ("weather", {"place": "Rome"})]
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    kinds = [event.type for event in streamed]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 3
    texts = [event.delta for event in streamed if event.type == "response.output_text.delta"]
    assert "".join(texts) == "I look." and len(texts) > 1
    assert "".join(e.delta for e in streamed if e.type == "response.reasoning_text.delta") == "Let me see."
    assert (
        "".join(e.delta for e in streamed if e.type == "response.function_call_arguments.delta") == '{"place":"Rome"}'
    )


CALLS = (
    '<tool_call>\n{"name": "home__weather", "arguments": {"place":"Rome"}}\n</tool_call>'
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input":"*** é\\n"}}\n</tool_call>'
)
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start:"},
}
AGENTS: list[Any] = [
    {"type": "namespace", "name": "home", "description": "At home.", "tools": [TOOL]},
    PATCH,
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
]
"""Tools as Codex declares them: those of an MCP server, one that takes a text, and some that OpenAI would run."""


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_in_the_form_of_an_agents_tools(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "input": say(CALLS), "tools": AGENTS}
    if stream:
        streamed = list(client.responses.create(**asked, stream=True))
        response = streamed[-1].response
        kinds = [event.type for event in streamed if "call" in event.type]
        assert kinds[-2:] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert "response.function_call_arguments.done" in kinds
    else:
        response = client.responses.create(**asked)
    called, patched = response.output
    assert (called.type, called.namespace, called.name) == ("function_call", "home", "weather")
    assert json.loads(called.arguments) == {"place": "Rome"}
    assert (patched.type, patched.name, patched.input) == ("custom_tool_call", "apply_patch", "*** é\n")
    assert [tool.type for tool in response.tools] == ["namespace", "custom"]


def test_an_agents_calls_come_back_as_the_calls_that_they_are(app_parts: tuple[str, SayingExecutor]) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "namespace": "home", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "é"},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
    ]
    assert prompt_of(app_parts, "/v1/responses", input=items, tools=AGENTS) == (
        '[home__weatherapply_patch]<user>hi<assistant>!home__weather{}!apply_patch{"input": "é"}<tool>sunny<tool>done'
        "<assistant>"
    )


def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input=say("It is Rome."), max_output_tokens=5)
    assert (response.status, response.output_text) == ("incomplete", "It is")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="fake", input=say("It is Rome."), max_output_tokens=5, stream=True)
    assert last.type == "response.incomplete"


def test_log_probabilities_of_a_response(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = client.responses.create(model="fake", input=say("ab"), include=include, top_logprobs=2)
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    scored = message.content[0].logprobs
    assert scored is not None and [len(each.top_logprobs) for each in scored[:2]] == [2, 2]


def test_an_empty_answer_is_an_empty_text(client: openai.OpenAI, url: str) -> None:
    assert client.responses.create(model="fake", input="hi").output_text == ""
    assert post(url, "/v1/messages", max_tokens=4, messages=[{"role": "user", "content": "hi"}]).json()["content"] == [
        {"type": "text", "text": ""}
    ]


def prompt_of(app_parts: tuple[str, SayingExecutor], path: str, **fields: Any) -> str:
    """The prompt that a request makes."""
    url, executor = app_parts
    prompts: list[str] = []
    start = executor.start

    def noted(generation: Any, *rest: Any) -> None:
        prompts.append(byte_tokenizer().decode(list(generation.prompt), skip_special_tokens=False))
        start(generation, *rest)

    executor.start = noted  # type: ignore[method-assign]
    try:
        response = post(url, path, **fields)
    finally:
        executor.start = start  # type: ignore[method-assign]
    assert response.status_code == 200, response.text
    return prompts[0]


HISTORY = '<user>hi<assistant>(hm)Well.!weather{"place": "Rome"}<tool>sunny<user>and?<assistant>'


def test_items_of_a_response_come_back_as_the_messages_that_they_are(app_parts: tuple[str, SayingExecutor]) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"place":"Rome"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    assert prompt_of(app_parts, "/v1/responses", input=items) == HISTORY
    messages = prompt_of(app_parts, "/v1/responses", input=items, instructions="Be brief.", tools=[TOOL])
    assert messages == f"[weather]<system>Be brief.{HISTORY}"


def test_blocks_of_a_message_come_back_as_the_messages_that_they_are(app_parts: tuple[str, SayingExecutor]) -> None:
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {"place": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "sunny"}]}
    text: dict[str, Any] = {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Well."},
                use,
            ],
        },
        {"role": "user", "content": [result, text]},
    ]
    assert prompt_of(app_parts, "/v1/messages", max_tokens=2, messages=messages) == HISTORY
    tools = [{"name": "weather", "input_schema": PLACE}]
    system = [{"type": "text", "text": "Be brief."}]
    converted = prompt_of(app_parts, "/v1/messages", max_tokens=2, messages=messages, system=system, tools=tools)
    assert converted == f"[weather]<system>Be brief.{HISTORY}"
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    assert prompt_of(app_parts, "/v1/messages", max_tokens=2, messages=begun) == "<user>hi<assistant>It is"
    off: dict[str, Any] = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    assert prompt_of(app_parts, "/v1/messages", max_tokens=2, messages=begun[:1], **off).endswith("</think>")


def test_no_effort_is_no_reasoning(app_parts: tuple[str, SayingExecutor]) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    for effort, is_off in (("none", True), ("low", False)):
        shown = prompt_of(app_parts, "/v1/responses", input="hi", reasoning={"effort": effort})
        assert shown.endswith("<think></think>") is is_off
        shown = prompt_of(app_parts, "/v1/chat/completions", **chat, reasoning_effort=effort)
        assert shown.endswith("<think></think>") is is_off
    kept = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_of(app_parts, "/v1/chat/completions", **chat, **kept).endswith("<assistant>")


TOOLS = [{"name": "weather", "input_schema": PLACE}]


def test_a_message_has_thinking_text_and_tool_use(url: str) -> None:
    messages = [{"role": "user", "content": say(SAID)}]
    answer = post(url, "/v1/messages", max_tokens=200, messages=messages, tools=TOOLS).json()
    thought, text, use = answer["content"]
    assert (thought["thinking"], text["text"]) == ("Let me see.", "I look.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"place": "Rome"})
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "tool_use")
    counted = post(url, "/v1/messages/count_tokens", messages=messages, tools=TOOLS).json()["input_tokens"]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert usage["output_tokens"] == len(SAID) + 1


def test_a_streamed_message_is_the_whole_one(url: str) -> None:
    messages = [{"role": "user", "content": say(SAID)}]
    streamed = events(url, "/v1/messages", max_tokens=200, messages=messages, tools=TOOLS)
    kinds = [each["type"] for each in streamed if each["type"] != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 3
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    assert [each["index"] for each in streamed if each["type"] == "content_block_start"] == [0, 1, 2]
    written = ["", "", ""]
    for each in streamed:
        if each["type"] == "content_block_delta":
            kind, text = each["delta"].values()
            assert kind == ["thinking_delta", "text_delta", "input_json_delta"][each["index"]]
            written[each["index"]] += text
    assert written == ["Let me see.", "I look.", '{"place":"Rome"}']
    end = streamed[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == len(SAID) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cut_after", "statuses"),
    [
        ("Let me", ["incomplete"]),
        ("I lo", ["completed", "incomplete"]),
        ('{"place":"R', ["completed", "completed", "incomplete"]),
        ('{"place":"Rome"}}', ["completed", "completed", "completed"]),
    ],
)
def test_what_a_limit_cuts_off_is_incomplete(url: str, stream: bool, cut_after: str, statuses: list[str]) -> None:
    """Agents run calls that are completed."""
    most = SAID.index(cut_after) + len(cut_after)
    asked: dict[str, Any] = {"input": say(SAID), "max_output_tokens": most, "tools": [TOOL]}
    if stream:
        streamed = events(url, "/v1/responses", **asked)
        found = [each["item"]["status"] for each in streamed if each["type"] == "response.output_item.done"]
        answer = streamed[-1]["response"]
    else:
        answer = post(url, "/v1/responses", **asked).json()
        found = statuses
    assert answer["status"] == "incomplete" and found == statuses == [item["status"] for item in answer["output"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "stopped_at"),
    [
        ({"max_tokens": 5}, "It is", "max_tokens", None),
        ({"max_tokens": 50}, "It is Rome.", "end_turn", None),
        ({"max_tokens": 50, "stop_sequences": ["x", " Ro"]}, "It is", "stop_sequence", " Ro"),
    ],
)
def test_why_a_message_ends(
    url: str, stream: bool, fields: dict[str, Any], text: str, reason: str, stopped_at: str | None
) -> None:
    asked = fields | {"messages": [{"role": "user", "content": say("It is Rome.")}]}
    if stream:
        streamed = events(url, "/v1/messages", **asked)
        found = "".join(each["delta"]["text"] for each in streamed if each["type"] == "content_block_delta")
        stopped = streamed[-2]["delta"]
    else:
        stopped = post(url, "/v1/messages", **asked).json()
        found = stopped["content"][0]["text"]
    assert (found, stopped["stop_reason"], stopped["stop_sequence"]) == (text, reason, stopped_at)


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_may_fill_the_context(url: str, stream: bool) -> None:
    """Agents ask for more than a small model's context holds."""
    asked: dict[str, Any] = {"max_tokens": 32_000, "messages": [{"role": "user", "content": say("a" * 300)}]}
    prompt = post(url, "/v1/messages/count_tokens", messages=asked["messages"]).json()["input_tokens"]
    if stream:
        *_, last, _ = events(url, "/v1/messages", **asked)
        stopped, usage = last["delta"], last["usage"]
    else:
        stopped = post(url, "/v1/messages", **asked).json()
        usage = stopped["usage"]
    assert (stopped["stop_reason"], usage["output_tokens"]) == ("model_context_window_exceeded", 512 - prompt)


def test_a_block_for_the_provider_does_not_reach_the_model(app_parts: tuple[str, SayingExecutor]) -> None:
    texts = ("x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;", "Be brief.")
    for system in (texts, texts[:1]):
        blocks = [{"type": "text", "text": text} for text in system]
        shown = prompt_of(app_parts, "/v1/messages", **HI, system=blocks)
        assert shown == ("<system>Be brief." if len(system) > 1 else "") + "<user>hi<assistant>"


def test_models_are_listed_for_each_apis_client(url: str, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    page = httpx.get(f"{url}/v1/models").json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "fake", "fake")
    (card,) = page["data"]
    assert (card["type"], card["display_name"], card["max_input_tokens"]) == ("model", "fake", 512)
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]


HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
MANY = [TOOL | {"name": f"f{number}"} for number in range(129)]
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "resp_1"},
            "previous_response_id: answers are not stored",
        ),
        ("/v1/responses", {"input": "a", "background": True}, "background: "),
        ("/v1/responses", {"input": []}, "input: it is empty"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input: parts of type"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input: items of type"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools: tools of type 'web_search'"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "frobnicate"}, TOOL]}, "tools: tools of type 'frobnicate'"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "web_search"}, TOOL], "tool_choice": {"type": "web_search"}},
            "tool_choice: 'web_search' is not supported",
        ),
        ("/v1/responses", {"input": "a", "tools": [TOOL, TOOL]}, "tools: two functions have the name 'weather'"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": MANY}]},
            "tools: 129 functions are too many; at most 128 are accepted",
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 600}, "max_output_tokens: "),
        ("/v1/responses", {"input": "a" * 600}, "input: "),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, "text: "),
        ("/v1/responses", {"input": "a", "frobnicate": 1}, "frobnicate"),
        ("/v1/messages", HI | {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", HI | {"messages": []}, "messages"),
        ("/v1/messages", {"messages": HI["messages"]}, "max_tokens"),
        ("/v1/messages", HI | {"messages": [{"role": "user", "content": "a" * 600}]}, "prompt is too long: messages: "),
        ("/v1/messages", HI | {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages: content blocks of type"),
        ("/v1/messages", HI | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools: web_search"),
        ("/v1/messages", HI | {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: there is no function"),
        ("/v1/messages", HI | {"tool_choice": {"type": "any"}}, "tool_choice: required needs tools to call"),
        ("/v1/messages", HI | {"frobnicate": 1}, "frobnicate"),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages: content blocks of type",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_form_of_each_api(
    url: str, path: str, fields: dict[str, Any], says: str
) -> None:
    response = post(url, path, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert says in body["error"]["message"]
    if path == "/v1/responses":
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": body["error"]["message"]},
        }


def test_what_changes_no_answer_is_accepted(url: str) -> None:
    hints = {"store": True, "truncation": "auto", "user": "a", "safety_identifier": "a", "service_tier": "auto"}
    hints |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "reasoning": {"summary": "auto"}}
    hints |= {"text": {"verbosity": "low"}, "max_tool_calls": 2, "background": False, "conversation": None}
    hints |= {"prompt_cache_options": {"ttl": "30m"}, "client_metadata": {"session": "a"}, "access_programs": {}}
    assert post(url, "/v1/responses", input="a", **hints).status_code == 200
    more: dict[str, Any] = {
        "metadata": {"user_id": "a"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
    }
    more |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {}, "mcp_servers": []}
    more |= {"diagnostics": None, "fallbacks": "default"}
    assert post(url, "/v1/messages", **HI, **more).status_code == 200


def test_a_model_that_is_not_served_is_not_found_in_anthropics_form(url: str) -> None:
    response = post(url, "/v1/messages", **HI | {"model": "claude"})
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


def test_a_key_comes_in_the_header_that_anthropics_client_sends() -> None:
    keys = ApiKeys.parse("a-key-of-many-letters")
    with running(fake_app(fake_engine(SayingExecutor(byte_tokenizer())), codec=CODEC, keys=keys)) as url:
        for headers, status in (
            ({"x-api-key": "a-key-of-many-letters"}, 200),
            ({"x-api-key": "another"}, 401),
            ({}, 401),
        ):
            response = httpx.post(f"{url}/v1/messages", json=HI | {"model": "fake"}, headers=headers)
            assert response.status_code == status
    assert response.json() == {"type": "error", "error": {"type": "authentication_error"} | response.json()["error"]}


@pytest.mark.parametrize(("path", "asked"), [("/v1/messages", HI), ("/v1/responses", {"input": "a"})])
def test_a_stream_that_breaks_off_says_so_in_the_form_of_its_api(path: str, asked: dict[str, Any]) -> None:
    class Failing(SayingExecutor):
        num_steps = 0

        def execute(self, step: Any) -> dict[int, int]:
            self.num_steps += 1
            if self.num_steps == 3:
                raise RuntimeError("the device has gone")
            return dict.fromkeys(super().execute(step), 65)

    with running(fake_app(fake_engine(Failing(byte_tokenizer())), codec=CODEC)) as url:
        more = {"max_tokens": 8} if path == "/v1/messages" else {}
        *_, last = events(url, path, **asked | more)
    error = last["error"] if path == "/v1/messages" else last["response"]["error"]
    assert last["type"] == ("error" if path == "/v1/messages" else "response.failed")
    assert "the device has gone" in error["message"]
