"""Prompts to tokens, within the model's vocabulary and context. Long texts are encoded off the event loop's thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from libs.contracts.errors import ContextTooLong, InvalidRequest
from services.gateway.catalog import ServedModel
from services.gateway.parse import Asked, Prompt

INLINE_CHARS = 4096
"""Shorter texts take less time to encode than a thread's hand-over costs others."""


async def tokenise(asked: Asked, model: ServedModel, threads: Executor) -> list[list[int]]:
    """Token ids of each prompt; raises InvalidRequest that names the field."""
    if asked.messages:
        size = sum(len(message["content"]) for message in asked.messages)
        return [await _encode(lambda: _encode_chat(asked, model), size, threads)]
    return [await _encode_prompt(prompt, model, threads) for prompt in asked.prompts]


def check_fit(asked: Asked, prompts: list[list[int]], model: ServedModel, max_context_tokens: int) -> int:
    """How many tokens each choice may have at most; raises what does not fit. Pure."""
    vocab_size = model.info.vocab_size
    if any(token >= vocab_size for token in asked.sampling.logit_bias):
        raise InvalidRequest(f"logit_bias names a token beyond the vocabulary's {vocab_size}", param="logit_bias")
    longest = max(len(prompt) for prompt in prompts)
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest(f"{asked.prompt_field} has no tokens", param=asked.prompt_field)
        if max(prompt) >= vocab_size or min(prompt) < 0:
            raise InvalidRequest(f"prompt has a token outside the vocabulary's {vocab_size}", param="prompt")
    if longest >= max_context_tokens:
        text = f"the prompt's {longest} tokens leave no room in a context of {max_context_tokens}"
        raise ContextTooLong(text, param=asked.prompt_field)
    if asked.max_tokens is None:
        return max_context_tokens - longest
    if longest + asked.max_tokens > max_context_tokens:
        text = f"{longest} prompt tokens and {asked.max_tokens} more exceed the context of {max_context_tokens}"
        raise ContextTooLong(text, param=asked.max_tokens_field)
    return asked.max_tokens


def _encode_chat(asked: Asked, model: ServedModel) -> list[int]:
    # The template has put the special tokens where they belong.
    return model.tokenizer.encode(model.tokenizer.render_chat(asked.messages), add_special_tokens=False)


async def _encode_prompt(prompt: Prompt, model: ServedModel, threads: Executor) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return await _encode(lambda: model.tokenizer.encode(prompt, add_special_tokens=True), len(prompt), threads)


async def _encode(encode: Callable[[], list[int]], size: int, threads: Executor) -> list[int]:
    if size <= INLINE_CHARS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(threads, encode)
