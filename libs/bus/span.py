"""A partition between two offsets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from libs.bus.clients import BrokerAway

POLL_MS = 500
MAX_POLL_RECORDS = 500
STALL_S = 10.0
"""Records that are there and do not come for so long."""


async def read_span(consumer: AIOKafkaConsumer, part: TopicPartition, start: int, end: int) -> AsyncIterator[Any]:
    """aiokafka's committed records from `start` to before `end`; raises one of CONNECTION_ERRORS."""
    consumer.assign([part])
    consumer.seek(part, start)
    loop = asyncio.get_running_loop()
    position, moved_s = start, loop.time()
    while position < end:
        batches = await consumer.getmany(part, timeout_ms=POLL_MS, max_records=MAX_POLL_RECORDS)
        for record in batches.get(part, ()):
            if record.offset < end:
                yield record
        known, position = position, await consumer.position(part)
        if position > known:
            moved_s = loop.time()
        elif loop.time() - moved_s > STALL_S:
            raise BrokerAway(f"{part} has records that do not come")
