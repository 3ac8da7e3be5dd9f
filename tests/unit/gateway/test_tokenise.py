"""Where prompts are encoded: a short one at once, all that takes long in a thread, and what cannot fit not at all."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from libs.contracts.errors import ContextTooLong
from services.gateway.prompt.catalog import load_catalog
from services.gateway.prompt.parse import parse_chat, parse_completion
from services.gateway.prompt.tokenise import INLINE_CHARS, tokenise

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
async def test_what_takes_long_is_encoded_off_the_loop(parse: Any, body: bytes, jobs: int) -> None:
    asked = parse(body)
    with Threads(1) as threads:
        found = await tokenise(asked, MODEL, threads)
        assert threads.jobs == jobs
    assert len(found) == max(len(asked.prompts), 1)
    assert all(found)


async def test_more_messages_than_the_context_has_tokens_are_not_even_rendered() -> None:
    with Threads(1) as threads, pytest.raises(ContextTooLong) as caught:
        await tokenise(parse_chat(chat(*[""] * 60_000)), MODEL, threads)
    assert caught.value.param == "messages"
    assert threads.jobs == 0
