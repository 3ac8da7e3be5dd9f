"""A real HTTP server on loopback that serves files, redirects, errors, and answers that never end."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from libs.runtime.net.ports import LOOPBACK

MAX_HEAD_BYTES = 65_536


def reply(body: bytes = b"", *headers: str, status: str = "200 OK") -> bytes:
    """Return the bytes of an HTTP answer, with a Content-Length unless `headers` say how the body ends."""
    ends = any(header.lower().startswith(("content-length", "transfer-encoding", "connection")) for header in headers)
    lines = [f"HTTP/1.1 {status}", *headers, *([] if ends else [f"Content-Length: {len(body)}"])]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class ImageHost:
    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    """The response to a path, in bytes, after which the connection is closed."""
    stalls: set[str] = field(default_factory=set)
    """Paths whose connections stay open after the response until the client closes them."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """The requested paths with their headers."""
    most_open: int = 0
    """The largest number of simultaneous connections."""
    open: int = 0

    def url(self, path: str, host: str = LOOPBACK, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *headers = head.strip().split("\r\n")
            path = line.split(" ")[1]
            self.requests.append((path, {name.lower(): value for name, value in (h.split(": ", 1) for h in headers)}))
            writer.write(self.answers.get(path, reply(status="404 Not Found")))
            await writer.drain()
            if path in self.stalls:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()


@asynccontextmanager
async def image_host(tls: ssl.SSLContext | None = None) -> AsyncIterator[ImageHost]:
    host = ImageHost()
    server = await asyncio.start_server(host.serve, LOOPBACK, 0, limit=MAX_HEAD_BYTES, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
