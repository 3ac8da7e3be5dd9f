"""Tests of clients that send slowly, too much, or nothing more."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from libs.runtime.http import ConnectionGuard, HttpBounds
from tests.unit.runtime.http.http_rig import echo, exchange, served, web_app

pytestmark = pytest.mark.system


def test_a_refused_client_gets_its_answer_however_much_it_still_sends() -> None:
    """Closing at once would reset the connection, and the answer would be lost on the way."""

    async def run() -> bytes:
        async with served(web_app()) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET / HTTP/1.1\r\n")
            for _ in range(100):
                writer.write(b"x: " + b"y" * 100_000)
                await writer.drain()
            answer = await reader.read()
            writer.close()
            return answer

    assert uvloop.run(run()).startswith(b"HTTP/1.1 431 ")


SOON = HttpBounds(head_s=0.2, body_s=0.2, idle_s=0.2, linger_s=0.2)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"GET / HTT", 408),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408),
        (b"\r\n\r\n", 408),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf", 408),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhalf", 408),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT", 200),
    ],
    ids=[
        "nothing",
        "half a line",
        "half a head",
        "blank",
        "half a body",
        "half an upgrade",
        "idle",
        "half of the next",
    ],
)
def test_a_client_that_stops_sending_loses_its_connection(sent: bytes, status: int | None) -> None:
    answer = exchange(echo, sent, bounds=SOON)
    assert answer.startswith(b"HTTP/1.1 %d " % status if status else b"") and bool(answer) == bool(status)
    if sent.endswith(b"GET / HT"):
        assert b"HTTP/1.1 408 " in answer


def test_a_client_that_continues_to_send_a_refused_body_loses_its_connection() -> None:
    async def refuses(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run() -> None:
        async with served(refuses, SOON) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 413 ")
            with suppress(ConnectionError):
                while not (reader.at_eof() or writer.is_closing()):
                    writer.write(b"more")
                    await writer.drain()
                    await asyncio.sleep(0.02)  # a client that drips
            writer.transport.abort()

    uvloop.run(run())


def test_half_a_head_behind_a_slow_answer_waits_for_it() -> None:
    """The connection is not read meanwhile: that it does not come is no fault of the client's."""

    async def run() -> None:
        late = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                await late.wait()
            await echo(scope, receive, send)

        guard = ConnectionGuard(HttpBounds(head_s=0.1, idle_s=0.1))
        async with served(app, guard=guard) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            bystander, waiting = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET /next HTTP/1.1\r\n")
            assert await bystander.read() == b""  # it sent nothing: the time for a head is over
            late.set()
            assert (await reader.read(4096)).endswith(b"GET /slow \n")
            writer.write(b"host: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"GET /next \n")
            writer.close()
            waiting.close()

    uvloop.run(run())
