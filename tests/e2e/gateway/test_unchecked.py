"""Tests of schemas with constraints that no grammar enforces, through the REST API."""

import json
from typing import Any, Final

import httpx
import pytest

from libs.testing.workers.scripted import ScriptedWorker
from tests.e2e.gateway.gateway_rig import CHAT

SCHEMA: Final = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ARGUMENTS: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^(?!admin)[a-z]+$"}},
    "required": ["name"],
}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"response_format": FORMAT},
    "/v1/completions": {"prompt": "x", "guided_json": SCHEMA},
    "/v1/responses": {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
FIELDS: Final = {
    "/v1/chat/completions": "response_format",
    "/v1/completions": "guided_json",
    "/v1/responses": "text.format",
    "/v1/messages": "output_config.format",
}


def body_of(route: str, worker: ScriptedWorker, text: str, **more: Any) -> dict[str, Any]:
    worker.script, worker.stops = list(text.encode()), True
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    kept = {key: CHAT[key] for key in (("model", "messages") if "chat" in route or "messages" in route else ("model",))}
    return {**kept, **BODIES[route], limit: len(text), **more}


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(("text", "satisfied"), [("[1, 2]", True), ("[1, 1]", False), ("[1, ", False)])
@pytest.mark.parametrize("route", BODIES)
async def test_an_answer_names_the_keywords_that_were_only_checked(
    http: httpx.AsyncClient, worker: ScriptedWorker, route: str, text: str, satisfied: bool
) -> None:
    answer = await http.post(route, json=body_of(route, worker, text))
    assert answer.status_code == 200, answer.text
    found = {"choice": 0, "field": FIELDS[route], "keywords": ["#/uniqueItems"], "satisfied": satisfied}
    assert answer.json()["x_fulcrum"] == {"unchecked": [found]}


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("route", BODIES)
async def test_a_stream_names_the_keywords_that_were_only_checked_once_at_its_end(
    http: httpx.AsyncClient, worker: ScriptedWorker, route: str, more: dict[str, Any]
) -> None:
    own = more if "completions" in route else {}
    answer = await http.post(route, json=body_of(route, worker, "[3, 3]", stream=True, **own))
    found = [each for each in events(answer) if '"unchecked"' in json.dumps(each)]
    assert len(found) == 1
    last = events(answer)[-1 if route != "/v1/messages" else -2]
    assert found == [last]
    notes = last["response"]["x_fulcrum"] if route == "/v1/responses" else last["x_fulcrum"]
    assert [each["satisfied"] for each in notes["unchecked"]] == [False]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
async def test_strict_refuses_such_a_schema_and_names_the_keyword(
    http: httpx.AsyncClient, worker: ScriptedWorker, route: str
) -> None:
    own: dict[str, Any] = {"name": "x", "schema": SCHEMA, "strict": True}
    strict: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"response_format": {"type": "json_schema", "json_schema": own}},
        "/v1/responses": {"text": {"format": {"type": "json_schema", **own}}},
    }
    answer = await http.post(route, json={**body_of(route, worker, "[]"), **strict[route]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, FIELDS[route])
    assert "uniqueItems" in error["message"]


@pytest.mark.parametrize(("name", "satisfied"), [("bob", True), ("admin", False)])
async def test_arguments_of_a_required_call_are_checked(
    http: httpx.AsyncClient, worker: ScriptedWorker, name: str, satisfied: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": ARGUMENTS}}]
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"name": "{name}"}}}}\n</tool_call>'
    worker.script, worker.stops = list(text.encode()), True
    body: dict[str, Any] = {**CHAT, "max_tokens": len(text), "tools": tools, "tool_choice": "required"}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    (found,) = answer["x_fulcrum"]["unchecked"]
    assert (found["field"], found["keywords"]) == ("tools[0].function", ["#/properties/name/pattern"])
    assert found["satisfied"] is satisfied
    tools[0]["function"] = {"name": "f", "parameters": ARGUMENTS, "strict": True}
    refused = await http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].function")
