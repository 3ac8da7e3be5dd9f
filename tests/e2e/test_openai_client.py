"""Tests of the official `openai` client against a whole suite of processes on the sim engine."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pydantic
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

MODEL = "sim"
MESSAGES = [{"role": "user", "content": "Say something."}]
IMPOSSIBLE = {"name": "x", "schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": PARAMETERS}}
    for name in ("weather", "forecast")
]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("suite")
    with running_suite(folder, "--engine", "sim", "--prefill", "2", "--decode", "2", "--gateways", "2") as found:
        yield found


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_a_chat_answer_has_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None


def test_streamed_text_equals_unstreamed_text(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0.9, "seed": 7}
    whole = client.chat.completions.create(**body).choices[0].message.content
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_both_gateways_give_the_same_answer(suite: RunningSuite) -> None:
    answers = set()
    for url in suite.ready["gateways"]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
            answers.add(answer.choices[0].message.content)
    assert len(answers) == 1


def test_text_completions_take_strings_and_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="Hello", max_tokens=8, temperature=0)
    ids = client.completions.create(model=MODEL, prompt=list(b"Hello"), max_tokens=8, temperature=0)
    assert text.choices[0].text == ids.choices[0].text
    assert text.choices[0].finish_reason == "length"


def test_n_choices_differ_and_their_tokens_are_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, n=3, seed=1, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    full = client.chat.completions.create(**body).choices[0].message.content or ""
    stop = full[10:13]
    cut = client.chat.completions.create(**body, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == full[: full.index(stop)]


def test_logprobs_come_with_every_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 5
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in found.content)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "json_schema", "json_schema": IMPOSSIBLE}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
)
def test_an_invalid_request_names_its_field(client: openai.OpenAI, change: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **change})
    assert caught.value.param == param
    assert caught.value.code
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


class Weather(pydantic.BaseModel):
    city: str
    unit: Literal["C", "F"]
    days: list[int] = pydantic.Field(max_length=3)


def test_an_answer_is_parsed_into_the_requested_class(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Weather)
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
    assert isinstance(json.loads(found.choices[0].message.content or ""), dict)


def test_a_stream_follows_its_schema(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "response_format": Weather, "seed": 3}
    whole = client.chat.completions.parse(**body).choices[0].message.content
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}], ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_tools_are_called_as_required(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 5, "max_tokens": 900}
    answer = client.chat.completions.create(**body, parallel_tool_calls=parallel).choices[0]
    calls = answer.message.tool_calls or []
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert len(calls) == 1 or (calls and parallel)
    for call in calls:
        assert call.function.name in (("forecast",) if choice != "required" else ("weather", "forecast"))
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in calls]
    turns = [*MESSAGES, answer.message.model_dump(), *results]
    again = client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS, max_tokens=5)
    assert again.choices[0].message.content


def test_streamed_arguments_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 6}
    whole = client.chat.completions.create(**body, max_tokens=900).choices[0].message.tool_calls or []
    found: list[list[str]] = []
    for chunk in client.chat.completions.create(**body, max_tokens=900, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                found.append([call.function.name, ""])
            found[call.index][1] += call.function.arguments or ""
    assert found == [[call.function.name, call.function.arguments] for call in whole]


def test_an_unsatisfiable_schema_is_refused_with_the_reason(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": IMPOSSIBLE}
    with pytest.raises(openai.BadRequestError, match="required property 'a' is unsatisfiable"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=wanted)


def test_concurrent_requests_get_the_same_answers_as_single_ones(client: openai.OpenAI) -> None:
    def ask(i: int) -> str | None:
        messages = [{"role": "user", "content": f"Question {i}"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
        return answer.choices[0].message.content

    alone = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_patterns_and_choices_are_enforced_on_both_routes(client: openai.OpenAI) -> None:
    chosen = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"structured_outputs": {"choice": ["yes", "no, never"]}}
    )
    assert chosen.choices[0].message.content in ("yes", "no, never")
    found = client.completions.create(
        model=MODEL, prompt="a", max_tokens=40, extra_body={"guided_regex": r"[a-c]{3}/[0-9]{2}"}
    )
    assert re.fullmatch(r"[a-c]{3}/[0-9]{2}", found.choices[0].text) and found.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="unclosed"):
        client.completions.create(model=MODEL, prompt="a", extra_body={"guided_regex": "("})


def test_a_response_is_streamed_stored_and_continued_by_any_gateway(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Say something.", max_output_tokens=12) as stream:
        began, *_, ended = stream
    assert began.type == "response.created" and ended.type == "response.incomplete"
    first = ended.response
    for _ in range(4):  # two gateways share the store
        again = client.responses.create(model=MODEL, input="go on", previous_response_id=first.id, max_output_tokens=4)
        assert again.usage is not None and first.usage is not None
        assert again.usage.input_tokens > first.usage.input_tokens
        assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_prompt_is_scored_as_lm_eval_requests_it(client: openai.OpenAI) -> None:
    """The echo of token ids has logprobs and no generated token."""
    prompts = [list(b"The sky is blue"), list(b"Hi")]
    scored = client.completions.create(model=MODEL, prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0)
    for prompt, choice in zip(prompts, scored.choices, strict=True):
        assert choice.text == bytes(prompt).decode() and choice.finish_reason == "length"
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
        assert found.tokens == [chr(token) for token in prompt] and found.text_offset == list(range(len(prompt)))
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert all(value <= 0 for value in found.token_logprobs[1:])
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (17, 0)
    longer = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=1, echo=True, logprobs=1)
    assert longer.choices[0].logprobs is not None and scored.choices[0].logprobs is not None
    assert (longer.choices[0].logprobs.token_logprobs or [])[:-1] == scored.choices[0].logprobs.token_logprobs
    again = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=0, echo=True, logprobs=1)
    assert again.choices[0].logprobs == scored.choices[0].logprobs, "a cached prefix omits no logprobs"


def test_a_stream_with_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**body).choices[0].text
    assert client.completions.create(**body, echo=True).choices[0].text == "Hello" + answer
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**body, echo=True, stream=True)]
    assert "".join(pieces) == "Hello" + answer and pieces[0].startswith("Hello")


def test_best_of_returns_the_likeliest_choices(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 6, "temperature": 1, "seed": 3}
    every = client.completions.create(**body, n=6, logprobs=0)
    best = client.completions.create(**body, n=2, best_of=6)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    likeliest = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in likeliest]
    assert [choice.index for choice in best.choices] == [0, 1] and best.choices[0].logprobs is None
    assert best.usage is not None and best.usage.completion_tokens == 36


def test_vllms_fields_return_token_ids_and_prompt_logprobs(client: openai.OpenAI) -> None:
    more = {"return_token_ids": True, "prompt_logprobs": 2}
    text = client.completions.create(model=MODEL, prompt="Hel", max_tokens=3, extra_body=more).choices[0].model_dump()
    assert text["prompt_token_ids"] == list(b"Hel") and bytes(text["token_ids"]).decode() == text["text"]
    first, *others = text["prompt_logprobs"]
    assert first is None and [entry[str(token)]["decoded_token"] for entry, token in zip(others, b"el", strict=True)]
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, extra_body=more).model_dump()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert bytes(chat["choices"][0]["token_ids"]).decode() == chat["choices"][0]["message"]["content"]
    chunks = [
        chunk.model_dump()
        for chunk in client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=4, stream=True, extra_body={"return_token_ids": True}
        )
    ]
    reported = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
    assert reported == [chat["prompt_token_ids"]]
    assert sum(len(chunk["choices"][0].get("token_ids") or ()) for chunk in chunks) == 4


def test_a_clients_own_grammar_is_enforced(client: openai.OpenAI) -> None:
    grammar = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "bb"'
    for seed in range(4):
        body = {"structured_outputs": {"grammar": grammar}}
        answer = client.completions.create(model=MODEL, prompt="x", max_tokens=40, seed=seed, extra_body=body)
        assert re.fullmatch("SELECT (a|bb) FROM t", answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="cannot be parsed"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"guided_grammar": "root ::= ["})
