"""The last step of responses: the head is sent with its body, refusals are bytes, and HTTP/1.0 gets no chunks."""

import asyncio
import http
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from libs.contracts.errors import FulcrumError


class HeadWithBody(asyncio.Transport):
    """A transport for one response that sends its head together with the first part of its body.

    The head leaves alone only if nothing follows in the same turn of the loop. uvicorn always writes it by itself,
    which costs a system call and wakes the client for nothing.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        """The head while it is held back; empty once it has been sent, None before it has been written."""

    def write(self, data: Any) -> None:
        # uvicorn writes the head in the first call.
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class UnframedCycle(RequestResponseCycle):
    """A response to an HTTP/1.0 client, which knows no chunks: without a length, it ends with its connection."""

    _to_the_end = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._to_the_end = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._to_the_end:
                self.chunked_encoding = False  # settled, so that no chunks are chosen
        elif self._to_the_end:
            self.expected_content_length = len(message.get("body", b""))  # this part's: of all nobody knows
        await super().send(message)


def refusal(error: FulcrumError, *, to_head: bool = False) -> bytes:
    """Return a whole response in the shape of the API's errors, after which the connection ends.

    A response to HEAD has no body.
    """
    body = msgspec.json.encode(error.http_body)
    head = f"HTTP/1.1 {error.http_status} {http.HTTPStatus(error.http_status).phrase}\r\n"
    own = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = (f"{name}: {value}\r\n" for name, value in (own | error.http_headers).items())
    return f"{head}{''.join(lines)}\r\n".encode() + (b"" if to_head else body)
