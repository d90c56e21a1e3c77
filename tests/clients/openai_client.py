"""OpenAI's client, unmodified: URL MODEL."""

import json
import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
assert [entry.id for entry in client.models.list()] == [model]

chat = client.chat.completions
told = [{"role": "user", "content": "hello"}]
answer = chat.create(model=model, messages=told, max_tokens=8, logprobs=True, top_logprobs=2)
assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) <= 8
assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2

chunks = list(
    chat.create(model=model, messages=told, max_tokens=8, stream=True, stream_options={"include_usage": True})
)
assert chunks[-1].usage.completion_tokens <= 8 and chunks[-2].choices[0].finish_reason in ("length", "stop")

schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
format_ = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
formatted = chat.create(model=model, messages=told, max_tokens=64, response_format=format_)
assert json.loads(formatted.choices[0].message.content)["n"] in (1, 2)

parameters = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
called = chat.create(model=model, messages=told, tools=tools, tool_choice="required", max_tokens=200)
(call,) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments)["place"] in (
    "Rome",
    "Oslo",
)
back = [*told, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert chat.create(model=model, messages=back, tools=tools, max_tokens=4).choices

completed = client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, echo=True)
assert len(completed.choices) == 2 and completed.choices[0].text.startswith("a")
try:
    client.embeddings.create(model=model, input="a")
except openai.NotFoundError as error:
    assert "/v1/" in str(error), error
else:
    raise AssertionError("embeddings are not served")
print("done")
