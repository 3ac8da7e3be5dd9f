"""How answers leave: the head together with what follows it, refusals as bytes, and HTTP/1.0 without chunks."""

import asyncio
import http
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from libs.contracts.errors import FulcrumError


class HeadWithBody(asyncio.Transport):
    """One answer's way to its client: its head leaves with what follows in the same turn of the loop, or by itself
    after it. uvicorn writes it by itself, which costs a system call and wakes the client for nothing."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        """Held back; empty once it has left, None before it has come."""

    def write(self, data: Any) -> None:
        """The first call brings the head."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is."""
        return self._transport.is_closing()

    def close(self) -> None:
        """End the connection once all is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class UnframedCycle(RequestResponseCycle):
    """The answer to an HTTP/1.0 client, which knows no chunks: one without a length ends with its connection."""

    _to_the_end = False

    async def send(self, message: Any) -> None:
        """The message as ASGI has it."""
        if message["type"] == "http.response.start":
            self._to_the_end = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._to_the_end:
                self.chunked_encoding = False  # settled, so that no chunks are chosen
        elif self._to_the_end:
            self.expected_content_length = len(message.get("body", b""))  # this part's: of all nobody knows
        await super().send(message)


def refusal(error: FulcrumError, *, to_head: bool = False) -> bytes:
    """Return a whole answer, in the shape of the API's errors, after which the connection ends; without its body where
    it answers HEAD."""
    body = msgspec.json.encode(error.http_body)
    head = f"HTTP/1.1 {error.http_status} {http.HTTPStatus(error.http_status).phrase}\r\n"
    own = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = (f"{name}: {value}\r\n" for name, value in (own | error.http_headers).items())
    return f"{head}{''.join(lines)}\r\n".encode() + (b"" if to_head else body)
