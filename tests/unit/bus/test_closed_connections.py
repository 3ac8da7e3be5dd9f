"""Tests of connections to a broker that are closed: before a request, and while a client still starts."""

import asyncio

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from libs.bus import clients
from libs.bus.clients import CONNECTION_ERRORS, client_options
from libs.runtime.tasks import end


@pytest.mark.system
def test_a_request_over_a_connection_that_uvloop_has_closed_finds_the_broker_away() -> None:
    client_options("localhost:9092")

    async def request() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        connection, closed = AIOKafkaConnection(host, port), asyncio.Event()
        connection._reader, connection._writer = await asyncio.open_connection(host, port)
        connection._versions = {MetadataRequest.API_KEY: (0, 5)}
        connection._read_task = asyncio.create_task(closed.wait())
        connection._writer.transport.abort()
        while await connection._reader.read():
            pass
        await asyncio.sleep(0)
        try:
            connection.send(MetadataRequest([]))
        finally:
            server.close()

    with pytest.raises(KafkaConnectionError, match="closed") as raised:
        uvloop.run(request())
    assert isinstance(raised.value, CONNECTION_ERRORS)


async def test_a_client_is_closed_only_once_it_has_started_however_often_its_opening_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go, seen = asyncio.Event(), asyncio.Event(), []

    class Admin:
        def __init__(self, **_: object) -> None: ...

        async def start(self) -> None:
            begun.set()
            await go.wait()
            seen.append("started")

        async def close(self) -> None:
            seen.append("closed")

    async def opening() -> None:
        async with clients.open_admin("localhost:9092", "test"):
            seen.append("open")

    monkeypatch.setattr(clients, "AIOKafkaAdminClient", Admin)
    opener = asyncio.create_task(opening())
    await begun.wait()
    for _ in range(3):
        opener.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert seen == []
    go.set()
    await end(opener)
    assert seen == ["started", "closed"] and opener.cancelled()
