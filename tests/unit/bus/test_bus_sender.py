"""Test of the sending half of the bus over a producer with scripted failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from libs.bus import sender
from libs.bus.codec import Buffer, Outgoing
from libs.bus.sender import Sender
from libs.testing.wait import until


class Producer:
    """A producer that refuses everything on its first connection, and accepts it afterwards."""

    def __init__(self) -> None:
        self.connections = 0
        self.taken: list[bytes] = []

    async def send(self, _topic: str, value: bytes, **_ignored: Any) -> "asyncio.Future[object]":
        confirmation: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self.connections == 1:
            confirmation.set_exception(KafkaConnectionError())
        else:
            self.taken.append(value)
            confirmation.set_result(None)
        return confirmation


async def test_records_left_by_a_failed_connection_leave_on_the_next_without_another_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer = Producer()

    @asynccontextmanager
    async def connect(*_ignored: Any) -> AsyncIterator[Producer]:
        producer.connections += 1
        yield producer

    @asynccontextmanager
    async def admin(*_ignored: Any) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(sender, "open_producer", connect)
    monkeypatch.setattr(sender, "open_admin", admin)
    monkeypatch.setattr(sender, "make_topics", lambda *_: asyncio.sleep(0))
    sending = Sender("127.0.0.1:1", "test", "client", (), Buffer())
    sending.put(Outgoing("topic", b"key", b"value", b"schema"))
    task = asyncio.get_running_loop().create_task(sending.run())
    try:
        await until(lambda: producer.taken == [b"value"] and not sending.buffered, what="the second connection")
        assert (producer.connections, sending.dropped) == (2, 0)
        sending.finish()
        await asyncio.wait_for(task, 5)
    finally:
        task.cancel()
