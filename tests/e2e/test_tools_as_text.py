"""Tests of tools on a model whose chat template supports none, through a whole suite and the official `openai`
client."""

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import openai
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION: Final = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOLS: Final[list[Any]] = [{"type": "function", "function": FUNCTION}]
ASKS: Final = {"role": "user", "content": "What is the weather in Oslo?"}
NOTE: Final = {"tools_as_text": "hermes"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("suite")
    file = folder / "plain.jinja"
    file.write_text(TEMPLATE)
    with running_suite(folder, "--engine", "sim", "--chat-template", str(file)) as found:
        yield found


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"model": "sim", "messages": [ASKS], "tools": TOOLS, "max_tokens": 200, **fields}
    return client.chat.completions.create(**body)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_exact_and_its_result_continues_the_chat(client: openai.OpenAI, choice: Any) -> None:
    answer = chat(client, tool_choice=choice, parallel_tool_calls=False)  # a third turn would be truncated
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.x_fulcrum == NOTE
    call = message.tool_calls[0]
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"} and arguments["unit"] in ("C", "F")
    history = [ASKS, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = chat(client, messages=history, max_tokens=8)
    # Calls and results count with their tokens, without omissions.
    shorter = chat(client, messages=[ASKS], max_tokens=8)
    assert after.usage.prompt_tokens - shorter.usage.prompt_tokens > len(call.function.arguments) + len("rain")
    without = chat(client, messages=history, max_tokens=8, tools=openai.omit)
    assert without.x_fulcrum == NOTE
    assert without.usage.prompt_tokens < after.usage.prompt_tokens


def test_a_streamed_call_equals_the_whole_one_and_one_chunk_has_the_note(client: openai.OpenAI) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 7, "temperature": 0.5}
    (whole,) = chat(client, **fields).choices[0].message.tool_calls
    chunks = list(chat(client, **fields, stream=True, n=2, stream_options={"include_usage": True}))
    deltas = [
        call
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == 0
        for call in choice.delta.tool_calls or ()
    ]
    assert deltas[0].function.name == whole.function.name
    assert "".join(call.function.arguments or "" for call in deltas) == whole.function.arguments
    assert [chunk.x_fulcrum for chunk in chunks if hasattr(chunk, "x_fulcrum")] == [NOTE]


def test_the_model_may_answer_without_a_call(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content and answer.x_fulcrum == NOTE
    plain = chat(client, max_tokens=12, tools=openai.omit)
    assert not hasattr(plain, "x_fulcrum")
    assert not any(hasattr(chunk, "x_fulcrum") for chunk in chat(client, tools=openai.omit, stream=True, max_tokens=4))


def test_responses_call_tools_given_as_text(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **FUNCTION, "strict": True}]
    answer = client.responses.create(
        model="sim", input="Weather?", tools=tools, tool_choice="required", max_output_tokens=200
    )
    assert answer.output[0].type == "function_call" and answer.output[0].name == "weather"
    assert answer.to_dict()["x_fulcrum"] == NOTE


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_tools_given_as_text(suite: RunningSuite, stream: bool) -> None:
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
    choice = {"type": "any", "disable_parallel_tool_use": True}  # a third call would be truncated
    body = {"model": "sim", "max_tokens": 200, "messages": [ASKS], "tools": [tool], "tool_choice": choice}
    answer = httpx.post(f"{suite.gateway}/v1/messages", json={**body, "stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        assert answer.text.count("x_fulcrum") == 1 and '"type":"tool_use"' in answer.text
        return
    assert answer.json()["x_fulcrum"] == NOTE
    assert (answer.json()["stop_reason"], answer.json()["content"][0]["name"]) == ("tool_use", "weather")
