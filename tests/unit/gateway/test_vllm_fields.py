"""Tests of fields that vLLM, OpenAI and Anthropic accept: those that request nothing, other names of served ones."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from libs.contracts.errors import InvalidRequest, UnsupportedField
from services.gateway.embeddings.exchange import ScoreReader, pooled_readers
from services.gateway.messages.request import parse_count, parse_message
from services.gateway.request.intake import Arrival
from services.gateway.request.parse import parse_chat, parse_completion
from services.gateway.responses.request import build_response_request, parse_response

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
ARRIVAL = cast(Arrival, None)
"""No code under test reads it."""
RESPONSE = {"model": "m", "input": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def body(plain: dict[str, Any], **change: Any) -> bytes:
    return json.dumps({**plain, **change}).encode()


@pytest.mark.parametrize(
    "field, value",
    [
        ("length_penalty", 1.0), ("length_penalty", 1), ("priority", 0), ("bad_words", []), ("documents", []),
        ("mm_processor_kwargs", {}), ("media_io_kwargs", {}), ("vllm_xargs", {}), ("stream_interval", 1),
        ("return_tokens_as_token_ids", False), ("return_prompt_text", False), ("watermarking", False),
        ("prompt_cache_retention", "24h"), ("session_id", "agent-1"),
        ("priority", 0.0), ("stream_interval", 1.0),
    ],
)  # fmt: skip
def test_vllms_defaults_and_hints_change_nothing_on_any_route(field: str, value: Any) -> None:
    assert parse_chat(body(CHAT, **{field: value})) == parse_chat(body(CHAT))
    assert parse_completion(body(TEXT, **{field: value})) == parse_completion(body(TEXT))
    found, plain = (
        build_response_request(parse_response(body(RESPONSE, **more)), [], "resp_1", 0).parsed
        for more in ({field: value}, {})
    )
    assert found == plain


@pytest.mark.parametrize(
    "field, value",
    [
        ("priority", 5),
        ("priority", 0.5),
        ("priority", False),
        ("stream_interval", True),
        ("bad_words", ["x"]),
        ("length_penalty", 2.0),
    ],
)
def test_values_that_would_change_the_answer_are_refused_by_name(field: str, value: Any) -> None:
    for parse, plain in ((parse_chat, CHAT), (parse_completion, TEXT), (parse_response, RESPONSE)):
        with pytest.raises(UnsupportedField) as caught:
            parse(body(plain, **{field: value}))
        assert caught.value.param == field


def test_special_tokens_are_those_of_the_template_on_chats_and_of_the_tokenizer_on_prompts() -> None:
    assert parse_chat(body(CHAT, add_special_tokens=False)) == parse_chat(body(CHAT))
    assert parse_completion(body(TEXT, add_special_tokens=True)) == parse_completion(body(TEXT))
    for parse, plain, value in ((parse_chat, CHAT, True), (parse_completion, TEXT, False)):
        with pytest.raises(UnsupportedField):
            parse(body(plain, add_special_tokens=value))


def test_whole_numbers_may_be_written_with_a_point() -> None:
    given = {"max_tokens": 16.0, "seed": 7.0, "n": 2.0, "top_k": 10.0, "min_tokens": 1.0}
    whole = {name: int(value) for name, value in given.items()}
    assert parse_chat(body(CHAT, **given)) == parse_chat(body(CHAT, **whole))
    assert parse_completion(body(TEXT, **given)) == parse_completion(body(TEXT, **whole))
    assert parse_response(body(RESPONSE, max_output_tokens=16.0)).max_output_tokens == 16
    assert parse_message(body(CHAT, max_tokens=16.0)).max_tokens == 16
    for value in (16.5, 1e300, -1.0):
        with pytest.raises(InvalidRequest) as caught:
            parse_chat(body(CHAT, max_tokens=value))
        assert caught.value.param == "max_tokens"


def test_default_options_of_a_constraint_change_nothing_and_others_are_refused() -> None:
    choice = {"choice": ["a", "b"]}
    defaults = {"disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None}
    found = parse_chat(body(CHAT, structured_outputs={**choice, **defaults}))
    assert found == parse_chat(body(CHAT, structured_outputs=choice))
    with pytest.raises(UnsupportedField) as caught:
        parse_chat(body(CHAT, structured_outputs={**choice, "disable_any_whitespace": True}))
    assert caught.value.param == "structured_outputs.disable_any_whitespace"


def test_a_text_completion_keeps_to_a_response_format() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    found = parse_completion(body(TEXT, response_format=named))
    assert (found.schema, found.schema_field, found.strict) == (SCHEMA, "response_format", True)
    assert parse_completion(body(TEXT, response_format={"type": "json_object"})).schema == {"type": "object"}
    assert parse_completion(body(TEXT, response_format={"type": "text"})) == parse_completion(body(TEXT))
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body(TEXT, response_format=named, structured_outputs={"choice": ["a"]}))
    assert caught.value.param == "structured_outputs.choice"


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_response_format_means_the_same_on_chats_and_text_completions(strict: bool | None) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": strict}}
    chat, text = (
        parse(body(plain, response_format=named)) for parse, plain in ((parse_chat, CHAT), (parse_completion, TEXT))
    )
    assert (chat.schema, chat.schema_field, chat.strict) == (text.schema, text.schema_field, text.strict)
    for change in ({"structured_outputs": {"choice": ["a"]}}, {"ignore_eos": True}, {"min_tokens": 2}):
        errors = []
        for parse, plain in ((parse_chat, CHAT), (parse_completion, TEXT)):
            with pytest.raises(InvalidRequest) as caught:
                parse(body(plain, response_format=named, max_tokens=8, **change))
            errors.append((caught.value.param, caught.value.message))
        assert errors[0] == errors[1]


def test_only_a_tool_that_asks_for_deferred_loading_is_refused() -> None:
    function = {"type": "function", "name": "f", "parameters": SCHEMA}
    own = {"name": "f", "input_schema": SCHEMA}
    for parse, plain, tool in (
        (parse_message, {**CHAT, "max_tokens": 8}, own),
        (parse_response, RESPONSE, function),
    ):
        assert parse(body(plain, tools=[{**tool, "defer_loading": False}])) == parse(body(plain, tools=[tool]))
        with pytest.raises(UnsupportedField) as caught:
            parse(body(plain, tools=[tool, {**tool, "defer_loading": True}]))
        assert caught.value.param == "tools[1].defer_loading"


def test_what_other_providers_keep_with_an_answer_is_left_out() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "hi", "tool_calls": [call]}
    kept = {
        **answer,
        "tool_calls": [{**call, "extra_content": {"google": {"thought_signature": "x"}}}],
        "thinking_blocks": [{"type": "thinking", "thinking": "x", "signature": "y"}],
        "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
        "provider_specific_fields": {"citations": [1]},
    }
    found, plain = (
        parse_chat(body(CHAT, messages=[*CHAT["messages"], each, *CHAT["messages"]])) for each in (kept, answer)
    )
    assert found == plain
    with pytest.raises(UnsupportedField) as caught:
        parse_chat(body(CHAT, messages=[{"role": "user", "content": "hi", "thinking_blocks": [1]}]))
    assert caught.value.param == "messages[0].thinking_blocks"


def test_responses_take_vllms_sampling_fields() -> None:
    given = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"5": 1.0}, "stop_token_ids": [7]}
    found = build_response_request(parse_response(body(RESPONSE, **given)), [], "resp_1", 0).parsed
    assert found.sampling == parse_chat(body(CHAT, **given)).sampling


def test_a_refusal_of_tools_stays_one_beside_the_defaults() -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False, "defer_loading": False}
    requested = {"tools": [tool], "tool_choice": "none", "parallel_tool_calls": False, "priority": 0}
    request = parse_response(body(RESPONSE, **requested))
    assert (request.tool_choice, request.parallel_tool_calls, len(request.tools or ())) == ("none", False, 1)
    with pytest.raises(UnsupportedField):
        parse_response(body(RESPONSE, tools=[{**tool, "defer_loading": True}]))


def test_effort_max_is_an_effort() -> None:
    assert parse_chat(body(CHAT, reasoning_effort="max")).effort == "max"


def test_messages_take_the_older_name_of_an_output_format() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    plain = {**CHAT, "max_tokens": 8}
    newer = parse_message(body(plain, output_config={"format": form}))
    assert newer.schema == SCHEMA
    assert parse_message(body(plain, output_format=form)) == replace(newer, schema_field="output_format")
    found = parse_message(body(plain, tools=[{**tool, "defer_loading": False}]))
    assert found == parse_message(body(plain, tools=[tool]))
    with pytest.raises(UnsupportedField):
        parse_message(body(plain, tools=[{**tool, "defer_loading": True}]))


def test_an_output_format_is_dropped_by_no_null_and_excludes_one_of_the_newer_name() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    plain = {**CHAT, "max_tokens": 8}
    for config in (None, {}, {"format": None}, {"effort": "low", "format": None}):
        assert parse_message(body(plain, output_format=form, output_config=config)).schema == SCHEMA
    newer = {"output_config": {"format": form}}
    assert parse_message(body(plain, output_format=None, **newer)) == parse_message(body(plain, **newer))
    for parse, fields in ((parse_message, plain), (parse_count, CHAT)):
        with pytest.raises(InvalidRequest) as caught:
            parse(body(fields, output_format=form, **newer))
        assert (caught.value.param, "output_config.format" in caught.value.message) == ("output_format", True)


@pytest.mark.parametrize(
    "form, param",
    [
        ({"type": "json_schema"}, "output_format.schema"),
        ({"type": "text", "schema": SCHEMA}, "output_format.type"),
        ({"type": "json_schema", "schema": SCHEMA, "name": "a"}, "output_format.name"),
        ("json", "output_format"),
    ],
)
def test_an_invalid_output_format_is_refused_under_its_own_name(form: Any, param: str) -> None:
    for more in ({}, {"output_config": {"format": None}}):
        with pytest.raises(InvalidRequest) as caught:
            parse_message(body({**CHAT, "max_tokens": 8}, output_format=form, **more))
        assert caught.value.param == param


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_scores_take_vllms_other_names_of_the_texts(names: tuple[str, str]) -> None:
    texts = dict(zip(names, ("a", ["b", "c"]), strict=True))
    found, _ = await ScoreReader().read(body({"model": "m"}, **texts), ARRIVAL)
    assert found.prompts == ("a", "b", "c")
    with pytest.raises(InvalidRequest) as caught:
        await ScoreReader().read(body({"model": "m", "text_1": "a"}, **texts), ARRIVAL)
    assert caught.value.param == names[0]


def test_scores_and_reranks_answer_at_vllms_paths_too() -> None:
    assert {"/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"} <= pooled_readers().keys()


async def test_a_null_name_of_a_text_counts_as_absent() -> None:
    found, _ = await ScoreReader().read(
        body({"model": "m", "text_1": "a", "text_2": None}, queries=None, data_1=None, items=["b"], documents=None),
        ARRIVAL,
    )
    assert found.prompts == ("a", "b")
    for missing in ({"queries": None, "text_2": "b"}, {"text_1": "a", "text_2": None, "items": None}):
        with pytest.raises(InvalidRequest):
            await ScoreReader().read(body({"model": "m"}, **missing), ARRIVAL)
