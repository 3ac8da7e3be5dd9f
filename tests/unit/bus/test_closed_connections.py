"""A test of requests to a broker over a connection that has just been closed."""

import asyncio

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from libs.bus.clients import CONNECTION_ERRORS, client_options


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
