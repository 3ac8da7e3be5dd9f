"""Tests that schemas which cannot be enforced are refused with the reason, in bounded time, and checked once."""

import asyncio
import json
from typing import Any

import pytest

from libs.contracts.errors import InvalidRequest, QueueFull
from services.gateway.answers import guide
from services.gateway.answers.guide import SchemaCheck, SchemaVerdict
from services.gateway.request.intake import MAX_SCHEMA_CHARS, check_schemas
from services.gateway.request.parse import parse_chat

IMPOSSIBLE: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"type": "wood"}, "Invalid type: wood"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"$ref": "#/nowhere"}, "does not exist"),
    ({"not": {}}, "not"),
]
SLOW = {"allOf": [{"type": "string", "pattern": f".*a{{{times}}}b.*"} for times in range(2, 40)]}


def asks(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


def answer_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.system
@pytest.mark.parametrize(("schema", "reason"), IMPOSSIBLE, ids=str)
async def test_an_unsatisfiable_schema_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await check_schemas(parse_chat(asks(**answer_of(schema))), SchemaCheck())
    assert caught.value.param == "response_format"
    assert reason in caught.value.message


@pytest.mark.system
async def test_the_arguments_of_a_required_tool_call_are_checked() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"allOf": [each]}}}
             for name, each in (("f", {}), ("g", {"type": "string"}))]  # fmt: skip
    check = SchemaCheck()
    with pytest.raises(InvalidRequest) as caught:
        await check_schemas(parse_chat(asks(tools=tools, tool_choice="required")), check)
    assert caught.value.param == "tools[1].function"
    await check_schemas(
        parse_chat(asks(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})), check
    )


@pytest.mark.system
@pytest.mark.slow
async def test_a_schema_that_takes_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="takes more than 2 s"):
        await check_schemas(parse_chat(asks(**answer_of(SLOW))), SchemaCheck())


async def test_a_schema_over_the_size_bound_is_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match="characters"):
        await check_schemas(parse_chat(asks(**answer_of({"enum": ["x" * MAX_SCHEMA_CHARS]}))), SchemaCheck())


async def test_verdicts_are_cached_and_waiting_checks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, requested = asyncio.Event(), []

    async def ask(schema: str) -> SchemaVerdict:
        requested.append(schema)
        await gate.wait()
        return SchemaVerdict("no")

    monkeypatch.setattr(guide, "_ask", ask)
    check = SchemaCheck()
    most = guide.MAX_CHECKS + guide.MAX_WAITING
    waiting = [asyncio.ensure_future(check.verdict(str(number))) for number in range(most)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await check.verdict("one more")
    assert len(requested) == guide.MAX_CHECKS
    waiting += [asyncio.ensure_future(check.verdict("0")) for _ in range(100)]
    gate.set()
    assert set(await asyncio.gather(*waiting)) == {SchemaVerdict("no")}
    assert (await check.verdict("0")).fault == "no"
    assert len(requested) == most


async def test_schemas_of_one_tenant_leave_a_check_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, requested = asyncio.Event(), []

    async def ask(schema: str) -> SchemaVerdict:
        requested.append(schema)
        await gate.wait()
        return SchemaVerdict("no")

    class Apart:
        are_distinct = True

        def weight(self, _tenant: str) -> int:
            return 1

    monkeypatch.setattr(guide, "_ask", ask)
    check = SchemaCheck(Apart())
    flood = [asyncio.ensure_future(check.verdict(f"flood {number}", "flood")) for number in range(50)]
    await asyncio.sleep(0)
    assert requested == ["flood 0"]
    other = asyncio.ensure_future(check.verdict("flood 0", "modest"))
    await asyncio.sleep(0)
    assert requested == ["flood 0", "flood 0"], "it waits for no check of another tenant"
    gate.set()
    found = await asyncio.gather(*flood, return_exceptions=True)
    assert (await other).fault == "no"
    refused = [each for each in found if isinstance(each, QueueFull)]
    assert 50 - len(refused) == 1 + guide.MAX_WAITING // 2, "half of the line is left to others"


@pytest.mark.system
async def test_arguments_of_tools_are_closed_and_answers_stay_as_open_as_written() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = await check_schemas(
        parse_chat(asks(**answer_of(schema), tools=[tool], tool_choice="required")), SchemaCheck()
    )
    ((name, arguments),) = found.tools
    assert name == "f" and arguments.get("additionalProperties") is False
    assert found.answer is not None and found.answer.get("additionalProperties", True) is not False
