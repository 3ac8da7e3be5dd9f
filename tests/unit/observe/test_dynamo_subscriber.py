"""Tests of the subscription to Dynamo's publishers, which come, go or speak another protocol."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from libs.observe.subscriber import MAX_FRAME_BYTES, Subscriber
from libs.runtime.tasks import end
from libs.testing.wait import until

pytestmark = pytest.mark.system

TOPIC = b"forward-pass-metrics"


class Reading:
    """A subscriber that is read as it always is: libzmq subscribes anew only while its socket is used."""

    def __init__(self) -> None:
        self.subscriber = Subscriber(TOPIC)
        self.failures = self.subscriber.failures
        self.follow, self.renew = self.subscriber.follow, self.subscriber.renew
        self._messages: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self.subscriber.watch()), asyncio.create_task(self._read())]

    async def _read(self) -> None:
        async for parts in self.subscriber.messages():
            self._messages.put_nowait(parts)

    async def next(self) -> list[bytes]:
        async with asyncio.timeout(10):
            return await self._messages.get()

    async def close(self) -> None:
        await end(*self._tasks)
        self.subscriber.close()


@pytest.fixture
async def subscriber() -> AsyncIterator[Reading]:
    found = Reading()
    yield found
    await found.close()


def publisher(endpoint: str = "tcp://127.0.0.1:*") -> tuple[zmq.Socket[bytes], str]:
    made = zmq.Context.instance().socket(zmq.XPUB)  # like PUB, and it reports its subscribers
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.XPUB_VERBOSER, 1)  # of each connection
    made.bind(endpoint)
    return made, made.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


async def subscribed(made: zmq.Socket[bytes]) -> None:
    """Wait until a publisher has a subscriber."""
    seen = b""
    while seen != b"\x01" + TOPIC:  # an unsubscription is reported as well, by a zero
        assert await asyncio.to_thread(made.poll, 10_000)
        seen = made.recv()


async def test_messages_of_the_topic_arrive_from_each_publisher(subscriber: Reading) -> None:
    made = [publisher(), publisher()]
    subscriber.follow(endpoint for _, endpoint in made)
    for each, _ in made:
        await subscribed(each)
        each.send_multipart([b"another", b"no"])
        each.send_multipart([TOPIC, b"yes"])
    assert [await subscriber.next() for _ in made] == [[TOPIC, b"yes"]] * 2
    for each, _ in made:
        each.close()


async def test_a_publisher_that_returns_is_followed_again(subscriber: Reading) -> None:
    made, endpoint = publisher()
    subscriber.follow([endpoint])
    await subscribed(made)
    made.close()
    await until(lambda: subscriber.failures["away"] > 0)
    made, _ = publisher(endpoint)
    await subscribed(made)
    made.send_multipart([TOPIC, b"again"])
    assert await subscriber.next() == [TOPIC, b"again"]
    made.close()


async def test_a_frame_over_the_limit_ends_the_connection_until_it_is_renewed(subscriber: Reading) -> None:
    made, endpoint = publisher()
    subscriber.follow([endpoint])
    await subscribed(made)
    made.send_multipart([TOPIC, bytes(MAX_FRAME_BYTES + 1)])
    await until(lambda: subscriber.failures["away"] > 0)
    subscriber.renew(endpoint)
    await subscribed(made)
    made.send_multipart([TOPIC, b"small"])
    assert await subscriber.next() == [TOPIC, b"small"]
    made.close()


async def test_a_foreign_service_that_answers_and_hangs_up_is_counted(subscriber: Reading) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n".ljust(100))
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, family=socket.AF_INET)
    async with server:
        subscriber.follow([f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        await until(subscriber.failures.total)
        subscriber.follow([])


async def test_an_invalid_address_is_foreign(subscriber: Reading) -> None:
    subscriber.follow(["tcp://"])
    assert subscriber.failures == {"foreign": 1}
