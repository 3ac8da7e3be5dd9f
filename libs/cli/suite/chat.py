"""The command `fulcrum chat`: one streamed request over HTTP."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from libs.cli.console import make_console
from libs.cli.find import error_text, find_suite, get_json, key_headers, no_suite
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain

CONNECT_TIMEOUT_S = 5.0
# A long prompt on a busy laptop takes time.
READ_TIMEOUT_S = 300.0


@dataclass(slots=True)
class ChatAnswer:
    """The answer to a chat request: filled while the stream runs, complete at its end."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    served: dict[str, Any] = field(default_factory=dict)
    """The workers and times of the request, as the gateway reports them."""

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "ttft_s": self._seconds("ttft_ms"),
            "tpot_s": self._seconds("tpot_ms"),
            "prefill_worker": self.served.get("prefill_worker"),
            "decode_worker": self.served.get("decode_worker"),
        }

    def served_by(self) -> str:
        """Return one line for people with the workers that served the answer, and its speed."""
        workers = [str(self.served[key]) for key in ("prefill_worker", "decode_worker") if self.served.get(key)]
        parts = [" → ".join(workers)] if workers else []
        ttft_s, tpot_s = self._seconds("ttft_ms"), self._seconds("tpot_ms")
        if ttft_s is not None:
            parts.append(f"first token after {ttft_s * 1000:.0f} ms")
        if tpot_s is not None:
            parts.append(f"then {tpot_s * 1000:.1f} ms a token")
        if self.usage:
            parts.append(f"{self.usage['prompt_tokens']} + {self.usage['completion_tokens']} tokens")
        return ", ".join(parts)

    def _seconds(self, key: str) -> float | None:
        value = self.served.get(key)
        return None if value is None else round(float(value) / 1000, 6)


async def ask(gateway: str, body: dict[str, Any], answer: ChatAnswer) -> AsyncIterator[str]:
    """Yield pieces of text as they arrive and fill `answer` in the process. Raise StartupError."""
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    headers = {"x-fulcrum-details": "1", **key_headers(gateway)}
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False) as client,
            client.stream("POST", f"{gateway}/v1/chat/completions", json=request, headers=headers) as response,
        ):
            if not response.is_success:
                await response.aread()
                raise StartupError(f"the gateway refused: {error_text(response)}")
            async for line in response.aiter_lines():
                piece = take_line(line, answer)
                if piece:
                    yield piece
    except httpx.ConnectError:
        raise no_suite(gateway) from None
    except httpx.TransportError as error:
        raise StartupError(f"the answer broke off ({type(error).__name__}): ask again") from None


def take_line(line: str, answer: ChatAnswer) -> str:
    """Return the text in one line of server-sent events."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise StartupError(f"the answer ended with an error: {chunk['error'].get('message', chunk['error'])}")
    answer.usage = chunk.get("usage") or answer.usage
    answer.served = chunk.get("fulcrum") or answer.served
    text = ""
    for choice in chunk.get("choices", ()):
        text += choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text += text
    return text


async def answer_once(
    prompt: str,
    max_tokens: int,
    temperature: float | None,
    model: str | None,
    *,
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Ask a question and print the answer. Raise StartupError."""
    suite = find_suite(ready_file)
    body: dict[str, Any] = {
        "model": model or suite.model or _first_model(suite.gateway),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
    }
    if temperature is not None:
        body["temperature"] = temperature
    answer = ChatAnswer()
    async for piece in ask(suite.gateway, body, answer):
        if not as_json:
            print(plain(piece, lines=True), end="", flush=True)
    if as_json:
        print(json.dumps(answer.to_json()))
        return
    print(flush=True)
    make_console(stderr=True, soft_wrap=True).print(plain(answer.served_by()), style="dim")


def _first_model(gateway: str) -> str:
    models = get_json(gateway, "/v1/models", exact=True)["data"]
    if not models:
        raise StartupError(f"{gateway} serves no model")
    return str(models[0]["id"])
