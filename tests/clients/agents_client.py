"""openai-agents, unmodified, over chat completions: URL MODEL."""

import asyncio
import sys
from enum import StrEnum

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
url, name = sys.argv[1:]
asked = []


class Place(StrEnum):
    ROME = "Rome"
    OSLO = "Oslo"


@function_tool
def weather(place: Place) -> str:
    """Says how the weather is."""
    asked.append(place)
    return "sunny"


client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
agent = Agent(
    name="assistant",
    instructions="Answer.",
    model=OpenAIChatCompletionsModel(model=name, openai_client=client),
    tools=[weather],
    model_settings=ModelSettings(tool_choice="required", max_tokens=200),
)


async def main() -> None:
    # The first turn must call, the second is free.
    result = await Runner.run(agent, "How is it in Rome?", max_turns=3)
    assert asked and result.final_output is not None
    streamed = Runner.run_streamed(agent, "How is it in Oslo?", max_turns=3)
    events = [event async for event in streamed.stream_events()]
    assert len(asked) >= 2 and events


asyncio.run(main())
print("done")
