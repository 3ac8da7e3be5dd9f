"""Tokenisation of prompts within the model's vocabulary and context. Long texts are encoded in a thread pool."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from libs.contracts.errors import ContextTooLong, InvalidRequest, UnsupportedField
from libs.model.chat import ChatMessage
from services.gateway.prompt.catalog import ServedModel
from services.gateway.prompt.parse import Asked

# Requests up to this length are encoded inline: handing them to a thread would cost more.
INLINE_CHARS = 4096
# Template variables that switch reasoning on and off: Qwen3's and GLM's, then DeepSeek V3.1's.
_SWITCHES = ("enable_thinking", "thinking")
# gpt-oss accepts low, medium and high only.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
# Logprobs of one prompt, including alternatives. The worker sends them in one frame.
MAX_SCORES = 262_144
# Counted for each message besides its content, since the template adds marks around it.
MESSAGE_CHARS = 64


async def tokenise(
    asked: Asked,
    model: ServedModel,
    threads: Executor,
    *,
    most_tokens: int | None = None,
    slot: Callable[[int], AbstractAsyncContextManager[None]] = lambda _chars: nullcontext(),
) -> list[list[int]]:
    """Return the token ids of each prompt; raise InvalidRequest that names the field.

    `most_tokens`: prompts that certainly reach this length are refused without being fully encoded; None refuses
    none. `slot`: opens a context that a request of so many characters holds while a thread encodes it.
    """
    check_chat(asked, model)
    if len(asked.messages) >= model.info.max_context_tokens:  # before they are rendered: each is a token at least
        text = f"{len(asked.messages)} messages do not fit a context of {model.info.max_context_tokens} tokens"
        raise ContextTooLong(text, param=asked.prompt_field)
    chars = _chars(asked)
    if chars <= INLINE_CHARS:
        return _encode(asked, model, most_tokens)
    async with slot(chars):
        return await asyncio.get_running_loop().run_in_executor(threads, _encode, asked, model, most_tokens)


def check_fit(asked: Asked, prompts: list[list[int]], model: ServedModel, max_context_tokens: int) -> int:
    """Return the bound on each choice's tokens; raise InvalidRequest if the prompts do not fit. Pure."""
    vocab_size = model.info.vocab_size
    beyond = next((token for token in asked.sampling.logit_bias if token >= vocab_size), None)
    if beyond is not None:
        text = f"logit_bias: '{beyond}' is beyond the vocabulary's {vocab_size} tokens"
        raise InvalidRequest(text, param="logit_bias")
    beyond = next((token for token in asked.sampling.stop_token_ids if token >= vocab_size), None)
    if beyond is not None:
        text = f"stop_token_ids: {beyond} is beyond the vocabulary's {vocab_size} tokens"
        raise InvalidRequest(text, param="stop_token_ids")
    longest = max(len(prompt) for prompt in prompts)
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest(f"{asked.prompt_field} has no tokens", param=asked.prompt_field)
        if max(prompt) >= vocab_size or min(prompt) < 0:
            raise InvalidRequest(f"prompt has a token outside the vocabulary's {vocab_size}", param="prompt")
    if longest >= max_context_tokens:
        text = f"the prompt's {longest} tokens leave no room in a context of {max_context_tokens}"
        raise ContextTooLong(text, param=asked.prompt_field)
    most = 1 + (asked.prompt_logprobs or 0)
    if asked.prompt_logprobs is not None and longest * most > MAX_SCORES:
        text = f"{longest} prompt tokens with {most} logprobs each are over {MAX_SCORES}"
        raise InvalidRequest(text, param="echo" if asked.echo else "prompt_logprobs")
    if asked.max_tokens is None:
        return max_context_tokens - longest
    if longest + asked.max_tokens > max_context_tokens:
        text = f"{longest} prompt tokens and {asked.max_tokens} more exceed the context of {max_context_tokens}"
        raise ContextTooLong(text, param=asked.max_tokens_field)
    return asked.max_tokens


def check_chat(asked: Asked, model: ServedModel) -> None:
    """Raise UnsupportedField for anything that the model's chat template cannot express. Pure."""
    name, takes = model.info.name, model.tokenizer.takes
    if field := _unshown_tools(asked, model):
        text = (
            f"{field}: tools are not served for model {name!r}, as its chat template takes none: use a model whose"
            " template does, put such a chat_template.jinja into its folder, or send calls and results as text"
        )
        raise UnsupportedField(text, param=field)
    if asked.tools and not model.format.calls:
        text = (
            f"tools are not served for model {name!r}: how it calls them is not known, set FULCRUM_GATEWAY_TOOL_FORMATS"
        )
        raise UnsupportedField(text, param="tools")
    if asked.effort is None or any(map(takes, ("reasoning_effort", *_SWITCHES))):
        return
    if asked.effort != "none" or model.format.reasons:
        text = f"reasoning_effort is not served for model {name!r}: its chat template takes none"
        raise UnsupportedField(text, param="reasoning_effort")


def _unshown_tools(asked: Asked, model: ServedModel) -> str:
    """Return the first field about tools that the template would not show to the model; empty if it shows all."""
    if asked.tools and not model.tokenizer.takes("tools"):
        return "tools"
    names = partial(model.tokenizer.names, tools=bool(asked.tools))
    shows_calls = names("tool_calls")
    shows_results = shows_calls or names("tool")
    for place, message in enumerate(asked.messages):
        if message.get("tool_calls") and not shows_calls:
            return "input" if asked.for_response else f"messages[{place}].tool_calls"
        if message["role"] == "tool" and not shows_results:
            return "input" if asked.for_response else f"messages[{place}]"
    return ""


def _render(asked: Asked, model: ServedModel) -> str:
    return model.tokenizer.render_chat(
        asked.messages,
        tools=asked.tools.tools if asked.tools else (),
        variables={**_efforts(asked, model), **asked.template_variables},
        opens_answer=asked.opens_answer,
        continues=asked.continues,
    )


def _efforts(asked: Asked, model: ServedModel) -> dict[str, Any]:
    """Return the template variables for the effort: by name, or as a switch."""
    if asked.effort is None:
        return {}
    effort = _HARMONY_EFFORTS.get(asked.effort, asked.effort) if model.format.harmony else asked.effort
    switch = asked.effort != "none"
    found = {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, switch)}
    return {name: value for name, value in found.items() if model.tokenizer.takes(name)}


def _chars(asked: Asked) -> int:
    """Return the number of characters to render and encode."""
    chat = sum(MESSAGE_CHARS + _content_chars(message) + len(message.get("name", "")) for message in asked.messages)
    for message in asked.messages:
        if message["role"] == "assistant":
            chat += len(message.get("reasoning_content", "")) + len(message.get("reasoning", ""))
            chat += sum(len(str(call["function"]["arguments"])) for call in message.get("tool_calls", ()))
    tools = asked.tools.chars if asked.tools else 0
    return chat + tools + sum(len(prompt) for prompt in asked.prompts if isinstance(prompt, str))


def _content_chars(message: ChatMessage) -> int:
    content = message["content"]
    return sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")


def _encode(asked: Asked, model: ServedModel, most_tokens: int | None) -> list[list[int]]:
    if asked.messages:
        # The template has put the special tokens where they belong.
        return [_encode_text(_render(asked, model), asked, model, most_tokens, add_special_tokens=False)]
    add = not asked.raw
    return [
        _encode_text(each, asked, model, most_tokens, add_special_tokens=add) if isinstance(each, str) else each
        for each in asked.prompts
    ]


def _encode_text(
    text: str, asked: Asked, model: ServedModel, most_tokens: int | None, *, add_special_tokens: bool
) -> list[int]:
    if most_tokens is not None and model.tokenizer.has_more(text, most_tokens - 1):
        reason = f"the prompt's {len(text)} characters leave no room in a context of {most_tokens} tokens"
        raise ContextTooLong(reason, param=asked.prompt_field)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
