"""Anthropic's client, unmodified: URL MODEL."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
hello = [{"role": "user", "content": "hello"}]

answer = client.messages.create(
    model=model, max_tokens=8, system="Be brief.", messages=hello, extra_body={"temperature": 0}
)
assert answer.content[0].type == "text" and answer.usage.output_tokens <= 8
assert answer.stop_reason in ("max_tokens", "end_turn")
counted = client.messages.count_tokens(model=model, system="Be brief.", messages=hello)
usage = answer.usage
assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

with client.messages.stream(
    model=model, max_tokens=8, system="Be brief.", messages=hello, extra_body={"temperature": 0}
) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == answer.content[0].text == final.content[0].text and final.usage.output_tokens == usage.output_tokens

schema = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
tools = [{"name": "weather", "description": "Says how the weather is.", "input_schema": schema}]
asked = {"model": model, "messages": hello, "tools": tools, "max_tokens": 200}
for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
    called = client.messages.create(**asked, tool_choice=choice)
    use = called.content[-1]
    assert called.stop_reason == "tool_use" and use.input["place"] in ("Rome", "Oslo"), called
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        assert stream.get_final_message().content[-1].input["place"] in ("Rome", "Oslo")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
back = [*hello, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model=model, messages=back, tools=tools, max_tokens=4).content

stopped = client.messages.create(model=model, max_tokens=60, messages=hello, stop_sequences=["e", "a", "o", " "])
assert stopped.stop_reason in ("stop_sequence", "max_tokens", "end_turn")
assert (stopped.stop_sequence is None) == (stopped.stop_reason != "stop_sequence")
try:
    client.messages.create(model="nobody", max_tokens=1, messages=hello)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error", error.body
else:
    raise AssertionError("another model is not served")
print("done")
