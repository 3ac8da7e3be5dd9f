"""Tests of our rendering of chat templates against transformers' `apply_chat_template`, byte for byte."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from libs.contracts.errors import InvalidRequest
from libs.model.chat import PART_JOINER, ChatTemplate
from libs.model.info import ModelInfo, sim_tokenizer
from libs.model.tokenizer import ADDITIONAL_TEMPLATES, Tokenizer, load_tokenizer
from libs.runtime.paths import cache_dir
from libs.testing.engines.real_model import real_model_folder
from services.gateway.request.parse import parse_chat
from tests.chat_templates import FAMILIES, Family

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PACKAGES = ("trl==1.16.0", "axolotl==0.19.0")
"""Packages that contain templates as published, for training."""


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
    "parts in a result": [
        said("user"),
        said("assistant", None, tool_calls=[call()]),
        {**RESULT, "content": parts("7")},
    ],
    "parts to continue": [said("user"), said("assistant", parts("One", "two "))],
    "thoughts": [
        said("user"),
        said("assistant", "Hello.", reasoning_content=" Greet.\n"),
        said("user"),
        said("assistant"),
    ],
    "thoughts at the end": [said("user"), said("assistant", "Hello.", reasoning="Greet.")],
    "thoughts in the text": [said("user"), said("assistant", "<think>\nGreet.\n</think>\n\nHello."), said("user")],
    "thoughts before a call": [
        said("user"),
        said("assistant", None, reasoning_content="Look.", tool_calls=[call()]),
        RESULT,
    ],
    "names": [said("user", "Hi", name="Ada"), said("assistant", "Hello.", name="Bob"), said("user")],
}
SPEC = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where <&> 'é'", "enum": ["Zürich", "Oslo"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"type": ["string", "null"], "default": None},
        "more": {
            "type": "object",
            "properties": {"a": {"type": "number"}},
            "additionalProperties": {"type": "boolean"},
        },
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SPEC}},
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
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
    """Return the gateway's rendering of a client's messages, or None if it refuses."""
    variables = options.pop("chat_template_kwargs", {})
    body = {"model": "m", "messages": chat, "tools": tools, "chat_template_kwargs": variables, **options}
    parsed = parse_chat(json.dumps(body).encode())
    try:
        return tokenizer.render_chat(
            parsed.messages,
            tools=parsed.tools.tools if parsed.tools else (),
            variables=parsed.template_variables,
            opens_answer=parsed.opens_answer,
            continues=parsed.continues,
        )
    except InvalidRequest:
        return None


def theirs(reference: PreTrainedTokenizerFast, family: Family, chat: list[Any], **options: Any) -> str | None:
    """Return transformers' rendering of messages in the form that the family's template needs, or None if it
    refuses. Null content is None for templates that need that, as before transformers 5.23, and is else left out, or
    an empty text if a template cannot do without.
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


def compared(family: Family) -> int:
    """Return the number of chats that render to a text; each must equal transformers' rendering."""
    tokenizer, reference = both(family)
    shown = 0
    for name, chat in (CHATS if not family.refuses else {"plain": CHATS["plain"]}).items():
        for tools in (None, TOOLS):
            for end, options in ENDS.items():
                expected = theirs(reference, family, chat, tools=tools, **options)
                assert ours(tokenizer, chat, tools, **options) == expected, (name, bool(tools), end)
                shown += expected is not None
    for name, variables in VARIABLES.items():
        chat = CHATS["system"]
        expected = theirs(reference, family, chat, **variables)
        assert ours(tokenizer, chat, None, chat_template_kwargs=variables) == expected, name
    return shown


def both(family: Family) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    template = ChatTemplate(family.source, SPECIAL, family.tool_use)
    named = {"default": family.source, "tool_use": family.tool_use} if family.tool_use else family.source
    reference = PreTrainedTokenizerFast(tokenizer_object=sim_tokenizer(), chat_template=named, **SPECIAL)
    return Tokenizer(sim_tokenizer(), template), reference


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_familys_template_renders_as_in_transformers(family: Family) -> None:
    assert compared(family) or family.refuses


def test_templates_saved_by_transformers_are_read(tmp_path: Path) -> None:
    """Templates by name, and special tokens, the model's own among them."""
    sources = {"default": "{{ bos_token }}plain", "tool_use": "{{ image_token }}{{ tools | length }}", "rag": "r"}
    saved = PreTrainedTokenizerFast(
        tokenizer_object=sim_tokenizer(),
        chat_template=sources,
        extra_special_tokens={"image_token": "<image>"},
        **SPECIAL,
    )
    saved.save_pretrained(tmp_path)
    assert (tmp_path / ADDITIONAL_TEMPLATES / "tool_use.jinja").is_file()
    tokenizer, reference = load_tokenizer(model_in(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.takes("tools")
    for tools, text in ((None, "<s>plain"), (TOOLS, "<image>2")):
        assert ours(tokenizer, CHATS["plain"], tools) == text
        assert theirs(reference, Family(""), CHATS["plain"], tools=tools) == text


def test_a_template_for_tools_only_refuses_other_chats(tmp_path: Path) -> None:
    saved = PreTrainedTokenizerFast(tokenizer_object=sim_tokenizer(), chat_template={"tool_use": "t"}, **SPECIAL)
    saved.save_pretrained(tmp_path)
    tokenizer, reference = load_tokenizer(model_in(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools, text in ((None, None), (TOOLS, "t")):
        assert ours(tokenizer, CHATS["plain"], tools) == text
        assert theirs(reference, Family(""), CHATS["plain"], tools=tools) == text


def model_in(folder: Path) -> ModelInfo:
    return ModelInfo("m", folder, "r", 100, 300, frozenset({0}))


def test_reasoning_beside_a_call_and_text_is_accepted() -> None:
    """We differ here: gpt-oss may have written all three, and its template refuses two of them in one message."""
    chat = [said("user"), said("assistant", "So.", reasoning_content="Look.", tool_calls=[call()]), RESULT]
    tokenizer, reference = both(FAMILIES["gpt-oss"])
    assert theirs(reference, FAMILIES["gpt-oss"], chat) is None
    without = [said("user"), said("assistant", "So.", tool_calls=[call()]), RESULT]
    assert ours(tokenizer, chat) == ours(tokenizer, without) is not None


@pytest.mark.torch
def test_the_bundled_models_template_renders_as_in_transformers() -> None:
    folder = real_model_folder()
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(model_in(folder))
    for chat in CHATS.values():
        for options in ENDS.values():
            expected = theirs(reference, Family(reference.chat_template), chat, **options)
            assert ours(tokenizer, chat, **options) == expected is not None


@pytest.mark.packages
@pytest.mark.timeout(900)
def test_published_templates_render_as_in_transformers() -> None:
    paths = _published()
    assert len(paths) > 100
    for path in paths:
        assert compared(_family_of(path.read_text(encoding="utf-8"))), path


def _published() -> list[Path]:
    home = cache_dir() / "templates" / "-".join(PACKAGES)
    if not home.is_dir():
        install = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(home))
        done = subprocess.run([*install, *PACKAGES], capture_output=True, check=False, timeout=300)
        if done.returncode:
            (pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip)(done.stderr.decode())
    return sorted(home.rglob("*.jinja"))


def _family_of(source: str) -> Family:
    """Return the family, judged by transformers' rendering of a template."""
    reference = both(Family(source))[1]
    both_parts, text = (_tried(reference, [said("user", content)]) for content in (parts("AAA", "BBB"), "AAA"))
    takes_parts = "AAA" in both_parts and "BBB" in both_parts and "type" not in both_parts
    contents = "text" if not takes_parts else "parts" if "AAA" in text else "only parts"
    asks = re.search(r"content['\"\])]*\s*(\|\s*\w+\s*)?(is (not )?none|[!=]= *none)", source, re.IGNORECASE)
    family = Family(source, contents=contents, null="none" if asks else "left out")  # type: ignore[arg-type]
    chat = [said("user"), said("assistant", None, tool_calls=[call()])]
    objects, joined = (theirs(reference, replace(family, arguments=kind), chat) or "" for kind in ("object", "text"))
    is_text = "{'city'" in objects or ("weather" in joined and "weather" not in objects)
    return replace(family, arguments="text" if is_text else "object")


def _tried(reference: PreTrainedTokenizerFast, messages: list[Any]) -> str:
    try:
        return str(reference.apply_chat_template(messages, tokenize=False))
    except Exception:  # whatever a template raises
        return ""
