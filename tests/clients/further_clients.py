"""Other libraries, unmodified, with a tool that must be called and an answer that follows a schema: URL MODEL NAME."""

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel

url, model, name = sys.argv[1:]
CITIES = ("Rome", "Oslo")


class Place(BaseModel, extra="forbid"):  # a random model would write further properties until its limit
    name: Literal["Rome", "Oslo"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up the weather.

    Args:
        city: where.
    """
    return f"rain in {city}"


def instructor() -> None:
    import instructor
    from openai import OpenAI

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        said = [{"role": "user", "content": "Where?"}]
        found = client.chat.completions.create(model=model, messages=said, response_model=Place, max_tokens=200)
        assert found.name in CITIES


def smolagents() -> None:
    from smolagents import OpenAIServerModel, tool

    served = OpenAIServerModel(model, api_base=url, api_key="none", max_tokens=300)
    said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}]
    answer = served.generate(said, tools_to_call_from=[tool(weather)])
    assert answer.tool_calls[0].function.name == "weather"
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
    answer = served.generate(said, response_format=schema)
    assert json.loads(answer.content)["name"] in CITIES


def llama_index() -> None:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=300
    )
    answer = llm.chat_with_tools([FunctionTool.from_defaults(weather)], "Where?", tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in CITIES
    assert llm.as_structured_llm(Place).complete("Where?").raw.name in CITIES


def haystack() -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def generator(**settings: Any) -> OpenAIChatGenerator:
        key = Secret.from_token("none")
        kwargs = {"max_tokens": 300, **settings}
        return OpenAIChatGenerator(api_key=key, model=model, api_base_url=url, generation_kwargs=kwargs)

    said = [ChatMessage.from_user("Where?")]
    tools = [create_tool_from_function(weather)]
    (reply,) = generator(tool_choice="required").run(said, tools=tools)["replies"]
    assert reply.tool_calls[0].arguments["city"] in CITIES
    (reply,) = generator(response_format=Place).run(said)["replies"]
    assert json.loads(reply.text)["name"] in CITIES


def dspy() -> None:
    import dspy

    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
    lm = dspy.LM(f"openai/{model}", api_base=url, api_key="none", max_tokens=300, cache=False)
    assert json.loads(lm("Where?", response_format=schema)[0])["name"] in CITIES
    tool = {"type": "function", "function": {"name": "weather", "parameters": Place.model_json_schema()}}
    (answer,) = lm("Where?", tools=[tool], tool_choice="required")
    assert answer["tool_calls"][0].function.name == "weather"


def inspect_ai() -> None:
    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.tool import ToolInfo, ToolParams
    from inspect_ai.util import json_schema

    place = json_schema(Place)
    served = get_model(f"openai-api/xgpt/{model}", base_url=url, api_key="none", config=GenerateConfig(max_tokens=300))
    parameters = ToolParams(properties=place.properties, required=["name"])
    tool = ToolInfo(name="weather", description="Look up the weather.", parameters=parameters)

    async def ask() -> None:
        answer = await served.generate("Where?", tools=[tool], tool_choice="any")
        assert answer.message.tool_calls[0].arguments["name"] in CITIES
        config = GenerateConfig(response_schema=ResponseSchema(name="place", json_schema=place))
        assert json.loads((await served.generate("Where?", config=config)).completion)["name"] in CITIES

    asyncio.run(ask())


def outlines() -> None:
    import openai
    import outlines

    served = outlines.from_openai(openai.OpenAI(base_url=url, api_key="none"), model)
    assert json.loads(served("Where?", Place, max_tokens=200))["name"] in CITIES


def semantic_kernel() -> None:
    from openai import AsyncOpenAI
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function

    service = OpenAIChatCompletion(model, async_client=AsyncOpenAI(base_url=url, api_key="none"))
    kernel, history = Kernel(), ChatHistory()
    history.add_user_message("Where?")
    kernel.add_function("tools", kernel_function(lambda city: f"rain in {city}", name="weather"))

    async def ask() -> None:
        settings = OpenAIChatPromptExecutionSettings(
            max_tokens=300, function_choice_behavior=FunctionChoiceBehavior.Required(auto_invoke=False)
        )
        (answer,) = await service.get_chat_message_contents(history, settings, kernel=kernel)
        assert answer.items[0].function_name == "weather", answer
        settings = OpenAIChatPromptExecutionSettings(max_tokens=300, response_format=Place)
        (answer,) = await service.get_chat_message_contents(history, settings)
        assert json.loads(str(answer))["name"] in CITIES

    asyncio.run(ask())


def autogen() -> None:
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info: Any = {**able, "family": "unknown", "multiple_system_messages": True}
    client = OpenAIChatCompletionClient(model=model, base_url=url, api_key="none", model_info=info, max_tokens=300)
    said = [UserMessage(content="Where?", source="user")]

    async def ask() -> None:
        tools = [FunctionTool(weather, description="Look up the weather.", strict=True)]
        answer = await client.create(said, tools=tools, tool_choice="required")
        assert json.loads(answer.content[0].arguments)["city"] in CITIES
        answer = await client.create(said, json_output=Place)
        assert json.loads(answer.content)["name"] in CITIES

    asyncio.run(ask())


ASKED = (instructor, smolagents, llama_index, haystack, dspy, inspect_ai, outlines, semantic_kernel, autogen)
{each.__name__: each for each in ASKED}[name]()
print("done")
