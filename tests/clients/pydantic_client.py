"""pydantic-ai, unmodified: URL MODEL."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    name: Literal["Rome", "Oslo"]


url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
settings = {"max_tokens": 200}
by_tool = Agent(model, output_type=Place, model_settings=settings).run_sync("Where?")
assert by_tool.output.name in ("Rome", "Oslo")
by_schema = Agent(model, output_type=NativeOutput(Place), model_settings=settings).run_sync("Where?")
assert by_schema.output.name in ("Rome", "Oslo")
print("done")
