"""Tests of tools, calls and results on models whose chat template supports none."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from libs.contracts.errors import InvalidRequest, StartupError, UnsupportedField
from libs.model.chat import ChatTemplate
from libs.model.info import load_model_info, sim_tokenizer
from libs.model.tokenizer import Tokenizer, load_tokenizer
from services.gateway.answers.families import FormatNames
from services.gateway.messages.request import parse_message
from services.gateway.request.intake import RequestSchemas, answer_guide
from services.gateway.request.parse import ParsedRequest, parse_chat
from services.gateway.request.prompt import ServedModel, gives_tools_as_text, load_catalog, tokenise
from services.gateway.responses.request import build_response_request, parse_response

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<system>default</system>\n"
    "{% endif %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>\n{% endfor %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}"
)
SHOWS_TOOLS_ALONE = CHATML + "{{ tools }}<tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
ASKS = {"role": "user", "content": "What is 2+3?"}
CALL = {"id": "a", "type": "function", "function": {"name": "SECRETNAME", "arguments": '{"zzz":  12345}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "5"}
CALLED = '<tool_call>\n{"name": "SECRETNAME", "arguments": {"zzz":  12345}}\n</tool_call>'
ANSWERED = '<tool_response>\n{"name": "SECRETNAME", "content": "5"}\n</tool_response>'


def model_of(template: str, **names: Any) -> ServedModel:
    tokenizer = Tokenizer(sim_tokenizer(), ChatTemplate(template, {}))
    return ServedModel(load_model_info("builtin:sim"), tokenizer, names=FormatNames(**names))


def chat(*messages: dict[str, Any], **fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps({"model": "sim", "messages": messages, **fields}).encode())


def response(**fields: Any) -> ParsedRequest:
    return build_response_request(
        parse_response(json.dumps({"model": "sim", **fields}).encode()), [], "resp_a", 0
    ).parsed


def message(**fields: Any) -> ParsedRequest:
    return parse_message(json.dumps({"model": "sim", "max_tokens": 8, **fields}).encode())


async def rendered(requested: ParsedRequest, model: ServedModel) -> str:
    with ThreadPoolExecutor(1) as threads:
        (tokens,) = await tokenise(requested, model, threads)
    return model.tokenizer.decode(tokens)


async def test_a_history_of_calls_and_results_is_rendered_without_tools_in_the_request() -> None:
    text = await rendered(chat(ASKS, CALLS, RESULT), model_of(CHATML))
    assert text == (
        "<system>default</system>\n<user>What is 2+3?</user>\n"
        f"<assistant>{CALLED}</assistant>\n<user>{ANSWERED}</user>\n"
    )


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
@pytest.mark.parametrize("role", ["system", "developer"])
async def test_tools_are_appended_to_an_existing_system_message(role: str, content: Any) -> None:
    text = await rendered(chat({"role": role, "content": content}, ASKS, tools=[TOOL]), model_of(CHATML))
    system, _, rest = text.partition("</system>\n")
    assert system.startswith("<system>Be brief.\n")
    (listed,) = json.loads(system.partition("<tools>\n")[2].partition("\n</tools>")[0])
    assert listed == TOOL
    assert rest == "<user>What is 2+3?</user>\n"


async def test_tools_become_a_system_message_if_there_is_none() -> None:
    text = await rendered(chat(ASKS, tools=[TOOL]), model_of(CHATML))
    assert text.startswith("<system>You may call") and "default" not in text
    assert text.endswith("</system>\n<user>What is 2+3?</user>\n")


async def test_a_template_without_a_system_role_has_tools_in_the_first_user_message() -> None:
    text = await rendered(chat(ASKS, CALLS, RESULT, ASKS, tools=[TOOL]), model_of(STRICT))
    user, assistant, result = text.split("\n<assistant>")[0], text.partition("<assistant>")[2], ANSWERED
    assert user.startswith("<user>You may call") and user.endswith("What is 2+3?")
    # Two messages of the user in a row would be refused.
    assert assistant == f"{CALLED}\n<user>{result}\nWhat is 2+3?\n"


async def test_text_beside_calls_and_several_results_are_rendered_in_order() -> None:
    second = {**CALL, "id": "b", "function": {"name": "g", "arguments": "{}"}}
    history: list[dict[str, Any]] = [ASKS, {**CALLS, "content": "Let me see.", "tool_calls": [CALL, second]}, RESULT]
    history.append({"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "</x>"}]})
    history.append({"role": "tool", "tool_call_id": "gone", "content": "?"})
    text = await rendered(chat(*history), model_of(CHATML))
    assert f'<assistant>Let me see.\n{CALLED}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>' in text
    assert (
        f'<user>{ANSWERED}\n<tool_response>\n{{"name": "g", "content": "</x>"}}\n</tool_response>\n'
        '<tool_response>\n{"content": "?"}\n</tool_response></user>'
    ) in text


async def test_a_template_that_renders_only_tools_gets_the_history_as_text() -> None:
    text = await rendered(chat(ASKS, CALLS, RESULT, tools=[TOOL]), model_of(SHOWS_TOOLS_ALONE))
    assert CALLED in text and ANSWERED in text and "<tools>" not in text and "Tells it." in text


async def test_a_template_that_renders_everything_is_unchanged() -> None:
    model = load_catalog({"sim": "builtin:sim"}).get("sim")
    parsed = chat(ASKS, CALLS, RESULT, tools=[TOOL])
    assert not gives_tools_as_text(parsed, model)
    assert "<tool_response>" not in await rendered(parsed, model)


SAME = {
    "chat": lambda: chat(ASKS, CALLS, RESULT, tools=[TOOL]),
    "responses": lambda: response(
        input=[
            ASKS,
            {"type": "function_call", "call_id": "a", "name": "SECRETNAME", "arguments": '{"zzz":  12345}'},
            {"type": "function_call_output", "call_id": "a", "output": "5"},
        ],
        tools=[{"type": "function", **TOOL["function"]}],  # type: ignore[dict-item]
    ),
    "messages": lambda: message(
        messages=[
            ASKS,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "SECRETNAME", "input": {"zzz": 12345}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "5"}]},
        ],
        tools=[{"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}],
    ),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
async def test_every_route_renders_tools_calls_and_results(make: Callable[[], ParsedRequest]) -> None:
    parsed, model = make(), model_of(CHATML)
    text = await rendered(parsed, model)
    assert gives_tools_as_text(parsed, model)
    assert '"name": "weather", "description": "Tells it."' in text
    assert '"name": "SECRETNAME"' in text and "12345" in text and ANSWERED in text


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
async def test_with_tools_as_text_off_every_route_refuses_and_names_its_field(
    make: Callable[[], ParsedRequest],
) -> None:
    with pytest.raises(UnsupportedField, match=r"^tools: tools are not served") as caught:
        await rendered(make(), model_of(CHATML, as_text=False))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(("name", "param"), [("chat", "messages"), ("responses", "input"), ("messages", "messages")])
async def test_a_history_that_the_template_refuses_is_refused_by_its_routes_field(name: str, param: str) -> None:
    refuses = CHATML + "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    with pytest.raises(InvalidRequest, match="too many") as caught:
        await rendered(SAME[name](), model_of(refuses))
    assert caught.value.param == param


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
def test_a_required_call_is_guided_in_the_format_that_the_prompt_describes(choice: Any, strict: bool) -> None:
    model = model_of(CHATML)
    parsed = chat(ASKS, tools=[{**TOOL, "function": {**TOOL["function"], "strict": strict}}], tool_choice=choice)  # type: ignore[dict-item]
    guide = answer_guide(parsed, RequestSchemas(tools=[("weather", PARAMETERS)]), model, [1])
    assert r'call_0: "<tool_call>" "\n{\"name\": \"weather\", \"arguments\": " args_0 "}\n" "</tool_call>"' in guide
    assert "start: (calls)" in guide


async def test_a_configured_format_other_than_that_of_the_text_is_refused() -> None:
    with pytest.raises(UnsupportedField, match=r"tools: .* called in hermes, not in kimi-k2"):
        await rendered(chat(ASKS, tools=[TOOL]), model_of(CHATML, tools={"*": "kimi-k2"}))
    with pytest.raises(UnsupportedField, match="how it calls them is not known"):
        await rendered(chat(ASKS, tools=[TOOL]), model_of(CHATML, tools={"*": "none"}))


async def test_a_message_rendered_as_text_cannot_be_continued() -> None:
    with pytest.raises(UnsupportedField) as caught:
        await rendered(chat(ASKS, CALLS, continue_final_message=True, add_generation_prompt=False), model_of(CHATML))
    assert caught.value.param == "continue_final_message"


def test_a_template_file_replaces_the_models_own(tmp_path: Any) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("mine {{ messages[0]['content'] }}")
    catalog = load_catalog({"sim": "builtin:sim"}, FormatNames(templates={"*": str(file)}))
    assert catalog.get("sim").tokenizer.render_chat([ASKS]) == "mine What is 2+3?"
    assert load_tokenizer(load_model_info("builtin:sim"), "").takes("tools")


BROKEN = {
    "no file": (None, "cannot be read"),
    "no text": (b"\xff\xfe", "cannot be read"),
    "empty": (b" \n", "is empty"),
    "no template": (b"{% for %}", "does not parse"),
}


@pytest.mark.parametrize(("content", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_template_file_is_a_named_error_at_the_start(
    tmp_path: Any, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "broken.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=reason) as caught:
        load_catalog({}, FormatNames(templates={"later": str(file)}))
    assert str(file) in caught.value.message
