"""Tests of unmodified clients against suites: each agent client streams, has a tool called and a schema filled, on
simulated tokens and on a real model's."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from libs.testing.suites.suite import RunningSuite
from tests.e2e.clients.asking import AGENT_CLIENTS, CLIENTS, ask, suite_on

# On a loaded machine the real model takes minutes for answers that clients wait a minute for.
pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.packages, pytest.mark.timeout(900)]


ENGINES = ("bundled", "torch")


@pytest.fixture(scope="module", params=["sim", *(pytest.param(name, marks=pytest.mark.torch) for name in ENGINES)])
def suite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningSuite, str]]:
    with suite_on(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.mark.parametrize("client", [*CLIENTS, *AGENT_CLIENTS])
def test_a_client_streams_calls_a_tool_and_fills_a_schema(
    suite: tuple[RunningSuite, str], client: str, tmp_path: Path
) -> None:
    running, model = suite
    if client in CLIENTS and model != "sim":
        pytest.skip("it asks for text alone, of the sim engine")
    outcome, said = ask(client, running.gateway, model, tmp_path)
    if outcome == "not here" and os.environ.get("CI", "").lower() not in ("1", "true"):
        pytest.skip(said)
    assert outcome == "answered", said


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "people": {"type": "integer", "minimum": 1, "maximum": 9999999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "population", "description": "Tell it.", "parameters": SCHEMA}}


def test_a_named_tool_is_called_and_a_schema_filled_with_and_without_streaming(suite: tuple[RunningSuite, str]) -> None:
    running, model = suite
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Which city has the Eiffel Tower?"}],
        "temperature": 0,
        "max_tokens": 400,
    }
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "population"}}}
    kept = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
    }
    with openai.OpenAI(base_url=f"{running.gateway}/v1", api_key="any", max_retries=0) as client:
        choice = client.chat.completions.create(**body, **named).choices[0]
        (call,) = choice.message.tool_calls or ()
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "population")
        streamed = ""
        for chunk in client.chat.completions.create(**body, **named, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                streamed += delta.function.arguments or ""
        answer = client.chat.completions.create(**body, **kept).choices[0]
    assert streamed == call.function.arguments
    for filled in (json.loads(call.function.arguments), json.loads(answer.message.content or "")):
        assert filled.keys() == {"city", "people"} and isinstance(filled["people"], int)
        assert filled["city"] == "Paris" or model == "sim", "a real model calls it"
