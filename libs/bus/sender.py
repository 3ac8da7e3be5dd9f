"""The sending half of the bus: one task that repeatedly sends everything queued as one batch."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import InvalidTopicError, MessageSizeTooLargeError, RecordListTooLargeError

from libs.bus.broker import Copies, make_topics, named_brokers
from libs.bus.clients import CONNECTION_ERRORS, REQUEST_TIMEOUT_MS, BrokerAway, Brokers, open_admin, open_producer
from libs.bus.codec import SCHEMA_HEADER, Buffer, Outgoing
from libs.contracts.topics import Topic
from libs.runtime.backoff import Backoff

log = structlog.get_logger()

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
MAX_BATCH_RECORDS = 1000
# The pause between batches, in which records gather. The first record after a quiet time is sent at once.
PAUSE_S = 0.05
# Above aiokafka's own timeout of a batch, and reached only if that one fails.
SEND_TIMEOUT_S = 2 * REQUEST_TIMEOUT_MS / 1000

# Errors after which no attempt can succeed, and retrying such a record would block all others.
_NEVER_TAKEN = (MessageSizeTooLargeError, RecordListTooLargeError, InvalidTopicError)


class Sender:
    """A sender that keeps the order of publishing and delivers at least once: unconfirmed records are sent again."""

    def __init__(
        self,
        bootstrap: Brokers,
        cluster: str,
        client_id: str,
        topics: Sequence[Topic],
        buffer: Buffer,
        *,
        copies: Copies | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._cluster = cluster
        self._client_id = client_id
        self._topics = topics
        self._buffer = buffer
        self._copies = copies or Copies()
        self._in_flight = 0
        self._wake = asyncio.Event()
        self._closing = False
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended in any way."""
        self.published = 0
        self.dropped = 0

    @property
    def buffered(self) -> int:
        """The number of records that the broker has not confirmed."""
        return len(self._buffer) + self._in_flight

    def put(self, record: Outgoing) -> None:
        self.published += 1
        self.dropped += self._buffer.append(record)
        self._wake.set()

    def finish(self) -> None:
        """Make `run` return once everything has been sent."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Send queued records until `finish`, continuing through outages."""
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
            servers = self._bootstrap if isinstance(self._bootstrap, str) else self._bootstrap.servers
            await make_topics(admin, self._topics, self._cluster, self._copies, named_brokers(servers))
        async with open_producer(self._bootstrap, self._client_id) as producer:
            yield producer

    async def _send_queued(self, producer: AIOKafkaProducer) -> None:
        """Send until `finish`. Raise one of CONNECTION_ERRORS if the broker does not accept a batch."""
        while self._buffer or not self._closing:
            self._wake.clear()
            # Send before waiting, because records left over from the last connection have not set the event.
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
                confirmation.cancel()  # a late confirmation is useless, because its record is sent again
            unsent = [record for index, record in enumerate(batch) if not self._settled(confirmations, index)]
            self.dropped += self._buffer.put_back(unsent)
        if unsent:
            raise BrokerAway(f"{len(unsent)} of {len(batch)} records were not taken")

    def _settled(self, confirmations: list["asyncio.Future[object]"], index: int) -> bool:
        """Return whether the record is either on the broker or permanently rejected by it."""
        if index >= len(confirmations) or not confirmations[index].done() or confirmations[index].cancelled():
            return False
        error = confirmations[index].exception()
        if isinstance(error, _NEVER_TAKEN):
            self.dropped += 1
            log.error("record dropped: the broker will not take it", error=repr(error))
            return True
        return error is None


async def _send(producer: AIOKafkaProducer, record: Outgoing) -> "asyncio.Future[object]":
    """Send a record and return the future of the broker's confirmation."""
    try:
        confirmation: asyncio.Future[object] = await producer.send(
            record.topic, record.value, key=record.key, headers=[(SCHEMA_HEADER, record.schema)]
        )
    except _NEVER_TAKEN as error:
        confirmation = asyncio.get_running_loop().create_future()
        confirmation.set_exception(error)
    return confirmation
