"""Clients that send a suite one request after another, streaming or not, and compare each answer with the first one."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import httpx


@dataclass
class Streamed:
    """One streamed answer; times are those of the event loop, in seconds."""

    requested_s: float
    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False
    status: int = 0

    @property
    def ttft_s(self) -> float:
        """The seconds from the request to the first part of the answer."""
        return self.came_s[0] - self.requested_s

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two parts."""
        return max((later - earlier for earlier, later in pairwise(self.came_s)), default=0.0)


async def stream(
    http: httpx.AsyncClient, url: str, /, *, into: Streamed | None = None, tenant: str = "", **body: Any
) -> Streamed:
    """Send a text completion and read its stream to the end. `into` lets a test watch it grow.

    Another `tenant` finds no prefix that was cached for the first one.
    """
    now_s = asyncio.get_running_loop().time
    answer = into or Streamed(now_s())
    answer.requested_s = now_s()
    fields = {"stream": True, "stream_options": {"include_usage": True}, **body}
    headers = {"x-fulcrum-tenant": tenant} if tenant else {}
    async with http.stream("POST", f"{url}/v1/completions", json=fields, headers=headers) as response:
        answer.status = response.status_code
        if response.status_code != httpx.codes.OK:
            answer.error = json.loads(await response.aread())["error"]
            return answer
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line:
                _take(answer, json.loads(line.removeprefix("data: ")), now_s())
    return answer


def _take(answer: Streamed, chunk: dict[str, Any], now_s: float) -> None:
    answer.error = chunk.get("error")
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk.get("choices", []):
        answer.came_s.append(now_s)
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if choice["logprobs"]:
            answer.logprobs.append(choice["logprobs"])


def joined_logprobs(answer: Streamed) -> dict[str, list[Any]]:
    """Join logprobs, however they were cut into chunks."""
    found: dict[str, list[Any]] = {}
    for part in answer.logprobs:
        for name, values in part.items():
            found.setdefault(name, []).extend(values)
    return found


CLIENTS = 8
KINDS = 16
"""The number of different requests; each is sent repeatedly."""
BUSY_S = 0.05
"""The time after which a client tries the next gateway if its own cannot be reached."""


@dataclass
class SteadyLoad:
    """The results of the clients so far."""

    urls: Sequence[str]
    tokens: int
    served: int = 0
    broken: int = 0
    """Connections that broke or could not be made; the request is sent again to another gateway."""
    failed: list[str] = field(default_factory=list)
    """Answers that are errors, incomplete, or different from before."""
    took_s: list[float] = field(default_factory=list)
    """The time of each served request, in the order of their ends."""
    _known: dict[int, tuple[str, int]] = field(default_factory=dict)

    async def ask(self, http: httpx.AsyncClient, number: int) -> None:
        """Send one request until it is answered."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        for url in (self.urls[(number + attempt) % len(self.urls)] for attempt in count()):
            try:
                answer = await self._once(http, url, number)
            except httpx.TransportError:
                self.broken += 1
                await asyncio.sleep(BUSY_S)
                continue
            if isinstance(answer, str):
                self.failed.append(answer)
            elif answer != self._known.setdefault(number % KINDS, answer):
                self.failed.append(f"{answer} is not {self._known[number % KINDS]}")
            else:
                self.served += 1
                self.took_s.append(now_s() - began_s)
            return

    async def _once(self, http: httpx.AsyncClient, url: str, number: int) -> tuple[str, int] | str:
        """Return the text and its tokens, or a description of the failure."""
        kind = number % KINDS
        body: dict[str, Any] = {
            "model": "sim", "prompt": f"Request {kind} " * (1 + 4 * kind), "max_tokens": self.tokens,
            "temperature": 0.8, "seed": kind, "ignore_eos": True,
        }  # fmt: skip
        if number % 2:
            answer = await http.post(f"{url}/v1/completions", json=body)
            if answer.status_code != httpx.codes.OK:
                return f"{answer.status_code} {answer.text}"
            return answer.json()["choices"][0]["text"], answer.json()["usage"]["completion_tokens"]
        streamed = await stream(http, url, **body)
        if streamed.error is not None or not streamed.done:
            return f"{streamed.status} {streamed.error} after {streamed.text!r}"
        return streamed.text, streamed.usage["completion_tokens"]

    async def more(self, requests: int, timeout_s: float = 30.0) -> None:
        """Wait until `requests` more are served."""
        wanted = self.served + requests
        async with asyncio.timeout(timeout_s):
            while self.served < wanted:  # noqa: ASYNC110 - bounded by the timeout
                await asyncio.sleep(BUSY_S)


@asynccontextmanager
async def steady_load(urls: Sequence[str], *, clients: int = CLIENTS, tokens: int = 40) -> AsyncIterator[SteadyLoad]:
    """Run clients while the context is open, then wait for the requests in progress."""
    load, numbers, ending = SteadyLoad(urls, tokens), count(), asyncio.Event()

    async def client() -> None:
        while not ending.is_set():
            await load.ask(http, next(numbers))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http, asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
        try:
            yield load
        finally:
            ending.set()
