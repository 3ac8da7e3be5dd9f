"""Streamed completions as a client sees them: the text, and when each part of it came."""

import asyncio
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx


@dataclass
class Streamed:
    """One streamed answer; times are the event loop's, in seconds."""

    asked_s: float
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
        """Until the first part came."""
        return self.came_s[0] - self.asked_s

    @property
    def longest_gap_s(self) -> float:
        """Between two parts."""
        return max((later - earlier for earlier, later in pairwise(self.came_s)), default=0.0)


async def stream(
    http: httpx.AsyncClient, url: str, /, *, into: Streamed | None = None, tenant: str = "", **body: Any
) -> Streamed:
    """Ask for a text completion and read its stream to the end.

    `into` lets a test watch it grow; no prefix that another `tenant` has left in a cache is found.
    """
    now_s = asyncio.get_running_loop().time
    answer = into or Streamed(now_s())
    answer.asked_s = now_s()
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
    """Logprobs without regard to how they were cut into chunks."""
    found: dict[str, list[Any]] = {}
    for part in answer.logprobs:
        for name, values in part.items():
            found.setdefault(name, []).extend(values)
    return found
