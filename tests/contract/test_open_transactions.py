"""Tests of opening a transactional producer on a broker that dies meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from libs.bus import clients
from libs.bus.clients import open_transactions
from libs.testing.servers.stores import KafkaServer, embedded_kafka
from libs.testing.wait import until


@pytest.fixture
def kafka() -> Iterator[KafkaServer]:
    with embedded_kafka() as it:
        yield it


class DyingBroker:
    """A proxy of a broker that kills the broker before it returns its first metadata, so that clients learn of a
    broker that no longer exists."""

    def __init__(self, kafka: KafkaServer) -> None:
        self._kafka = kafka
        self._host, port = kafka.servers.split(":")
        self._port = int(port)
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        try:
            while requested := await _frame(reader):
                up_writer.write(requested)
                answer = await _frame(up_reader)
                if int.from_bytes(requested[4:6]) == METADATA:
                    self._kafka.server.kill()
                writer.write(answer)
        finally:
            self.connections -= 1
            writer.close()
            up_writer.close()


METADATA = 3
"""Kafka's API key of metadata requests."""


async def _frame(reader: asyncio.StreamReader) -> bytes:
    try:
        size = await reader.readexactly(4)
        return size + await reader.readexactly(int.from_bytes(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@pytest.fixture
async def dying(kafka: KafkaServer) -> AsyncIterator[tuple[str, DyingBroker]]:
    broker = DyingBroker(kafka)
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", broker


async def test_opening_fails_if_no_coordinator_answers(
    dying: tuple[str, DyingBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "OPEN_TIMEOUT_S", 0.5)
    address, broker = dying
    with pytest.raises(TimeoutError):
        async with open_transactions(address, "client", "transactions"):
            pass
    await until(lambda: not broker.connections, what="the end of its connections")


async def test_opening_ends_when_cancelled(dying: tuple[str, DyingBroker], kafka: KafkaServer) -> None:
    address, broker = dying

    async def hold() -> None:
        async with open_transactions(address, "client", "transactions"):
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(hold())
    await until(lambda: not kafka.server.runs, what="the broker's end")
    task.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    assert task.cancelled()
    await until(lambda: not broker.connections, what="the end of its connections")
