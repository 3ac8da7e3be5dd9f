"""Our rendering of chat templates beside transformers' `apply_chat_template`, byte for byte."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from libs.contracts.errors import InvalidRequest
from libs.engine.torch.convert import main as convert
from libs.model.builtin import sim_tokenizer
from libs.model.chat import PART_JOINER, ChatTemplate
from libs.model.info import load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer
from services.gateway.prompt.parse import parse_chat
from tests.chat_templates import FAMILIES, Family

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
DAY = "%Y-%m-%d"


def call(name: str = "weather", arguments: str = '{"city":"Zürich", "days": [1, 2.0], "wind": null}') -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: Any = "Hi", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


RESULT = said("tool", '{"celsius": 7}', tool_call_id="abcdefghi")
CHATS = {
    "plain": [said("user", "  Hi <|im_end|> é\n")],
    "turns": [said("user"), said("assistant", "Hello.\n"), said("user", "Why?")],
    "ends with an answer": [said("user"), said("assistant", "Well, ")],
    "system": [said("system", " Be brief. "), said("user")],
    "developer": [said("developer", "Be brief."), said("user")],
    "two users": [said("user", "a"), said("user", "b")],
    "calls": [said("user"), said("assistant", None, tool_calls=[call()]), RESULT],
    "calls with text": [said("user"), said("assistant", "Let me see.", tool_calls=[call()]), RESULT, said("user")],
    "calls with empty text": [said("user"), said("assistant", "", tool_calls=[call()]), RESULT],
    "two calls": [said("user"), said("assistant", None, tool_calls=[call(), call("now", "{}")]), RESULT, RESULT],
    "call without content": [said("user"), {"role": "assistant", "tool_calls": [call()]}, RESULT],
    "nothing said": [said("user"), said("assistant", None), said("user")],
    "a result without a call": [said("user"), RESULT],
    "parts": [said("system", parts("Be ", "brief.")), said("user", parts("Describe", "this")), said("assistant", "ok")],
    "one part": [said("user", parts("Describe"))],
    "parts in a result": [said("user"), said("assistant", None, tool_calls=[call()]), {**RESULT, "content": parts("7")}],
    "parts to continue": [said("user"), said("assistant", parts("One", "two "))],
    "thoughts": [said("user"), said("assistant", "Hello.", reasoning_content=" Greet.\n"), said("user"), said("assistant")],
    "thoughts at the end": [said("user"), said("assistant", "Hello.", reasoning="Greet.")],
    "thoughts in the text": [said("user"), said("assistant", "<think>\nGreet.\n</think>\n\nHello."), said("user")],
    "thoughts before a call": [said("user"), said("assistant", None, reasoning_content="Look.", tool_calls=[call()]), RESULT],
    "names": [said("user", "Hi", name="Ada"), said("assistant", "Hello.", name="Bob"), said("user")],
}
SPEC = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where <&> 'é'", "enum": ["Zürich", "Oslo"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"type": ["string", "null"], "default": None},
        "more": {"type": "object", "properties": {"a": {"type": "number"}}, "additionalProperties": {"type": "boolean"}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SPEC}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
ENDS: dict[str, dict[str, Any]] = {
    "opens": {},
    "ends": {"add_generation_prompt": False},
    "continues": {"continue_final_message": True},
}
VARIABLES: dict[str, dict[str, Any]] = {
    "thinking off": {"enable_thinking": False, "thinking": False},
    "documents": {"documents": [{"doc_id": 1, "title": "t", "text": "é"}]},
    "tools elsewhere": {"tools_in_user_message": False, "date_string": "1 May", "controls": {"length": "long"}},
}


def ours(tokenizer: Tokenizer, chat: list[dict[str, Any]], tools: Any = None, **options: Any) -> str | None:
    """As the gateway renders what a client sends; None where it refuses."""
    variables = options.pop("chat_template_kwargs", {})
    body = {"model": "m", "messages": chat, "tools": tools, "chat_template_kwargs": variables, **options}
    asked = parse_chat(json.dumps(body).encode())
    try:
        return tokenizer.render_chat(
            asked.messages,
            tools=asked.tools.tools if asked.tools else (),
            variables=asked.template_variables,
            opens_answer=asked.opens_answer,
            continues=asked.continues,
        )
    except InvalidRequest:
        return None


def theirs(reference: PreTrainedTokenizerFast, family: Family, chat: list[Any], **options: Any) -> str | None:
    """As transformers renders it, from messages written as the family's template takes them; None where it refuses.

    Null content is None for templates that ask for that, as before transformers 5.23, else left out; and an empty text
    where a template cannot do without.
    """
    options.setdefault("add_generation_prompt", "continue_final_message" not in options)
    messages = [_written(message, family) for message in chat]
    texts = [_written({**message, "content": message.get("content") or ""}, family) for message in chat]
    try:
        if family.null == "none":
            return _with_none(reference, messages, options)
        return str(reference.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # whatever a template raises
        if family.null == "none":
            return theirs(reference, replace(family, null="left out"), chat, **options)
        return None if texts == messages else theirs(reference, family, texts, **options)


def _with_none(reference: PreTrainedTokenizerFast, messages: list[Any], options: dict[str, Any]) -> str:
    given = {"tools": None, "documents": None, **SPECIAL, **options}
    template = reference.get_chat_template(tools=given["tools"])
    ((text,), _) = render_jinja_template(conversations=[messages], chat_template=template, **given)
    return str(text)


def _written(message: Mapping[str, Any], family: Family) -> dict[str, Any]:
    turn = {"content": None, **json.loads(json.dumps(message))}
    if isinstance(turn["content"], list) and (family.contents == "text" or turn["role"] == "tool"):
        turn["content"] = PART_JOINER.join(part["text"] for part in turn["content"])
    if isinstance(turn["content"], str) and family.contents == "only parts":
        turn["content"] = parts(turn["content"])
    if turn["role"] == "developer" and '"developer"' not in family.source:
        turn["role"] = "system"
    for each in turn.get("tool_calls", ()):
        if family.arguments == "object" and isinstance(each["function"]["arguments"], str):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    return turn


def both(family: Family) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    template = ChatTemplate(family.source, SPECIAL, family.tool_use)
    named = {"default": family.source, "tool_use": family.tool_use} if family.tool_use else family.source
    reference = PreTrainedTokenizerFast(tokenizer_object=sim_tokenizer(), chat_template=named, **SPECIAL)
    return Tokenizer(sim_tokenizer(), template), reference


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_familys_template_renders_as_in_transformers(family: Family) -> None:
    tokenizer, reference = both(family)
    for name, chat in CHATS.items():
        for tools in (None, TOOLS):
            for end, options in ENDS.items():
                expected = theirs(reference, family, chat, tools=tools, **options)
                assert ours(tokenizer, chat, tools, **options) == expected, (name, bool(tools), end)
        for end, variables in VARIABLES.items():
            expected = theirs(reference, family, chat, **variables)
            assert ours(tokenizer, chat, None, chat_template_kwargs=variables) == expected, (name, end)
