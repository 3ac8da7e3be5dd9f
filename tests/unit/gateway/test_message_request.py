"""Tests of a body of /v1/messages as the chat that it becomes, and of unsupported fields."""

import json
from typing import Any

import pytest

from libs.contracts.errors import InvalidRequest, UnsupportedField
from libs.model.chat import ChatTemplate
from libs.model.info import sim_tokenizer
from libs.model.tokenizer import Tokenizer
from services.gateway.images.files import SentImage
from services.gateway.messages.request import parse_count, parse_message
from services.gateway.messages.schema import CountRequest, MessageRequest
from services.gateway.request.parse import ParsedRequest
from services.gateway.request.prompt import ServedModel, tokenise
from tests.unit.gateway.test_tokenise import EFFORT, MODEL, PLAIN, SWITCH, Threads

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
MARK = {"type": "ephemeral", "ttl": "1h"}


def body(**fields: Any) -> bytes:
    whole = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def parsed_request(**fields: Any) -> ParsedRequest:
    return parse_message(body(**fields))


def turns(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in parsed_request(messages=list(messages), **fields).messages]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_sampling_and_stops_equal_those_of_a_chat() -> None:
    found = parsed_request(temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["a", "b"], stream=True)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.top_k) == (0.5, 0.25, 3)
    assert (found.stops, found.stream, found.max_tokens, found.n) == (("a", "b"), True, 5, 1)
    assert found.ordered and not found.continues
    assert {"temperature", "top_p", "top_k"} <= parsed_request().unset


def test_system_text_comes_first_without_anthropics_billing_header() -> None:
    assert turns(USER, system="be brief")[0] == {"role": "system", "content": "be brief"}
    blocks = [text("x-anthropic-billing-header: cch=1"), text("a", cache_control=MARK), text("b")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns(USER, system=blocks) == [{"role": "system", "content": parts}, USER]
    assert turns(USER, system=blocks[:1]) == turns(USER, system="") == [USER]


def test_the_text_of_a_turn_is_one_string_or_its_parts() -> None:
    assert turns({"role": "user", "content": [text("a", cache_control=MARK)]}) == [{"role": "user", "content": "a"}]
    (found,) = turns({"role": "user", "content": [text("a", citations=None), text("b")]})
    assert [part["text"] for part in found["content"]] == ["a", "b"]


def test_an_earlier_answer_includes_reasoning_text_and_calls() -> None:
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        text("wait"),
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}, "caller": {"type": "direct"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
    question = {"role": "user", "content": [result, text("and?")]}
    _, said, found, then = turns(USER, {"role": "assistant", "content": answer}, question)
    assert (said["content"], said["reasoning_content"]) == ("wait", "hm")
    (call,) = said["tool_calls"]
    assert (call["id"], call["function"]["name"], str(call["function"]["arguments"])) == ("t1", "f", '{"a": "é"}')
    assert found == {"role": "tool", "content": "rain", "tool_call_id": "t1"}
    assert then == {"role": "user", "content": "and?"}


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "rain"}, "rain"),
        ({"content": [text("rain")]}, "rain"),
        ({}, ""),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": [text("no such city")], "is_error": True}, "Error: no such city"),
        ({"is_error": True, "content": None}, "Error: "),
    ],
)
def test_a_tools_result_is_its_own_turn_and_reports_a_failed_call(result: dict[str, Any], shown: str) -> None:
    content = [{"type": "tool_result", "tool_use_id": "t1", "cache_control": MARK, **result}]
    assert turns({"role": "user", "content": content}) == [{"role": "tool", "content": shown, "tool_call_id": "t1"}]


def test_a_call_without_text_is_a_turn_without_content() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    (found,) = turns({"role": "assistant", "content": [call]})
    assert found["content"] is None


def test_an_unfinished_answer_is_continued() -> None:
    begun = parsed_request(messages=[USER, {"role": "assistant", "content": "The"}])
    assert begun.continues and not begun.opens_answer


@pytest.mark.parametrize(
    ("choice", "required", "named", "parallel"),
    [
        (None, False, None, True),
        ({"type": "auto"}, False, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, None, False),
        ({"type": "any"}, True, None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, None, False),
        ({"type": "tool", "name": "f"}, True, "f", False),
    ],
)
def test_tool_choice_equals_that_of_a_chat(choice: Any, required: bool, named: str | None, parallel: bool) -> None:
    found = parsed_request(tools=[{**TOOL, "cache_control": MARK, "type": "custom"}], tool_choice=choice).tools
    assert found is not None and (found.required, found.named, found.parallel) == (required, named, parallel)
    assert found.schemas == {"f": TOOL["input_schema"]}


def test_no_tool_can_be_called_if_tool_choice_is_none() -> None:
    assert parsed_request(tools=[TOOL], tool_choice={"type": "none"}).tools is None


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, None),
        ({"output_config": {"effort": "max"}}, None, "max"),
        ({"output_config": {"effort": "xhigh"}}, None, "xhigh"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, False, None),
    ],
)
def test_thinking_is_on_off_or_left_to_the_template(fields: Any, thinking: bool | None, effort: str | None) -> None:
    found = parsed_request(**fields)
    assert (found.thinking, found.effort) == (thinking, effort)


def test_consecutive_user_turns_are_joined_and_system_text_among_them_belongs_to_the_user() -> None:
    behind = {"role": "system", "content": "be brief"}
    (found,) = turns(USER, {"role": "user", "content": [text("b")]}, behind)
    assert (found["role"], [part["text"] for part in found["content"]]) == ("user", ["hi", "b", "be brief"])
    answer = {"role": "assistant", "content": "a"}
    assert [turn["role"] for turn in turns(USER, answer, USER)] == ["user", "assistant", "user"]


async def test_an_effort_is_a_hint_that_no_model_refuses() -> None:
    for template, shown in ((SWITCH, "hiTrue"), (EFFORT, "hilow"), (PLAIN, "hi")):
        model = ServedModel(MODEL.info, Tokenizer(sim_tokenizer(), ChatTemplate(template, {})))
        with Threads(1) as threads:
            (tokens,) = await tokenise(parsed_request(output_config={"effort": "low"}), model, threads)
        assert model.tokenizer.decode(tokens) == shown


@pytest.mark.parametrize(
    ("template", "kind", "shown"),
    [
        (SWITCH, "enabled", "hiTrue"),
        (SWITCH, "disabled", "hiFalse"),
        (SWITCH, "adaptive", "hi"),
        (PLAIN, "disabled", "hi"),
        (PLAIN, "adaptive", "hi"),
        (PLAIN + "</think>", "enabled", "hi</think>"),
        (PLAIN, "enabled", "thinking is not served for model 'sim': it never thinks"),
        (PLAIN + "</think>", "disabled", "thinking is not served for model 'sim': it always thinks"),
    ],
)
async def test_thinking_applies_if_the_template_has_a_switch_for_it(template: str, kind: str, shown: str) -> None:
    model = ServedModel(MODEL.info, Tokenizer(sim_tokenizer(), ChatTemplate(template, {})))
    with Threads(1) as threads:
        try:
            (tokens,) = await tokenise(parsed_request(thinking={"type": kind}), model, threads)
            found = model.tokenizer.decode(tokens)
        except UnsupportedField as error:
            found = error.message
            assert error.param == "thinking"
    assert found == shown


def test_a_schema_of_the_answer_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = parsed_request(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert (found.schema, found.schema_field) == (schema, "output_config.format")


def test_fields_without_effect_are_accepted() -> None:
    plain = parsed_request(
        service_tier="auto", mcp_servers=[], container=None, metadata={"user_id": "u"}, cache_control=MARK
    )
    assert plain == parsed_request(service_tier="standard_only", speed="standard")
    assert plain == parsed_request(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


def test_a_token_count_reads_the_same_conversation() -> None:
    conversation: dict[str, Any] = {"system": "s", "tools": [TOOL], "messages": [USER]}
    assert parse_count(body(max_tokens=..., **conversation)).messages == parsed_request(**conversation).messages
    assert set(CountRequest.__struct_fields__) < set(MessageRequest.__struct_fields__)


def test_images_become_parts_of_the_chat_beside_the_texts() -> None:
    found = parsed_request(
        messages=[{"role": "user", "content": [IMAGE, text("a"), IMAGE]}, {"role": "user", "content": "b"}]
    )
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert [*found.messages] == [{"role": "user", "content": content}]
    assert found.images == (SentImage("data:image/png;base64,AAAA", "messages"),) * 2
    by_url = parsed_request(messages=[{"role": "user", "content": [BY_URL]}])
    assert by_url.images == (SentImage("https://example.com/a.png", "messages"),)
    alone = parsed_request(messages=[{"role": "user", "content": [IMAGE]}])
    assert alone.messages[0]["content"] == [{"type": "image"}]


IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
BY_URL = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
BY_FILE = {"type": "image", "source": {"type": "file", "file_id": "a"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": ...}, "max_tokens", "is missing"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"surprise": 1}, "surprise", "not served"),
    ({"container": "c"}, "container", "not served"),
    ({"service_tier": "priority"}, "service_tier", "not served"),
    ({"temperature": 3}, "temperature", "<= 2"),
    ({"stop_sequences": ["a" * 256] * 5}, "stop_sequences", "over 1024 characters"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role", "served are user, assistant, system"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0]", "has no image blocks"),
    ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0]", "has no image blocks"),
    (
        {"messages": [{"role": "user", "content": [BY_FILE]}]},
        "messages[0].content[0].source.type",
        "'file' is not served; served are base64, url",
    ),
    ({"messages": [{"role": "user", "content": [text("a", x=1)]}]}, "messages[0].content[0].x", "not served"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "messages[0].content[0]",
        "a message of role user has no thinking blocks",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        "messages[0].content[0]",
        "a message of role assistant has no tool_result blocks",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0].type",
        "'image' is not served",
    ),
    ({"system": [IMAGE]}, "system[0].type", "'image' is not served; served is text"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 1}]},
        "tools[0].type",
        "'web_search_20250305'",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "served is custom"),
    ({"tools": [TOOL, TOOL]}, "tools", "two are named"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
    ({"tool_choice": {"type": "most"}}, "tool_choice.type", "served are auto, any, tool, none"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "not among the tools"),
    ({"thinking": {"type": "between"}}, "thinking.type", "served are enabled, disabled, adaptive"),
    ({"output_config": {"format": {"type": "grammar", "schema": {}}}}, "output_config.format.type", "json_schema"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed_request(**fields)
    assert caught.value.param == param
    assert words in caught.value.message
