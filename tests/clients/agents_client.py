"""openai-agents, unmodified, over Responses, its default, and over chat completions: URL MODEL."""

import asyncio
import sys
from enum import StrEnum

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)
url, name = sys.argv[1:]
asked = []


class Place(StrEnum):
    ROME = "Rome"
    OSLO = "Oslo"


class Answer(BaseModel):
    """An answer that ends by itself: the library takes one that max_tokens cuts off for an error."""

    place: Place
    is_sunny: bool


@function_tool(is_enabled=lambda context, agent: not asked)
def weather(place: Place) -> str:
    """Says how the weather is."""
    asked.append(place)
    return "sunny"


client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def run(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
    settings = ModelSettings(tool_choice="required", max_tokens=400)
    agent = Agent(
        name="assistant",
        instructions="Answer.",
        model=model,
        tools=[weather],
        model_settings=settings,
        output_type=Answer,
    )
    asked.clear()
    # The first turn must call, the second answers.
    result = await Runner.run(agent, "How is it in Rome?", max_turns=3)
    assert asked and isinstance(result.final_output, Answer)
    asked.clear()
    streamed = Runner.run_streamed(agent, "How is it in Oslo?", max_turns=3)
    events = [event async for event in streamed.stream_events()]
    assert asked and events and isinstance(streamed.final_output, Answer)


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        await run(kind(model=name, openai_client=client))


asyncio.run(main())
print("done")
