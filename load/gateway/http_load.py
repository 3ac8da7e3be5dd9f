"""HTTP/1.1 load clients that parse no headers, so that they do not limit a bench.

`run_load` is a closed loop on a raw asyncio protocol. Each of C connections sends its next request as soon as its
answer is complete. The status and the token count of every answer are checked, and a wrong answer ends the run.
`PacedLoad` starts streams at fixed times, and counts failures. `running_clients` runs any httpx clients, for benches in
which the cost of the client does not matter.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import httpx
import msgspec

PATH = "/v1/chat/completions"
# A run fails after this time without any answer.
STALL_S = 20.0
ANSWER_MAX_BYTES = 2**20
# The upper bound of each wait of an httpx client.
CLIENT_S = 120.0
_NUMBER = b"00000000"
_QUESTION = "what is the answer to this question?"


class WrongAnswer(Exception):
    """An error answer, or one with another number of tokens than requested."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of all requests in a case."""

    tokens: int
    stream: bool

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {'stream' if self.stream else 'whole'}"

    def is_answered_by(self, answer: bytes | bytearray) -> bool:
        """Return whether a complete answer has this number of tokens and no error."""
        usage = b'"completion_tokens":%d' % self.tokens
        at = answer.rfind(usage)
        return answer.startswith(b"HTTP/1.1 200") and at >= 0 and not answer[at + len(usage) :][:1].isdigit()


class Requests:
    """A source of requests of one shape. Each prompt begins with its own number, so that none is wholly cached."""

    def __init__(self, model: str, shape: Shape, *, start: int = 0, question: str = _QUESTION) -> None:
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": f"{_NUMBER.decode()}: {question}"}],
            "max_tokens": shape.tokens,
            "ignore_eos": True,
        }
        if shape.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        encoded = msgspec.json.encode(body)
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(encoded)}"
        self._before, _, self._after = (head.encode() + b"\r\n\r\n" + encoded).partition(_NUMBER)
        self._numbers = count(start)

    def next(self) -> bytes:
        return b"%b%08d%b" % (self._before, next(self._numbers), self._after)


@dataclass(slots=True)
class Tally:
    shape: Shape
    latencies_s: list[float] = field(default_factory=list)
    error: WrongAnswer | None = None

    def take(self, answer: bytes | bytearray, latency_s: float) -> None:
        if not self.shape.is_answered_by(answer) and self.error is None:
            self.error = WrongAnswer(f"not {self.shape.name}: {bytes(answer[:2000])!r}")
        self.latencies_s.append(latency_s)


class _Connection(asyncio.Protocol):
    def __init__(self, requests: Requests, tally: Tally) -> None:
        self._requests = requests
        self._tally = tally
        self._answer = bytearray()
        self._length: int | None = None
        """The bytes of the whole answer; None while unknown, 0 for an answer that ends with its last chunk."""
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
    address: tuple[str, int], requests: Requests, tally: Tally, *, connections: int, body: Callable[[], Awaitable[None]]
) -> None:
    """Keep `connections` requests in flight until `body` returns. Raise WrongAnswer on a wrong answer."""
    loop = asyncio.get_running_loop()
    opened = [_Connection(requests, tally) for _ in range(connections)]
    try:
        for connection in opened:
            await loop.create_connection(lambda connection=connection: connection, *address)  # type: ignore[misc]
        await body()
    finally:
        for connection in opened:
            connection.close()
    if tally.error is not None:
        raise tally.error


def next_due_s(due_s: float, now_s: float, period_s: float) -> tuple[float, int]:
    """Return the time at which a free client sends next, and the number of its times that it has missed."""
    missed = max(math.floor((now_s - due_s) / period_s), 0)
    return due_s + (missed + 1) * period_s, missed


class PacedLoad:
    """Clients that together start `per_s` streams a second at fixed times.

    A client skips its times while its last answer is incomplete.
    """

    def __init__(self, address: tuple[str, int], requests: Requests, shape: Shape, *, clients: int, per_s: float):
        self._address = address
        self._requests = requests
        self._shape = shape
        self._clients = clients
        self._per_s = per_s
        self.latencies_s: list[float] = []
        """The seconds from sending a request to the last byte of its correct answer."""
        self.failures: Counter[str] = Counter()
        self.not_sent = 0
        """The number of times at which a client still waited for its last answer."""

    async def run_forever(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for place in range(self._clients):
                tasks.create_task(self._client(place), name=f"client-{place}")

    async def _client(self, place: int) -> None:
        now_s = asyncio.get_running_loop().time
        due_s = now_s() + place / self._per_s
        writer = None
        try:
            while True:
                await asyncio.sleep(due_s - now_s())
                sent_s = now_s()
                try:
                    async with asyncio.timeout(STALL_S):
                        if writer is None:
                            reader, writer = await asyncio.open_connection(*self._address, limit=ANSWER_MAX_BYTES)
                        failure = await self._ask(reader, writer)
                except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # TimeoutError is an OSError
                    failure = type(error).__name__
                if failure:
                    self.failures[failure] += 1
                    if writer is not None:
                        writer.close()
                        writer = None
                else:
                    self.latencies_s.append(now_s() - sent_s)
                due_s, missed = next_due_s(due_s, now_s(), self._clients / self._per_s)
                self.not_sent += missed
        finally:
            if writer is not None:
                writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Send a request, and return the fault of its answer; empty if there is none."""
        writer.write(self._requests.next())
        head = await reader.readuntil(b"\r\n\r\n")
        status = head[9:12].decode(errors="replace")
        if status != "200":
            return f"status {status}"
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        return "" if self._shape.is_answered_by(head + body) else "wrong answer"


@asynccontextmanager
async def running_clients(
    count: int, client: Callable[[httpx.AsyncClient, int], Awaitable[None]], *, base_url: str = ""
) -> AsyncIterator[None]:
    """Run numbered clients, which send requests until the context ends. Raise the first error of a client."""
    async with httpx.AsyncClient(base_url=base_url, timeout=CLIENT_S) as http:
        clients = [asyncio.ensure_future(client(http, number)) for number in range(count)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            ended = await asyncio.gather(*clients, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
