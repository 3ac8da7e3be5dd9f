"""Clients of a trial: an open loop of streams that can be ended at once, and what each has had so far."""

import asyncio
import json
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

READ_BYTES: Final = 16_384
BYTES: Final = 256
"""Ids of prompts are drawn below this: the built-in vocabulary's bytes."""
TOKEN: Final = b'"text"'
"""One in each piece of an answer that brings a token."""


@dataclass(slots=True)
class Asked:
    """One request."""

    isl: int
    osl: int
    sent_s: float
    first_s: float = 0.0
    """0: no token has come."""
    tokens: int = 0
    done: bool = False
    failed: str = ""


@dataclass(slots=True)
class Clients:
    """All requests of a trial."""

    gateway: str
    model: str
    asked: list[Asked] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def play(self, requests: Iterable[tuple[float, int, int]], seed: int) -> None:
        """From now on, each in its time."""
        self._tasks.append(asyncio.create_task(self._play(list(requests), random.Random(seed))))

    async def stop(self) -> None:
        """End all of them; their streams are cut."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, requests: list[tuple[float, int, int]], drawn: random.Random) -> None:
        began_s = time.monotonic()
        for at_s, isl, osl in requests:
            await asyncio.sleep(max(began_s + at_s - time.monotonic(), 0))
            prompt = [drawn.randrange(BYTES) for _ in range(isl)]
            self._tasks.append(asyncio.create_task(self._ask(prompt, osl)))

    async def _ask(self, prompt: list[int], osl: int) -> None:
        asked = Asked(len(prompt), osl, time.monotonic())
        self.asked.append(asked)
        where = urlsplit(self.gateway)
        with suppress(asyncio.CancelledError):
            try:
                reader, writer = await asyncio.open_connection(str(where.hostname), int(where.port or 80))
                try:
                    writer.write(_request(self.model, prompt, osl))
                    await self._read(reader, asked)
                finally:
                    writer.close()
            except OSError as error:
                asked.failed = repr(error)
        asked.done = True

    async def _read(self, reader: asyncio.StreamReader, asked: Asked) -> None:
        head = b""
        while data := await reader.read(READ_BYTES):
            head = head or data[:64]
            count = data.count(TOKEN)
            if count and not asked.first_s:
                asked.first_s = time.monotonic()
            asked.tokens += count
        if b" 200 " not in head:
            asked.failed = head.decode(errors="replace")


def _request(model: str, prompt: list[int], tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    encoded = json.dumps(body, separators=(",", ":")).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded
