"""litellm, unmodified, over each API that it can take: URL MODEL."""

import json
import sys

import litellm

url, model = sys.argv[1:]
litellm.suppress_debug_info = True
at = {"api_base": url, "api_key": "none", "num_retries": 0}
hello = [{"role": "user", "content": "hello"}]
for provider in ("openai", "hosted_vllm"):
    answer = litellm.completion(model=f"{provider}/{model}", messages=hello, max_tokens=8, temperature=0, **at)
    chunks = litellm.completion(
        model=f"{provider}/{model}", messages=hello, max_tokens=8, temperature=0, stream=True, **at
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content and answer.usage.completion_tokens <= 8

parameters = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
tools = [
    {"type": "function", "function": {"name": "weather", "parameters": parameters | {"additionalProperties": False}}}
]
called = litellm.completion(
    model=f"openai/{model}", messages=hello, tools=tools, tool_choice="required", max_tokens=200, **at
)
(call,) = called.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
back = [*hello, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert litellm.completion(model=f"openai/{model}", messages=back, tools=tools, max_tokens=4, **at).choices

format_ = {"type": "json_schema", "json_schema": {"name": "place", "schema": tools[0]["function"]["parameters"]}}
formatted = litellm.completion(model=f"openai/{model}", messages=hello, response_format=format_, max_tokens=200, **at)
assert json.loads(formatted.choices[0].message.content)["place"] in ("Rome", "Oslo")
response = litellm.responses(model=f"openai/{model}", input="hello", max_output_tokens=8, **at)
assert response.output[0].type == "message" and response.status in ("completed", "incomplete")
claude = {"api_base": url.removesuffix("/v1"), "api_key": "none"}
message = litellm.completion(model=f"anthropic/{model}", messages=hello, max_tokens=8, **claude)
assert message.usage.completion_tokens <= 8
try:
    litellm.completion(model=f"openai/{model}", messages=[{"role": "user", "content": "a" * 100_000}], **at)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt longer than the context is refused")
print("done")
