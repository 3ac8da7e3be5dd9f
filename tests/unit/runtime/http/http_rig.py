"""An app behind a real socket, and raw bytes sent to it."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from libs.runtime.http import ConnectionGuard, HttpBounds, bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.runtime.web import make_web_app


def exchange(app: Any, sent: bytes, *, bounds: HttpBounds | None = None) -> bytes:
    """Return the bytes sent until the server closes, over the event loop that services run on."""
    return uvloop.run(send(app, sent, bounds=bounds))


@asynccontextmanager
async def served(
    app: Any, bounds: HttpBounds | None = None, *, guard: ConnectionGuard | None = None
) -> AsyncIterator[socket.socket]:
    sock = bind("127.0.0.1", 0, "PORT")
    guard = guard or ConnectionGuard(bounds)
    async with serve_http(app, sock, tasks=TaskOwner(), drain_s=1, guard=guard), asyncio.timeout(20):
        yield sock


async def send(app: Any, *parts: bytes, bounds: HttpBounds | None = None) -> bytes:
    """Send each part separately, once the server has had its turn."""
    async with served(app, bounds) as sock:
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            writer.write(part)
            for _ in range(5):
                await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
        return answer


def web_app() -> Any:
    return make_web_app("test", "test", not_ready=lambda: None, metrics=CollectorRegistry())


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request's line and body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    shown = f"{scope['method']} {scope['path']} ".encode() + body + b"\n"
    length = (b"content-length", str(len(shown)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": shown})


def bodies(answers: bytes) -> list[bytes]:
    """Split successive answers, each with its length."""
    found = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        found.append(answers[:length])
        answers = answers[length:]
    return found
