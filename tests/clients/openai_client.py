"""OpenAI's client, unmodified: URL MODEL."""

import json
import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
assert [entry.id for entry in client.models.list()] == [model]

chat = client.chat.completions
messages = [{"role": "user", "content": "hello"}]
answer = chat.create(model=model, messages=messages, max_tokens=8, logprobs=True, top_logprobs=2)
assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) <= 8
assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2

chunks = list(
    chat.create(model=model, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True})
)
assert chunks[-1].usage.completion_tokens <= 8 and chunks[-2].choices[0].finish_reason in ("length", "stop")

schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
format_ = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
formatted = chat.create(model=model, messages=messages, max_tokens=64, response_format=format_)
assert json.loads(formatted.choices[0].message.content)["n"] in (1, 2)

parameters = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
called = chat.create(model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=200)
(call,) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments)["place"] in (
    "Rome",
    "Oslo",
)
back = [*messages, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert chat.create(model=model, messages=back, tools=tools, max_tokens=4).choices

completed = client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, echo=True)
assert len(completed.choices) == 2 and completed.choices[0].text.startswith("a")
responses = client.responses
whole = responses.create(model=model, input="hello", instructions="Be brief.", max_output_tokens=8, temperature=0)
asked = {"model": model, "input": "hello", "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}
with responses.stream(**asked) as stream:
    messages = list(stream)
assert "".join(each.delta for each in messages if each.type == "response.output_text.delta") == whole.output_text
assert messages[-1].type in ("response.completed", "response.incomplete")
assert messages[-1].response.output_text == whole.output_text
flat = [{"type": "function", "name": "weather", "parameters": parameters, "strict": True}]
called = responses.create(model=model, input="hello", tools=flat, tool_choice="required", max_output_tokens=200)
call = called.output[-1]
assert call.type == "function_call" and json.loads(call.arguments)["place"] in ("Rome", "Oslo")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
back = [{"role": "user", "content": "hello"}, *called.output, output]
assert responses.create(model=model, input=back, tools=flat, max_output_tokens=4).output
text = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
formatted = responses.create(model=model, input="hello", text=text, max_output_tokens=64)
assert json.loads(formatted.output_text)["n"] in (1, 2)
try:
    responses.create(model=model, input="hello", previous_response_id=whole.id)
except openai.BadRequestError as error:
    assert error.param == "previous_response_id", error
else:
    raise AssertionError("responses are not kept")

try:
    client.embeddings.create(model=model, input="a")
except openai.NotFoundError as error:
    assert "/v1/" in str(error), error
else:
    raise AssertionError("embeddings are not served")
print("done")
