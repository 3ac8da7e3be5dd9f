"""Attacks on a suite's inner ports: forged frames and KV handles, and foreign values in topics and in Redis."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from aiokafka.errors import MessageSizeTooLargeError

from libs.bus.clients import open_producer
from libs.bus.codec import SCHEMA_HEADER
from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.topics import ALL
from libs.runtime.redis import make_redis
from libs.testing.messages import extremes, plain, plausible_fields

# The pause after each value and call. Filling a disk or a network would need no malformed values.
PAUSE_S: Final = 0.005
CALL_S: Final = 1.0
# The milliseconds for which a forged report of a gateway is valid.
LASTS_MS: Final = 3000
HANDLE_BYTES: Final = 16
_SERVICES: Final = "fulcrum.worker.v1"


@dataclass(frozen=True, slots=True)
class Inside:
    kafka: str
    redis: str
    cluster: str


CountAnswer = Callable[[object], None]
"""A function that counts an answer, or the error in its place."""


def nonsense(chance: random.Random) -> bytes:
    """Return random bytes, sometimes after the beginning of a valid value."""
    return chance.choice((b"", b"\x0a\x04", b'{"a": [', b"\x00")) + chance.randbytes(chance.randrange(400))


async def forged_frames(inside: Inside, saw: CountAnswer) -> None:
    """Open streams of a gateway and of a worker, with malformed frames and handles that nobody issued."""
    chance = random.Random(1)
    redis: Any = make_redis(inside.redis, timeout_ms=1000)
    found = [await redis.hget(keys.worker(inside.cluster, bytes(each).decode()), "worker")
             for each in await redis.smembers(keys.workers(inside.cluster))]  # fmt: skip
    await redis.aclose()
    addresses = [Worker.FromString(bytes(each)).address for each in found if each]

    def pulls() -> Iterator[bytes]:
        handle = pb.PullOpen(handle=chance.randbytes(HANDLE_BYTES), incarnation=1)
        yield pb.PullFrame(opens=[handle]).SerializeToString()
        yield nonsense(chance)

    def frames() -> Iterator[bytes]:
        hello = pb.Hello(gateway_id=f"forged-{chance.random()}", cluster=inside.cluster)
        yield pb.GatewayFrame(hello=hello).SerializeToString()
        yield nonsense(chance)

    async def one(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            while True:
                for method, sent in (("KvService/Pull", pulls()), ("WorkerService/Serve", frames())):
                    saw(await _said(channel, method, sent))
                    await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(one(address) for address in addresses))


async def _said(channel: grpc.aio.Channel, method: str, sent: Iterator[bytes]) -> str:
    """Return the status with which a call ends."""
    call: Any = channel.stream_stream(f"/{_SERVICES}.{method}")(timeout=CALL_S)
    try:
        for message in sent:
            await call.write(message)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return str((await call.code()).name)


async def topic_values(inside: Inside, saw: CountAnswer) -> None:
    """Publish malformed values to every topic of the suite."""
    chance = random.Random(2)
    async with open_producer(inside.kafka, "attacker") as producer:
        while True:
            for topic in ALL:
                headers = [(SCHEMA_HEADER, topic.value.DESCRIPTOR.full_name.encode())] if chance.random() < 0.5 else []
                await producer.send_and_wait(topic.name(inside.cluster), nonsense(chance), key=b"k", headers=headers)
                saw("value")
                await asyncio.sleep(PAUSE_S)


async def topic_extremes(inside: Inside, saw: CountAnswer) -> None:
    """Publish well-formed records to every topic, each with one field at a limit of its type."""
    async with open_producer(inside.kafka, "attacker") as producer:
        while True:
            for topic in ALL:
                headers = [(SCHEMA_HEADER, topic.value.DESCRIPTOR.full_name.encode())]
                for _, message in extremes(plain(topic.value, plausible_fields(time.time_ns()))):
                    try:
                        await producer.send_and_wait(
                            topic.name(inside.cluster), message.SerializeToString(), key=b"k", headers=headers
                        )
                    except MessageSizeTooLargeError:
                        saw("too large")
                    else:
                        saw("value")
                    await asyncio.sleep(PAUSE_S)


async def redis_values(inside: Inside, saw: CountAnswer) -> None:
    """Write workers that do not exist, and malformed values under keys that gateways exchange."""
    chance, redis = random.Random(3), make_redis(inside.redis, timeout_ms=1000)
    cluster = inside.cluster
    while True:
        name = f"forged-{chance.randrange(50)}"
        await redis.sadd(keys.workers(cluster), name)
        lease: dict[Any, Any] = {"worker": nonsense(chance), "incarnation": nonsense(chance)}
        await redis.hset(keys.worker(cluster, name), mapping=lease)
        await redis.hset(keys.tenant_places(cluster), name, b"%d:" % (time.time() * 1000 + LASTS_MS) + nonsense(chance))
        await redis.sadd(keys.kv_blocks(cluster, "sim", name), nonsense(chance))
        saw("value")
        await asyncio.sleep(PAUSE_S)
