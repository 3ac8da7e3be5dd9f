"""Clients that agents are written with, unmodified: each streams, has a tool called and a schema filled.

    agent_clients.py CLIENT BASE_URL MODEL
    agent_clients.py ask BASE_URL BODY       # OpenAI's client alone

Runs in an environment of its own (locks/clients.txt) and prints one JSON object. Each client's packages are imported by
its own function, so that one of them can be run where the others are missing.
"""

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

KEY = "any"
STREAM_TOKENS = 12
MAX_TOKENS = 400
QUESTION = "Which city has the Eiffel Tower, and how many people live there?"
TOOL, TOOL_TEXT = "weather", "Tell the weather of a city."


class City(BaseModel):
    """The schema to fill, and the argument of the tool."""

    # A small model would go on with fields of its own.
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=99_999_999)


def tool() -> dict[str, Any]:
    """Return the tool as OpenAI's API describes one."""
    function = {"name": TOOL, "description": TOOL_TEXT, "parameters": City.model_json_schema()}
    return {"type": "function", "function": function}


def report(*, streamed: str, pieces: int, called: dict[str, Any], filled: City) -> None:
    """Print the outcome as JSON; exit with an error unless the text was streamed and the call fits the schema."""
    if pieces < 2 or not streamed:
        raise SystemExit(f"a stream of {pieces} pieces brought {streamed!r}")
    City.model_validate(called)
    print(json.dumps({"streamed": streamed, "pieces": pieces, "called": called, "filled": filled.model_dump()}))


def ask(url: str, body: str) -> None:
    """Request one whole answer and one stream with OpenAI's client; `body` is the request in JSON."""
    import openai

    client, requested = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0), json.loads(body)
    whole = client.chat.completions.create(**requested)
    chunks = list(client.chat.completions.create(**requested, stream=True, stream_options={"include_usage": True}))
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == requested["max_tokens"]
    print(whole.choices[0].message.model_dump_json())


def with_openai(url: str, model: str) -> None:
    """Use both chat and responses."""
    import openai

    # A strict client raises an error for an answer that lacks what its types require.
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, _strict_response_validation=True)
    messages = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model=model, messages=messages, max_tokens=STREAM_TOKENS) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    called = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[tool()],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
    )
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == TOOL and called.choices[0].finish_reason == "tool_calls"
    calls = called.choices[0].message.tool_calls
    answers = [{"role": "tool", "tool_call_id": each.id, "content": "rain"} for each in calls]
    history = [*messages, called.choices[0].message, *answers]
    client.chat.completions.create(model=model, messages=history, tools=[tool()], max_tokens=2)
    filled = client.chat.completions.parse(model=model, messages=messages, response_format=City, max_tokens=MAX_TOKENS)
    response = client.responses.parse(model=model, input=QUESTION, text_format=City, max_output_tokens=MAX_TOKENS)
    assert response.output_parsed is not None
    report(
        streamed="".join(pieces),
        pieces=len(pieces),
        called=json.loads(call.function.arguments),
        filled=filled.choices[0].message.parsed,
    )


def with_langchain(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def chat(max_tokens: int) -> ChatOpenAI:
        return ChatOpenAI(base_url=url, model=model, api_key=KEY, max_tokens=max_tokens, max_retries=0)

    pieces = [chunk.text for chunk in chat(STREAM_TOKENS).stream(QUESTION) if chunk.text]
    bound = chat(MAX_TOKENS).bind_tools([tool()], tool_choice=TOOL)
    message = bound.invoke(QUESTION)
    calls = message.tool_calls
    assert {call["name"] for call in calls} == {TOOL}
    answers = [ToolMessage("rain", tool_call_id=call["id"]) for call in calls]
    chat(2).bind_tools([tool()]).invoke([HumanMessage(QUESTION), message, *answers])
    filled = chat(MAX_TOKENS).with_structured_output(City, method="json_schema").invoke(QUESTION)
    report(streamed="".join(pieces), pieces=len(pieces), called=calls[0]["args"], filled=filled)


def with_llama_index(url: str, model: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def chat(max_tokens: int) -> OpenAILike:
        return OpenAILike(
            model=model, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True,
            should_use_structured_outputs=True, context_window=2048, max_tokens=max_tokens, max_retries=0,
        )  # fmt: skip

    def weather(name: str, people: int) -> str:
        """Tell the weather of a city."""
        return f"rain over {people} people in {name}"

    question = [ChatMessage(role="user", content=QUESTION)]
    pieces = [chunk.delta for chunk in chat(STREAM_TOKENS).stream_chat(question) if chunk.delta]
    tool = FunctionTool.from_defaults(fn=weather, fn_schema=City)
    llm = chat(MAX_TOKENS)
    answer = llm.chat_with_tools([tool], chat_history=question, tool_required=True)
    call = llm.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "weather"
    filled = llm.as_structured_llm(City).chat(question).raw
    report(streamed="".join(pieces), pieces=len(pieces), called=call.tool_kwargs, filled=filled)


def with_litellm(url: str, model: str) -> None:
    """Call completion as LiteLLM's proxy does."""
    import litellm

    common = {
        "model": f"hosted_vllm/{model}",
        "api_base": url,
        "api_key": KEY,
        "messages": [{"role": "user", "content": QUESTION}],
        "num_retries": 0,
    }
    stream = litellm.completion(**common, stream=True, max_tokens=STREAM_TOKENS)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    named = {"type": "function", "function": {"name": TOOL}}
    answer = litellm.completion(**common, tools=[tool()], tool_choice=named, max_tokens=MAX_TOKENS)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == TOOL
    filled = litellm.completion(**common, response_format=City, max_tokens=MAX_TOKENS)
    report(
        streamed="".join(pieces),
        pieces=len(pieces),
        called=json.loads(call.function.arguments),
        filled=City.model_validate_json(filled.choices[0].message.content),
    )


def with_smolagents(url: str, model: str) -> None:
    """smolagents' OpenAIModel, by the calls that its agents make."""
    from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool

    class Weather(Tool):
        name, description, output_type = TOOL, TOOL_TEXT, "string"
        inputs = {  # noqa: RUF012
            "name": {"type": "string", "description": "The city.", "maxLength": 20},
            "people": {"type": "integer", "description": "How many.", "minimum": 0, "maximum": 99_999_999},
        }

        def forward(self, name: str, people: int) -> str:
            return f"rain over {people} people in {name}"

    def chat(max_tokens: int) -> OpenAIModel:
        return OpenAIModel(model, api_base=url, api_key=KEY, max_tokens=max_tokens, client_kwargs={"max_retries": 0})

    question = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]
    pieces = [delta.content for delta in chat(STREAM_TOKENS).generate_stream(question) if delta.content]
    llm = chat(MAX_TOKENS)
    answer = llm.generate(question, tools_to_call_from=[Weather()], parallel_tool_calls=False)
    (call,) = answer.tool_calls
    assert call.function.name == TOOL
    arguments = call.function.arguments
    called = json.loads(arguments) if isinstance(arguments, str) else arguments
    result = ChatMessage(role=MessageRole.TOOL_RESPONSE, content=[{"type": "text", "text": "rain"}])
    chat(2).generate([*question, result])
    schema = {"name": "city", "strict": True, "schema": City.model_json_schema()}
    filled = llm.generate(question, response_format={"type": "json_schema", "json_schema": schema})
    report(streamed="".join(pieces), pieces=len(pieces), called=called, filled=City.model_validate_json(filled.content))


async def with_pydantic_ai(url: str, name: str) -> None:
    """Run agents with a stream, with a tool in their loop, and with a model as output."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key=KEY))
    talker = Agent(model, model_settings=ModelSettings(max_tokens=STREAM_TOKENS))
    async with talker.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    called: list[dict[str, Any]] = []

    def weather(city: City) -> str:
        """Tell the weather of a city."""
        called.append(city.model_dump())
        return "rain"

    # An output that is a tool: every turn has to call one of them, and the second is held to the last.
    one = ModelSettings(max_tokens=MAX_TOKENS, parallel_tool_calls=False)
    caller = Agent(model, output_type=weather, model_settings=one)
    await caller.run(QUESTION)
    filler = Agent(model, output_type=NativeOutput(City), model_settings=ModelSettings(max_tokens=MAX_TOKENS))
    filled = (await filler.run(QUESTION)).output
    report(streamed="".join(pieces), pieces=len(pieces), called=called[0], filled=filled)


def with_instructor(url: str, model: str) -> None:
    """Fill the schema by tools and by JSON schema, over OpenAI's client."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    common = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
    }
    by_tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    called = by_tools.create(response_model=City, **common)
    by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    filled = by_schema.create(response_model=City, **common)
    partial = list(by_schema.create_partial(response_model=City, **common))
    report(streamed=str(partial[-1]), pieces=len(partial), called=called.model_dump(), filled=filled)


async def with_openai_agents(url: str, name: str) -> None:
    """Run the SDK's loop with a tool, over responses and over chat completions."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
    kinds = (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel)
    for kind in kinds:
        streamed, pieces, called, filled = await _run_agents(kind(model=name, openai_client=client))
    report(streamed=streamed, pieces=pieces, called=called, filled=filled)


async def _run_agents(model: Any) -> tuple[str, int, dict[str, Any], City]:
    import agents

    most = agents.ModelSettings(max_tokens=MAX_TOKENS)
    # Its loop takes an answer that was cut off for an error, so what is streamed is an answer that ends by itself.
    filler = agents.Agent(name="filler", model=model, output_type=City, model_settings=most)
    stream = agents.Runner.run_streamed(filler, QUESTION)
    pieces = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    called: list[dict[str, Any]] = []

    @agents.function_tool
    def weather(city: City) -> str:
        """Tell the weather of a city."""
        called.append(city.model_dump())
        return "rain"

    must = agents.ModelSettings(max_tokens=MAX_TOKENS, tool_choice="required", parallel_tool_calls=False)
    # After the first turn the loop asks again without the choice, and wants an answer of the type.
    caller = agents.Agent(
        name="caller", model=model, tools=[weather], model_settings=must, tool_use_behavior="stop_on_first_tool"
    )
    await agents.Runner.run(caller, QUESTION)
    return "".join(pieces), len(pieces), called[0], stream.final_output


def with_anthropic(url: str, model: str) -> None:
    """Use a stream, a tool streamed and answered, a schema, and a count of tokens."""
    import anthropic

    client = anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0, _strict_response_validation=True
    )
    messages = [{"role": "user", "content": QUESTION}]
    common = {"model": model, "system": [{"type": "text", "text": "Be brief."}]}
    with client.messages.stream(messages=messages, max_tokens=STREAM_TOKENS, **common) as stream:
        pieces = list(stream.text_stream)
        ended = stream.get_final_message()
    assert ended.stop_reason in ("max_tokens", "end_turn") and ended.usage.output_tokens <= STREAM_TOKENS
    own = {"name": TOOL, "description": TOOL_TEXT, "input_schema": City.model_json_schema()}
    common["tools"] = [own]
    must = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(messages=messages, tool_choice=must, max_tokens=MAX_TOKENS, **common)
    with client.messages.stream(messages=messages, tool_choice=must, max_tokens=MAX_TOKENS, **common) as stream:
        called = stream.get_final_message()
    for answer in (whole, called):
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert (call.name, answer.stop_reason) == (TOOL, "tool_use")
        City.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    history = [
        *messages,
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": [result]},
    ]
    counted = client.messages.count_tokens(messages=history, **common).input_tokens
    usage = client.messages.create(messages=history, max_tokens=2, **common).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    schema = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
    filled = client.messages.create(messages=messages, model=model, output_config=schema, max_tokens=MAX_TOKENS)
    try:
        client.messages.create(messages=messages, model="absent", max_tokens=2)
    except anthropic.NotFoundError as error:
        assert error.request_id and error.body["error"]["type"] == "not_found_error"
    else:
        raise SystemExit("an absent model answered")
    report(
        streamed="".join(pieces),
        pieces=len(pieces),
        called=call.input,
        filled=City.model_validate_json("".join(block.text for block in filled.content if block.type == "text")),
    )


CLIENTS = {
    "ask": ask,
    "anthropic": with_anthropic,
    "openai": with_openai,
    "langchain": with_langchain,
    "llama_index": with_llama_index,
    "litellm": with_litellm,
    "pydantic_ai": with_pydantic_ai,
    "instructor": with_instructor,
    "openai_agents": with_openai_agents,
    "smolagents": with_smolagents,
}


def main() -> None:
    client, url, model = sys.argv[1:]
    running = CLIENTS[client](url, model)
    if running is not None:
        asyncio.run(running)


if __name__ == "__main__":
    main()
