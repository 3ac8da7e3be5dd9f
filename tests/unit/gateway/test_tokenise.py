"""Tests of where prompts are tokenised: short ones at once, long ones in a thread, those that cannot fit not at all."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from libs.contracts.errors import ContextTooLong, InvalidRequest, QueueFull, UnsupportedField
from libs.model.chat import ChatTemplate
from libs.model.info import sim_tokenizer
from libs.model.tokenizer import Tokenizer
from services.gateway.answers.families import FormatNames
from services.gateway.request.intake import MAX_ARRIVING, TOKENISE_THREADS, Intake, RequestLimits
from services.gateway.request.parse import parse_chat, parse_completion
from services.gateway.request.prompt import INLINE_CHARS, ServedModel, load_catalog, tokenise

MODEL = load_catalog({"sim": "builtin:sim"}).get("sim")


class Threads(ThreadPoolExecutor):
    jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.jobs += 1
        return super().submit(fn, *args, **kwargs)


def chat(*contents: str, **fields: str) -> bytes:
    messages = [{"role": "user", "content": content, **fields} for content in contents]
    return json.dumps({"model": "sim", "messages": messages}).encode()


def text(*prompts: Any) -> bytes:
    return json.dumps({"model": "sim", "prompt": list(prompts)}).encode()


WHERE = {
    "a short chat": (parse_chat, chat("hello", "hi"), 0),
    "a short prompt": (parse_completion, text("hello"), 0),
    "tokens": (parse_completion, text(*[[1] * INLINE_CHARS] * 8), 0),
    "a long message": (parse_chat, chat("x" * INLINE_CHARS), 1),
    "a long name": (parse_chat, chat("x", name="x" * INLINE_CHARS), 1),
    "many messages of nothing": (parse_chat, chat(*[""] * 1000), 1),
    "many prompts": (parse_completion, text(*["x" * INLINE_CHARS] * 128), 1),
}


@pytest.mark.parametrize(("parse", "body", "jobs"), WHERE.values(), ids=WHERE.keys())
async def test_a_long_prompt_is_tokenised_off_the_loop(parse: Any, body: bytes, jobs: int) -> None:
    parsed = parse(body)
    with Threads(1) as threads:
        found = await tokenise(parsed, MODEL, threads)
        assert threads.jobs == jobs
    assert len(found) == max(len(parsed.prompts), 1)
    assert all(found)


async def test_more_messages_than_the_context_has_tokens_are_not_rendered() -> None:
    with Threads(1) as threads, pytest.raises(ContextTooLong) as caught:
        await tokenise(parse_chat(chat(*[""] * 60_000)), MODEL, threads)
    assert caught.value.param == "messages"
    assert threads.jobs == 0


async def test_a_prompt_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(MODEL.tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 450_000}}]
    with Threads(1) as threads:
        for parse, body in ((parse_chat, asks(tools=tools)), (parse_completion, text("x" * 450_000, "y"))):
            with pytest.raises(ContextTooLong, match="leave no room in a context of 8192") as caught:
                await tokenise(parse(body), MODEL, threads, most_tokens=8192)
            assert caught.value.param in ("messages", "prompt")
    assert not encoded


async def test_long_prompts_of_tenants_are_tokenised_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    done, gate = [], threading.Event()

    def encode(text: str, **_: Any) -> list[int]:
        gate.wait()
        done.append(text[0])
        return [1]

    class Apart:
        are_distinct = True

        def weight(self, _tenant: str) -> int:
            return 1

    monkeypatch.setattr(MODEL.tokenizer, "encode", encode)
    with Threads(2) as threads:
        unused: Any = None
        intake = Intake(
            catalog=unused, fleet=unused, hints=unused, threads=threads, defaults=unused,
            limits=RequestLimits(1, 1, 1), tenants=Apart(),
        )  # fmt: skip

        async def tokens(tenant: str) -> None:
            await intake.tokens(parse_completion(text(tenant * (INLINE_CHARS + 1))), MODEL, tenant)

        flood = [asyncio.ensure_future(tokens("a")) for _ in range(MAX_ARRIVING)]
        await asyncio.sleep(0)
        other = asyncio.ensure_future(tokens("b"))
        await asyncio.sleep(0)
        gate.set()
        await other
        assert len(done) <= 2 * TOKENISE_THREADS + 1
        refused = sum(isinstance(each, QueueFull) for each in await asyncio.gather(*flood, return_exceptions=True))
        assert MAX_ARRIVING - refused == TOKENISE_THREADS + MAX_ARRIVING // 2


TOOL = {"type": "function", "function": {"name": "f"}}
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
EFFORT = PLAIN + "{{ reasoning_effort }}"
SWITCH = PLAIN + "{{ enable_thinking }}"


NOT_AS_TEXT = FormatNames(as_text=False)


def model_of(template: str) -> ServedModel:
    return ServedModel(MODEL.info, Tokenizer(sim_tokenizer(), ChatTemplate(template, {})), names=NOT_AS_TEXT)


def asks(**fields: Any) -> bytes:
    return json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


async def rendered(model: ServedModel, body: bytes) -> str:
    with Threads(1) as threads:
        (tokens,) = await tokenise(parse_chat(body), model, threads)
    return model.tokenizer.decode(tokens)


REFUSED = {
    "tools without a place": (PLAIN, {"tools": [TOOL]}, "tools", "its chat template takes none"),
    "calls of an unknown kind": (PLAIN + "{{ tools }}", {"tools": [TOOL]}, "tools", "FULCRUM_GATEWAY_TOOL_FORMATS"),
    "effort without a place": (PLAIN, {"reasoning_effort": "high"}, "reasoning_effort", "takes none"),
    "always reasons": (PLAIN + "</think>", {"reasoning_effort": "none"}, "reasoning_effort", "takes none"),
}


CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "5"}
SHOWS_CALLS = PLAIN + "{{ messages[1].tool_calls[0].function.name }}"
TOOL_CHATS = {
    "tools": ({"tools": [TOOL]}, "tools"),
    "a call": ({"messages": [{"role": "user", "content": "x"}, CALLING]}, "messages[1].tool_calls"),
    "a result": ({"messages": [RESULT]}, "messages[0]"),
    "a call and its result": ({"messages": [CALLING, RESULT]}, "messages[0].tool_calls"),
}


@pytest.mark.parametrize(("fields", "param"), TOOL_CHATS.values(), ids=TOOL_CHATS.keys())
async def test_tools_are_refused_alike_if_the_template_has_none_and_tools_as_text_is_off(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedField) as caught:
        await rendered(model_of(PLAIN), asks(**fields))
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: tools are not served for model 'sim', as its chat template takes")
    assert "chat_template.jinja" in caught.value.message


async def test_a_template_that_renders_calls_receives_them() -> None:
    history = {"messages": [{"role": "user", "content": "x"}, CALLING, RESULT]}
    assert await rendered(model_of(SHOWS_CALLS), asks(**history)) == "x5f"
    with pytest.raises(UnsupportedField, match="tools: tools are not served"):
        await rendered(model_of(SHOWS_CALLS), asks(**history, tools=[TOOL]))


async def test_history_is_checked_against_the_template_of_its_chat() -> None:
    template = ChatTemplate(PLAIN, {}, SHOWS_CALLS + "{{ tools }}<tool_call>")
    model = ServedModel(MODEL.info, Tokenizer(sim_tokenizer(), template), names=NOT_AS_TEXT)
    history = {"messages": [{"role": "user", "content": "x"}, CALLING, RESULT]}
    assert "x5f" in await rendered(model, asks(**history, tools=[TOOL]))
    with pytest.raises(UnsupportedField, match="tool_calls"):
        await rendered(model, asks(**history))


@pytest.mark.parametrize(("template", "fields", "param", "words"), REFUSED.values(), ids=REFUSED.keys())
async def test_content_that_the_template_cannot_render_is_refused(
    template: str, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(UnsupportedField) as caught:
        await rendered(model_of(template), asks(**fields))
    assert caught.value.param == param
    assert words in caught.value.message


async def test_effort_reaches_the_template_by_name_or_as_a_switch() -> None:
    assert await rendered(model_of(EFFORT), asks(reasoning_effort="minimal")) == "himinimal"
    assert await rendered(model_of(SWITCH), asks(reasoning_effort="high")) == "hiTrue"
    assert await rendered(model_of(SWITCH), asks(reasoning_effort="none")) == "hiFalse"
    assert await rendered(model_of(PLAIN), asks(reasoning_effort="none")) == "hi"
    own = {"enable_thinking": False}
    assert await rendered(model_of(SWITCH), asks(reasoning_effort="high", chat_template_kwargs=own)) == "hiFalse"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
async def test_a_requests_variables_cannot_replace_the_standard_ones(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await rendered(model_of(PLAIN), asks(chat_template_kwargs={name: 1}))
    assert caught.value.param == "chat_template_kwargs"


async def test_the_model_sees_the_tools() -> None:
    assert '"name": "f"' in await rendered(MODEL, asks(tools=[TOOL]))
    assert await rendered(MODEL, asks(tools=[TOOL], tool_choice="none")) == await rendered(MODEL, asks())
