"""Tests of /v1/messages over a worker with scripted answers; its own SDK is tested by `make test-clients`."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from libs.testing.workers.scripted import Plan, ScriptedWorker
from tests.e2e.test_responses import CALLED, SAID, THOUGHT, gateway, prompt, spoken, worker  # noqa: F401 - fixtures
from tests.unit.gateway.test_message_output import rebuilt

TOOL = {"name": "sum", "input_schema": {"type": "object", "properties": {}}}
QUESTION: dict[str, Any] = {"model": "sim", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def http(gateway: str) -> AsyncIterator[httpx.AsyncClient]:  # noqa: F811
    async with httpx.AsyncClient(base_url=gateway, headers={"x-api-key": "any"}, timeout=60) as found:
        yield found


async def ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/messages", json={**QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/messages", json={**QUESTION, **fields, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def test_a_message_has_thinking_text_and_calls_in_their_order(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,  # noqa: F811
) -> None:
    worker.script, worker.stops = spoken(THOUGHT + SAID + CALLED), True
    found = await ask(http, tools=[TOOL])
    thinking, text, call = found["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "two tools")
    assert text == {"type": "text", "text": "Wait."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "sum", {"a": 1})
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    assert found["usage"]["output_tokens"] == len(worker.script)
    again = rebuilt(await stream(http, tools=[TOOL]))
    again["content"][2]["id"], again["id"] = call["id"], found["id"]
    assert {**again, "usage": None} == {**found, "usage": None}


async def test_a_stop_sequence_is_named_and_not_included(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,  # noqa: F811
) -> None:
    worker.script, worker.stops = spoken(SAID + " And more."), True
    found = await ask(http, stop_sequences=["never", "And"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "And")
    assert found["content"] == [{"type": "text", "text": "Wait. "}]
    worker.script = spoken(SAID + "<|return|>")
    assert (await ask(http, stop_sequences=["never"]))["stop_reason"] == "end_turn"
    worker.stops = False
    cut = await ask(http, max_tokens=len(spoken(SAID)) - 1)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


async def test_the_conversation_reaches_the_model_and_its_tokens_are_counted(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,  # noqa: F811
) -> None:
    worker.script, worker.stops = spoken(THOUGHT + CALLED.removeprefix("<|end|><|start|>assistant")), True
    first = await ask(http, tools=[TOOL], system="Be brief.")
    call = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "no such tool", "is_error": True}
    conversation = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
        "messages": [
            *QUESTION["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
        ],
    }
    usage = (await ask(http, **conversation))["usage"]
    assert all(text in prompt(worker) for text in ("Be brief.", "hi", "Error: no such tool", "and now?"))
    counted = await http.post("/v1/messages/count_tokens", json={"model": "sim", **conversation})
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_required_tool_call_is_guided(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,  # noqa: F811
) -> None:
    worker.script, worker.stops = spoken(CALLED.removeprefix("<|end|><|start|>assistant")), True
    found = await ask(http, tools=[TOOL], tool_choice={"type": "any"})
    assert [block["type"] for block in found["content"]] == ["tool_use"]
    assert "functions.sum" in worker.submits[-1].sampling.guide
    await ask(http, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}, max_tokens=2)
    assert worker.submits[-1].sampling.guide


async def test_a_message_that_fails_in_mid_stream_ends_with_an_error(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,  # noqa: F811
) -> None:
    worker.plans.extend(Plan(tokens=2, fail=1) for _ in range(20))  # type: ignore[arg-type]
    events = await stream(http, max_tokens=40)
    assert events[-1]["type"] == "error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": []}}}}, "output_config.format"),
        ({"messages": [{"role": "user", "content": "a" * 10**5}]}, "messages"),
    ],
    ids=str,
)
async def test_a_request_that_does_not_fit_the_model_is_refused_by_field_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/messages", json={**QUESTION, **fields})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["param"] == param
