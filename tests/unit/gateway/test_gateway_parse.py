"""Tests of request bodies: what is accepted, and which field an error names."""

import json
from typing import Any

import pytest

from libs.contracts.errors import InvalidRequest, UnsupportedField
from services.gateway.request.parse import ParsedRequest, parse_chat, parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
TEXT_PART = {"type": "text", "text": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(**change: Any) -> ParsedRequest:
    return parse_chat(json.dumps({**CHAT, **change}).encode())


def completion(**change: Any) -> ParsedRequest:
    return parse_completion(json.dumps({**TEXT, **change}).encode())


BAD_CHAT = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["a" * 256] * 4 + ["b"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "a" * 1000}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "hi", "tool_calls": [CALLED]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHAT, ids=lambda value: str(value)[:60])
def test_an_invalid_value_is_refused_by_its_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**change)
    assert caught.value.param == param


UNSERVED = [
    {"functions": [{}]},
    {"modalities": ["text", "audio"]},
    {"audio": {}},
    {"prediction": {}},
    {"web_search_options": {}},
    {"store": True},
    {"best_of": 2},
    {"best_of": True},
    {"no_such_field": 1},
]


@pytest.mark.parametrize("change", UNSERVED, ids=str)
def test_an_unsupported_field_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField) as caught:
        chat(**change)
    assert [caught.value.param] == list(change)
    assert caught.value.code == "unsupported_field"


HARMLESS = [
    {"tools": None, "tool_choice": None, "response_format": None, "audio": None, "no_such_field": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}, "modalities": ["text"]},
    {"stream": True, "stream_options": {"continuous_usage_stats": False}},
    {"store": False, "service_tier": "auto", "user": "u", "metadata": {"a": "b"}},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"include_stop_str_in_output": False, "skip_special_tokens": True, "use_beam_search": False},
    {"temperature": None, "n": None, "stop": None, "logit_bias": None, "max_tokens": None, "seed": None},
]


@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_a_field_with_no_effect_is_accepted(change: dict[str, Any]) -> None:
    assert chat(**change).n == 1


def test_an_answers_message_can_be_sent_back_as_the_client_library_serialises_it() -> None:
    dumped = {
        "role": "assistant", "content": "hello", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    parsed = chat(messages=[*CHAT["messages"], dumped])
    assert parsed.messages[1] == {"role": "assistant", "content": "hello"}
    with pytest.raises(UnsupportedField) as caught:
        chat(messages=[{**dumped, "audio": {"id": "a"}}])
    assert caught.value.param == "messages[0].audio"


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I can't."},
        {"content": [{"type": "refusal", "refusal": "I can't."}], "refusal": None},
    ],
    ids=["a field", "a part"],
)
def test_a_refusal_in_an_earlier_answer_becomes_its_text(refused: dict[str, Any]) -> None:
    (turn,) = chat(messages=[{"role": "assistant", **refused}]).messages
    assert turn["content"] in ("I can't.", [{"type": "text", "text": "I can't."}])
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}])
    assert caught.value.param == "messages[0].content[0].type"


def test_calls_and_reasoning_of_earlier_answers_reach_the_template() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALLED], "reasoning_content": "Hm."}
    parsed = chat(messages=[*CHAT["messages"], answer, {"role": "tool", "tool_call_id": "c1", "content": [TEXT_PART]}])
    _, turn, result = parsed.messages
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (turn["content"], turn["reasoning_content"]) == (None, "Hm.")
    assert result == {"role": "tool", "content": [TEXT_PART], "tool_call_id": "c1"}


def test_the_required_answer_is_a_schema_or_a_call() -> None:
    assert not chat(response_format={"type": "text"}).guided
    assert chat(response_format={"type": "json_object"}).schema == {"type": "object"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).schema == schema
    )
    other = {"type": "function", "function": {"name": "g"}}
    required, named = (chat(tools=[TOOL, other], tool_choice=choice) for choice in ("required", other))
    assert required.guided and named.guided
    assert required.tools is not None and named.tools is not None
    assert [name for name, *_ in required.tools.callable()] == ["f", "g"]
    assert named.tools.callable() == [("g", {"type": "object", "properties": {}}, "tools[1].function")]
    assert not chat(tools=[TOOL]).guided


def test_tools_that_may_not_be_called_are_hidden_from_the_model() -> None:
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    assert chat(tools=[], tool_choice="auto").tools is None
    found = chat(tools=[TOOL], parallel_tool_calls=False).tools
    assert found is not None
    assert (set(found.schemas), found.parallel) == ({"f"}, False)
    assert found.tools[0]["function"] == {"name": "f", "description": "", "parameters": {"type": "object"}}


def test_defaults_are_those_of_openai() -> None:
    parsed = chat()
    assert not parsed.continuous_usage
    assert (parsed.sampling.temperature, parsed.sampling.top_p, parsed.sampling.top_k) == (1, 1, 0)
    assert (parsed.n, parsed.max_tokens, parsed.seed, parsed.stream) == (1, None, None, False)
    assert completion().max_tokens == 16


def test_contents_and_roles_are_left_to_the_template() -> None:
    marked = {**TEXT_PART, "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "developer", "content": [marked, TEXT_PART]},
        {"role": "user", "content": "", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None},
    ]
    assert chat(messages=messages).messages == (
        {"role": "developer", "content": [TEXT_PART, TEXT_PART]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None},
    )


def test_an_answer_is_opened_or_the_last_message_is_continued() -> None:
    def ends(**fields: Any) -> tuple[bool, bool]:
        parsed = chat(**fields)
        return parsed.opens_answer, parsed.continues

    assert (ends(), ends(add_generation_prompt=False)) == ((True, False), (False, False))
    assert ends(continue_final_message=True) == ends(continue_final_message=True, add_generation_prompt=False)
    assert ends(continue_final_message=True) == (False, True)
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        ends(continue_final_message=True, add_generation_prompt=True)


def test_sampling_is_passed_on() -> None:
    parsed = chat(temperature=0, top_k=-1, logprobs=True, top_logprobs=3, logit_bias={"7": -100}, ignore_eos=True)
    more = chat(stop_token_ids=[5, 6], min_tokens=4).sampling
    assert (list(more.stop_token_ids), more.min_tokens) == ([5, 6], 4)
    assert (parsed.sampling.temperature, parsed.sampling.top_k) == (0, 0)
    assert (parsed.sampling.logprobs, parsed.sampling.top_logprobs) == (True, 3)
    assert dict(parsed.sampling.logit_bias) == {7: -100}
    assert parsed.sampling.ignore_eos
    assert completion(logprobs=0).sampling.logprobs


def test_up_to_64_stop_strings_are_accepted() -> None:
    stops = ["\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif"]
    assert chat(stop=stops).stops == completion(stop=stops).stops == tuple(stops)
    assert len(completion(stop=[str(number) for number in range(64)]).stops) == 64


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("hi", ("hi",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
    ids=str,
)
def test_prompts_come_as_text_and_tokens(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], 5, None, [1.5], {}], ids=str)
def test_invalid_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert str(caught.value.param).startswith("prompt")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'{"model":"m"}', "messages"),
        (b'{"messages":[{"role":"user","content":"x"}]}', "model"),
        (b'{"model":"\xff\xfe"}', "body"),
        (b"[" * 200_000, "body"),
        (b'{"tools":' + b"[" * 200_000, "tools[0]"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', "body"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}', "temperature"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_p":-Infinity}', "top_p"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"seed":1e999}', "seed"),
        (b'{"model": 1, "us\xffer": "x"}', "model"),
        (b'"\xff"', "body"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 2, "5": NaN}}',
            "logit_bias",
        ),
        (b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "": 1}', "body"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_not_a_request_is_refused(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body)
    assert caught.value.param == param


def refusal(body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body if isinstance(body, bytes) else json.dumps({**CHAT, **body}).encode())
    return caught.value


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


WORDS = [
    ({"logit_bias": {"1": 2, "abc": 1}}, ["logit_bias: 'abc' is not a token id"]),
    ({"logit_bias": {"1": 2, "5": 101}}, ["logit_bias['5']", "100"]),
    ({"logit_bias": {"1": 2, "5": None}}, ["logit_bias['5']", "null"]),
    ({"metadata": {"a": "b", "c": 1}}, ["metadata['c']"]),
    (said("x", "tool"), ["the id of the call"]),
    (said("x", "function"), ["'function' is not served", "system, developer, user, assistant, tool"]),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, ["'custom' is not served", "served is function"]),
    ({"tool_choice": "maybe"}, ["'maybe' is not known", "none, auto, required"]),
    ({"tool_choice": "required"}, ["tool_choice needs tools"]),
    ({"response_format": {"type": "xml"}}, ["'xml' is not known", "text, json_object, json_schema"]),
    ({"reasoning_effort": "huge"}, ["'huge' is not known", "minimal, low, medium, high"]),
    (said("x", "wizard"), ["'wizard' is not known", "system, developer, user, assistant"]),
    (said([{"type": "image_url", "image_url": {}}]), ["messages[0].content[0].image_url.url is missing"]),
    (said([{"type": "image_url", "image_url": {"url": "x"}, "text": "y"}]), ["type image_url has no text"]),
    (said([{"type": "text", "image_url": {"url": "x"}, "text": "y"}]), ["type text has no image_url"]),
    (said([{"type": "image_url", "image_url": {"url": "x"}}], "system"), ["only a user's messages"]),
    (said([{"type": "smoke"}]), ["'smoke' is not known", "served are text, image_url"]),
    (said([{"type": "input_audio"}]), ["'input_audio' is not served"]),
    (said([{"type": "file"}]), ["'file' is not served"]),
    (said([{"type": "refusal", "refusal": "no"}]), ["'refusal' is not served"]),
    (said([{"type": "smell"}]), ["'smell' is not known", "text"]),
    (b"", ["the body is empty"]),
    (b" \r\n", ["the body is empty"]),
    (b'{"model":"\\ud800"}', ["surrogate"]),
    (b'{"model":"\\ud83dx"}', ["surrogate"]),
    (b'{"model":"\\uDC00 \\ud83d\\ude00"}', ["surrogate"]),
    (b'{"model":"\\\\ud800', ["not JSON"]),
]


@pytest.mark.parametrize(("body", "words"), WORDS, ids=lambda value: str(value)[:60])
def test_a_refusal_names_the_error_and_the_allowed_values(body: Any, words: list[str]) -> None:
    error = refusal(body)
    for word in words:
        assert word in error.message
    assert ("is not served" in error.message) == isinstance(error, UnsupportedField)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        {LONG: 1},
        {"logit_bias": {LONG: 1}},
        {"logit_bias": {"1" * 9: 1, LONG: 1000}},
        {"metadata": {LONG: 1}},
        {"stream": True, "stream_options": {LONG: 1}},
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", LONG: 1}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"stop": LONG},
        {"user": LONG},
    ],
    ids=lambda body: str(body)[:40],
)
def test_a_refusal_is_short_whatever_it_refuses(body: dict[str, Any]) -> None:
    error = refusal(body)
    assert len(error.message) < 500
    assert len(str(error.param)) < 200


BAD_TEXT = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("change", "param"), BAD_TEXT, ids=lambda value: str(value)[:60])
def test_fields_of_text_completions_alone_are_refused_by_name_too(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**change)
    assert caught.value.param == param


def test_a_prompt_is_scored_if_its_logprobs_are_requested() -> None:
    assert not completion(echo=True).sampling.prompt_logprobs
    scored = completion(echo=True, logprobs=2, max_tokens=0)
    assert scored.only_prompt and scored.max_tokens == 1 and scored.shows_logprobs
    assert scored.sampling.prompt_logprobs and scored.sampling.prompt_top_logprobs == 2
    own = chat(prompt_logprobs=1)
    assert own.sampling.logprobs and own.sampling.prompt_top_logprobs == 1 and not own.shows_logprobs


def test_best_of_shows_the_requested_number_of_answers() -> None:
    parsed = completion(best_of=4, n=2)
    assert (parsed.n, parsed.best, parsed.choices) == (4, 2, 4)
    assert parsed.sampling.logprobs and not parsed.shows_logprobs
    assert completion(best_of=2, n=2).best is None
