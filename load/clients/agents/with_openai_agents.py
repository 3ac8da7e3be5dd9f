"""OpenAI's Agents SDK: its loop with a tool, over responses and over chat completions."""

import asyncio
from typing import Any

import agents
import asked
import openai


async def main() -> None:
    """with_openai_agents.py BASE_URL MODEL."""
    url, name = asked.asked()
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key=asked.KEY, max_retries=0)
    kinds = (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel)
    for kind in kinds:
        streamed, pieces, called, filled = await _run(kind(model=name, openai_client=client))
    asked.tell(streamed=streamed, pieces=pieces, called=called, filled=filled)


async def _run(model: Any) -> tuple[str, int, dict[str, Any], asked.City]:
    most = agents.ModelSettings(max_tokens=asked.MAX_TOKENS)
    # Its loop takes an answer that was cut off for an error, so what is streamed is an answer that ends by itself.
    filler = agents.Agent(name="filler", model=model, output_type=asked.City, model_settings=most)
    stream = agents.Runner.run_streamed(filler, asked.QUESTION)
    pieces = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    called: list[dict[str, Any]] = []

    @agents.function_tool
    def weather(city: asked.City) -> str:
        """Tell the weather of a city."""
        called.append(city.model_dump())
        return "rain"

    must = agents.ModelSettings(max_tokens=asked.MAX_TOKENS, tool_choice="required", parallel_tool_calls=False)
    # After the first turn the loop asks again without the choice, and wants an answer of the type.
    caller = agents.Agent(
        name="caller", model=model, tools=[weather], model_settings=must, tool_use_behavior="stop_on_first_tool"
    )
    await agents.Runner.run(caller, asked.QUESTION)
    return "".join(pieces), len(pieces), called[0], stream.final_output


if __name__ == "__main__":
    asyncio.run(main())
