"""langchain-openai, unmodified: URL MODEL."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(place: str) -> str:
    """Says how the weather is."""
    return f"sunny in {place}"


class Number(BaseModel):
    n: bool


url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=64, max_retries=0)
assert chat.invoke("hello").usage_metadata["output_tokens"] > 0
assert "".join(chunk.text for chunk in chat.stream("hello")) is not None
assert isinstance(chat.with_structured_output(Number, method="json_schema").invoke("hello").n, bool)
called = chat.bind_tools([weather], tool_choice="required").invoke("hello", max_tokens=400)
assert called.tool_calls or called.response_metadata["finish_reason"] == "length"
over_responses = ChatOpenAI(
    base_url=url, api_key="none", model=model, max_tokens=64, max_retries=0, use_responses_api=True
)
assert over_responses.invoke("hello").usage_metadata["output_tokens"] > 0
assert "".join(chunk.text for chunk in over_responses.stream("hello")) is not None
print("done")
