"""What a person would write in place of a batch job: a loop over aiokafka that asks the gateway for each line.

Lines come from one topic and answers go to another one, in either of two ways: as each answer comes, at least once; or
a poll's answers in a transaction with its offsets, exactly once.
"""

import asyncio
import time
from collections.abc import Sequence

import aiohttp
import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

POLL_MS = 500


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw


_lines = msgspec.json.Decoder(_Line)


async def fill(servers: str, lines: Sequence[bytes], *, source: str, sink: str) -> None:
    """Make both topics, of one partition, and put lines on the first."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1) for name in (source, sink)])
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=servers, linger_ms=5) as producer:
        await asyncio.gather(*[await producer.send(source, line) for line in lines])


async def plain_loop(
    servers: str, gateway: str, source: str, sink: str, *, lines: int, in_flight: int, transactional: bool
) -> float:
    """Answer `lines` lines; returns lines a second. Raises what a request fails with."""
    group = f"{source}-{transactional}"
    consumer = AIOKafkaConsumer(
        source, bootstrap_servers=servers, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    producer = AIOKafkaProducer(bootstrap_servers=servers, transactional_id=group if transactional else None)
    connector = aiohttp.TCPConnector(limit=in_flight)
    async with consumer, producer, aiohttp.ClientSession(gateway, connector=connector) as http:
        loop = _Loop(consumer, producer, http, sink=sink, group=group, in_flight=in_flight)
        begun_s = time.perf_counter()
        await (loop.by_polls(lines) if transactional else loop.line_by_line(lines))
        return lines / (time.perf_counter() - begun_s)


class _Loop:
    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        producer: AIOKafkaProducer,
        http: aiohttp.ClientSession,
        *,
        sink: str,
        group: str,
        in_flight: int,
    ) -> None:
        self._consumer, self._producer, self._http = consumer, producer, http
        self._sink, self._group, self._in_flight = sink, group, in_flight

    async def line_by_line(self, lines: int) -> None:
        room, taken = asyncio.Semaphore(self._in_flight), 0

        async def answer(line: bytes) -> None:
            try:
                await self._producer.send_and_wait(self._sink, await self._ask(line))
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            while taken < lines:
                polled = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=self._in_flight)
                for records in polled.values():
                    for record in records:
                        await room.acquire()
                        group.create_task(answer(record.value))
                    taken += len(records)
        await self._consumer.commit()

    async def by_polls(self, lines: int) -> None:
        taken = 0
        while taken < lines:
            polled = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=self._in_flight)
            values = [record.value for records in polled.values() for record in records]
            answers = await asyncio.gather(*map(self._ask, values))
            offsets: dict[TopicPartition, int] = {part: records[-1].offset + 1 for part, records in polled.items()}
            if not offsets:
                continue
            async with self._producer.transaction():
                for each in answers:
                    await self._producer.send(self._sink, each)
                await self._producer.send_offsets_to_transaction(offsets, self._group)
            taken += len(values)

    async def _ask(self, text: bytes) -> bytes:
        line = _lines.decode(text)
        headers = {"content-type": "application/json"}
        async with self._http.post(line.url, data=bytes(line.body), headers=headers) as answer:
            answer.raise_for_status()
            return b'{"custom_id":%b,"body":%b}' % (msgspec.json.encode(line.custom_id), await answer.read())
