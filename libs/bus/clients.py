"""aiokafka's clients, opened and closed in the one way that holds when the broker goes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from libs.bus.servers import BrokerAway

REQUEST_TIMEOUT_MS = 3000
"""Bound on each request; a broker that takes longer counts as away."""
METADATA_AGE_MS = 1000
BATCH_BYTES = 512 * 1024
MAX_RECORD_BYTES = 1024 * 1024
FETCH_WAIT_MS = 500
EMBEDDED_FETCH_WAIT_MS = 20
"""The embedded broker answers a fetch that found nothing only when its wait is over, whatever has come meanwhile."""

CONNECTION_ERRORS = (BrokerAway, KafkaError, OSError, TimeoutError, KeyError)
"""What a broker that is away makes of a call; aiokafka's KeyError when a connection goes while a request times out."""


def quiet_client_log() -> None:
    """Keep aiokafka from logging each attempt of an outage: the bus logs the outage itself."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


@asynccontextmanager
async def open_admin(bootstrap: str, client_id: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A connected admin client; raises one of CONNECTION_ERRORS when the broker is away."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, client_id=client_id, request_timeout_ms=REQUEST_TIMEOUT_MS)
    try:
        await _start(admin.start())
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def open_producer(bootstrap: str, client_id: str) -> AsyncIterator[AIOKafkaProducer]:
    """A connected producer; leaving waits for what it was given, which it gives up within REQUEST_TIMEOUT_MS."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        client_id=client_id,
        acks="all",
        linger_ms=0,
        max_batch_size=BATCH_BYTES,
        max_request_size=MAX_RECORD_BYTES,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
    )
    try:
        await _start(producer.start())
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def open_consumer(bootstrap: str, client_id: str, *, embedded: bool) -> AsyncIterator[AIOKafkaConsumer]:
    """A connected consumer of no group and, as yet, of no partition."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        client_id=client_id,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # of what is left, when retention has overtaken the position
        isolation_level="read_committed",
        check_crcs=not embedded,
        fetch_max_wait_ms=EMBEDDED_FETCH_WAIT_MS if embedded else FETCH_WAIT_MS,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        metadata_max_age_ms=METADATA_AGE_MS,
    )
    try:
        await _start(consumer.start())
        yield consumer
    finally:
        await _stop(consumer)


async def _start(starting: Coroutine[Any, Any, None]) -> None:
    """Connect. A cancellation waits for it, bounded by its own timeouts: aiokafka would leave its connection open."""
    task = asyncio.get_running_loop().create_task(starting, name="kafka client start")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _stop(consumer: AIOKafkaConsumer) -> None:
    """Stop it whole. What ended aiokafka's fetching comes out of `stop`, with its connections still open."""
    try:
        await consumer.stop()
    except (asyncio.CancelledError, *CONNECTION_ERRORS):
        await consumer._client.close()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
