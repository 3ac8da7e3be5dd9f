"""pydantic-ai's Agent: a stream, a tool in its loop, an output that is a model."""

import asyncio
from typing import Any

import asked
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


async def main() -> None:
    """with_pydantic_ai.py BASE_URL MODEL."""
    url, name = asked.asked()
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key=asked.KEY))
    talker = Agent(model, model_settings=ModelSettings(max_tokens=asked.STREAM_TOKENS))
    async with talker.run_stream(asked.QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    called: list[dict[str, Any]] = []

    def weather(city: asked.City) -> str:
        """Tell the weather of a city."""
        called.append(city.model_dump())
        return "rain"

    # An output that is a tool: every turn has to call one of them, and the second is held to the last.
    one = ModelSettings(max_tokens=asked.MAX_TOKENS, parallel_tool_calls=False)
    caller = Agent(model, output_type=weather, model_settings=one)
    await caller.run(asked.QUESTION)
    filler = Agent(
        model, output_type=NativeOutput(asked.City), model_settings=ModelSettings(max_tokens=asked.MAX_TOKENS)
    )
    filled = (await filler.run(asked.QUESTION)).output
    asked.tell(streamed="".join(pieces), pieces=len(pieces), called=called[0], filled=filled)


if __name__ == "__main__":
    asyncio.run(main())
