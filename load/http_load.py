"""A lean closed-loop HTTP/1.1 load client: C connections, each asks again as soon as its answer is whole.

Callbacks on a raw asyncio protocol, no task and no parsed headers per request, so that it is not what limits a bench.
Every answer's status and token count are checked; a wrong one ends the run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import msgspec

PATH = "/v1/chat/completions"
STALL_S = 20.0
"""No answer at all for so long fails the run."""
_NUMBER = b"00000000"


class WrongAnswer(Exception):
    """An error, or another number of tokens than was asked for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request of a case asks for."""

    tokens: int
    stream: bool

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.tokens} tokens, {'stream' if self.stream else 'whole'}"


class Requests:
    """Request bytes of one shape; each prompt begins with a number of its own, so none is wholly cached."""

    def __init__(self, model: str, shape: Shape, *, start: int = 0) -> None:
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": f"{_NUMBER.decode()}: what is the answer to this question?"}],
            "max_tokens": shape.tokens,
            "ignore_eos": True,
        }
        if shape.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        encoded = msgspec.json.encode(body)
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}"
        )
        self._before, _, self._after = (head.encode() + b"\r\n\r\n" + encoded).partition(_NUMBER)
        self._numbers = count(start)

    def next(self) -> bytes:
        """The next request."""
        return b"%b%08d%b" % (self._before, next(self._numbers), self._after)


@dataclass(slots=True)
class Tally:
    """What came back."""

    shape: Shape
    latencies_s: list[float] = field(default_factory=list)
    error: WrongAnswer | None = None

    def take(self, answer: bytes | bytearray, latency_s: float) -> None:
        """Check and count one whole answer."""
        usage = b'"completion_tokens":%d' % self.shape.tokens
        at = answer.rfind(usage)
        good = answer.startswith(b"HTTP/1.1 200") and at >= 0 and not answer[at + len(usage) :][:1].isdigit()
        if not good and self.error is None:
            self.error = WrongAnswer(f"not {self.shape.name}: {bytes(answer[:2000])!r}")
        self.latencies_s.append(latency_s)


class _Connection(asyncio.Protocol):
    def __init__(self, requests: Requests, tally: Tally) -> None:
        self._requests = requests
        self._tally = tally
        self._answer = bytearray()
        self._length: int | None = None
        """Of the whole answer; None while unknown, 0 where its last chunk tells the end."""
        self._sent_s = 0.0
        self._transport: asyncio.Transport | None = None
        self.stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derive from no asyncio class
        self._ask()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        answer += data
        if self._length is None:
            end = answer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._length = _whole_length(bytes(answer[:end]).lower(), end + 4)
        whole = len(answer) >= self._length if self._length else answer.endswith(b"0\r\n\r\n")
        if whole:
            self._tally.take(answer, time.perf_counter() - self._sent_s)
            self._ask()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.stopping and self._tally.error is None:
            self._tally.error = WrongAnswer("the server closed a connection")

    def close(self) -> None:
        self.stopping = True
        if self._transport is not None:
            self._transport.abort()

    def _ask(self) -> None:
        assert self._transport is not None
        if self._tally.error is not None or self.stopping:
            return
        self._answer.clear()
        self._length = None
        self._sent_s = time.perf_counter()
        self._transport.write(self._requests.next())


def _whole_length(head: bytes, body_at: int) -> int:
    _, found, rest = head.partition(b"content-length:")
    return body_at + int(rest.partition(b"\r\n")[0]) if found else 0


async def run_load(
    addresses: Sequence[tuple[str, int]],
    requests: Requests,
    tally: Tally,
    *,
    connections: int,
    body: Callable[[], Awaitable[None]],
) -> None:
    """Keep `connections` requests in flight, spread over `addresses`, until `body` returns. Raises WrongAnswer."""
    loop = asyncio.get_running_loop()
    opened = [_Connection(requests, tally) for _ in range(connections)]
    try:
        for place, connection in enumerate(opened):
            await loop.create_connection(lambda connection=connection: connection, *addresses[place % len(addresses)])  # type: ignore[misc]
        await body()
    finally:
        for connection in opened:
            connection.close()
    if tally.error is not None:
        raise tally.error
