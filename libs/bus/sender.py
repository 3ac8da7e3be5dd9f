"""The sending half of the bus: one task that takes what has queued and sends it as one batch, over and over."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import InvalidTopicError, MessageSizeTooLargeError, RecordListTooLargeError

from libs.bus.broker import make_topics
from libs.bus.buffer import Buffer, Outgoing
from libs.bus.clients import CONNECTION_ERRORS, REQUEST_TIMEOUT_MS, BrokerAway, open_admin, open_producer
from libs.bus.codec import SCHEMA_HEADER
from libs.bus.security import Brokers
from libs.contracts.topics import Topic
from libs.runtime.backoff import Backoff

log = structlog.get_logger()

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
MAX_BATCH_RECORDS = 1000
PAUSE_S = 0.05
"""Between batches: what is published meanwhile leaves as one. The first record after a quiet time does not wait."""
SEND_TIMEOUT_S = 2 * REQUEST_TIMEOUT_MS / 1000
"""This bound is above aiokafka's own bound on a batch, and is reached only when that one fails."""

# No attempt can succeed: such a record would hold up all others.
_NEVER_TAKEN = (MessageSizeTooLargeError, RecordListTooLargeError, InvalidTopicError)


class Sender:
    """Sends in order of publishing, at least once: what is not confirmed is sent again over the next connection."""

    def __init__(
        self, bootstrap: Brokers, cluster: str, client_id: str, topics: Sequence[Topic], buffer: Buffer
    ) -> None:
        self._bootstrap = bootstrap
        self._cluster = cluster
        self._client_id = client_id
        self._topics = topics
        self._buffer = buffer
        self._in_flight = 0
        self._wake = asyncio.Event()
        self._closing = False
        self.tried = asyncio.Event()
        """Set once a first attempt to connect has ended, well or not."""
        self.published = 0
        self.dropped = 0

    @property
    def buffered(self) -> int:
        """Records that the broker has not confirmed."""
        return len(self._buffer) + self._in_flight

    def put(self, record: Outgoing) -> None:
        """Queue a record."""
        self.published += 1
        self.dropped += self._buffer.append(record)
        self._wake.set()

    def finish(self) -> None:
        """Let `run` return once all is sent."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Send until `finish`; outages are waited out."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            try:
                async with self._connect() as producer:
                    self.tried.set()
                    if backoff.failures:
                        log.info("broker is back", buffered=self.buffered)
                    backoff.reset()
                    await self._send_queued(producer)
                    return
            except CONNECTION_ERRORS as error:
                wait_s = backoff.next_s()
                if backoff.failures == 1:
                    log.warning("broker is away, sending waits", error=repr(error), buffered=self.buffered)
            self.tried.set()
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[AIOKafkaProducer]:
        async with open_admin(self._bootstrap, self._client_id) as admin:
            await make_topics(admin, self._topics, self._cluster)
        async with open_producer(self._bootstrap, self._client_id) as producer:
            yield producer

    async def _send_queued(self, producer: AIOKafkaProducer) -> None:
        """Send until `finish`; raises one of CONNECTION_ERRORS when the broker does not take a batch."""
        while self._buffer or not self._closing:
            self._wake.clear()
            # Sends before it waits: what the last connection did not get rid of has woken nobody.
            while batch := self._buffer.take(MAX_BATCH_RECORDS):
                await self._send_batch(producer, batch)
            if not self._closing:
                await asyncio.sleep(PAUSE_S)
                await self._wake.wait()

    async def _send_batch(self, producer: AIOKafkaProducer, batch: list[Outgoing]) -> None:
        self._in_flight = len(batch)
        confirmations: list[asyncio.Future[object]] = []
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                for record in batch:
                    confirmations.append(await _send(producer, record))  # noqa: PERF401  (partial on an error)
                await asyncio.wait(confirmations)
        finally:
            self._in_flight = 0
            for confirmation in confirmations:
                confirmation.cancel()  # one that comes too late is of no use: its record is sent again
            unsent = [record for index, record in enumerate(batch) if not self._settled(confirmations, index)]
            self.dropped += self._buffer.put_back(unsent)
        if unsent:
            raise BrokerAway(f"{len(unsent)} of {len(batch)} records were not taken")

    def _settled(self, confirmations: list["asyncio.Future[object]"], index: int) -> bool:
        """Whether the record is done with: on the broker, or never to be taken by it."""
        if index >= len(confirmations) or not confirmations[index].done() or confirmations[index].cancelled():
            return False
        error = confirmations[index].exception()
        if isinstance(error, _NEVER_TAKEN):
            self.dropped += 1
            log.error("record dropped: the broker will not take it", error=repr(error))
            return True
        return error is None


async def _send(producer: AIOKafkaProducer, record: Outgoing) -> "asyncio.Future[object]":
    """The broker's confirmation to come."""
    try:
        confirmation: asyncio.Future[object] = await producer.send(
            record.topic, record.value, key=record.key, headers=[(SCHEMA_HEADER, record.schema)]
        )
    except _NEVER_TAKEN as error:
        confirmation = asyncio.get_running_loop().create_future()
        confirmation.set_exception(error)
    return confirmation
