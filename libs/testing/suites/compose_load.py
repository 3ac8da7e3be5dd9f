"""Clients that ask without pause through OpenAI's own library, and check every answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI, OpenAIError

CLIENTS = 6
MAX_TOKENS = 48
PROMPTS = [f"Tell me about the number {number}." for number in range(CLIENTS)]
RETRIES = 12
"""Of OpenAI's library, which waits longer each time: enough for a gateway to come back."""


class ComposeLoad:
    """Each client asks one prompt over and over: a greedy answer must never change."""

    def __init__(self, base_url: str, model: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=RETRIES, timeout=120)
        self._model = model
        self._expected: dict[str, str] = {}
        self._streams = 0
        self._changed = asyncio.Condition()
        self.streaming = True
        """Streams cannot be asked again by the library: off while the gateway itself is killed."""
        self.answered = 0
        self.failed: list[str] = []

    async def ask_forever(self, prompt: str) -> None:
        """One client."""
        while True:
            try:
                text, tokens = await (self._stream(prompt) if self.streaming else self._whole(prompt))
            except OpenAIError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            expected = self._expected.setdefault(prompt, text)
            if text != expected or tokens != MAX_TOKENS:
                self.failed.append(f"{tokens} tokens, {text!r} instead of {expected!r}")
            self.answered += 1
            async with self._changed:
                self._changed.notify_all()

    async def answers(self, count: int, timeout_s: float = 120) -> None:
        """Wait for `count` more answers."""
        target = self.answered + count
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.answered >= target)

    async def end_streams(self) -> None:
        """Ask without streaming from now on, and wait for the streams that run."""
        self.streaming = False
        async with self._changed:
            await self._changed.wait_for(lambda: not self._streams)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def _stream(self, prompt: str) -> tuple[str, int]:
        self._streams += 1
        try:
            stream = await self._client.chat.completions.create(
                **self._request(prompt), stream=True, stream_options={"include_usage": True}
            )
            text, tokens = "", 0
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return text, tokens
        finally:
            self._streams -= 1

    async def _whole(self, prompt: str) -> tuple[str, int]:
        answer = await self._client.chat.completions.create(**self._request(prompt))
        return answer.choices[0].message.content or "", answer.usage.completion_tokens if answer.usage else 0

    def _request(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }


@asynccontextmanager
async def running_load(base_url: str, model: str) -> AsyncIterator[ComposeLoad]:
    """Clients that ask until the context ends."""
    load = ComposeLoad(base_url, model)
    clients = [asyncio.create_task(load.ask_forever(prompt)) for prompt in PROMPTS]
    try:
        yield load
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await load.close()
