"""The bus over Kafka, either a cluster or the embedded broker (libs/bus/embedded.py).

Delivery is at least once. A batch whose confirmation was lost with the broker is sent again, so readers detect
repeats by the numbering inside messages.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from google.protobuf.message import Message

from libs.bus.broker import Copies
from libs.bus.clients import Brokers, at_once, open_consumer, quiet_client_log, read_span
from libs.bus.codec import MAX_BUFFERED_RECORDS, Buffer, SkippedRecords, encode, to_record
from libs.bus.port import BusStats, Gap, OffsetSpan, Record, Wanted
from libs.bus.reach import BrokerReach
from libs.bus.sender import Sender
from libs.bus.subscription import Jumps, Subscription
from libs.contracts.topics import ALL, Topic
from libs.policy.copies import CopyLog, LostCopies, UnreachableBrokers, lost_copies
from libs.runtime.tasks import OnFailure, TaskOwner

log = structlog.get_logger()

START_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
"""The longest time for which `close` waits for the broker to accept buffered records."""


class KafkaBus:
    """A Bus over the broker or brokers at `bootstrap`: HOST:PORT[,HOST:PORT...]."""

    def __init__(
        self,
        bootstrap: Brokers,
        cluster: str,
        client_id: str,
        *,
        topics: Sequence[Topic] = ALL,
        on_failure: OnFailure | None = None,
        buffer_records: int = MAX_BUFFERED_RECORDS,
        gather_ms: Callable[[], int] = at_once,
        copies: Copies | None = None,
    ) -> None:
        """Create the bus. `buffer_records` may wait for a broker that is away before the oldest are dropped.

        `gather_ms` is called repeatedly to return how long responses may be delayed to be batched. With 0, each record
        wakes its readers.
        """
        self._bootstrap = bootstrap
        self._cluster = cluster
        self._client_id = client_id
        self._sender = Sender(bootstrap, cluster, client_id, topics, Buffer(max_records=buffer_records), copies=copies)
        self._gather_ms = gather_ms
        self.skipped = SkippedRecords()
        self._tasks = TaskOwner(on_failure)
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        quiet_client_log()
        self._sending = self._tasks.spawn("bus sender", self._sender.run())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._sender.tried.wait()
        except TimeoutError:
            log.warning("broker does not answer", timeout_s=START_TIMEOUT_S)

    def publish(self, topic: Topic, value: Message) -> None:
        self._sender.put(encode(topic, self._cluster, value))

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """Subscribe as `Bus.subscribe` does. The end of a partition is its end once the reader has connected."""
        subscription = Subscription(
            self._bootstrap,
            topics,
            self._cluster,
            self._client_id,
            from_start=from_start,
            since_unix_ns=since_unix_ns,
            wanted=wanted,
            skipped=self.skipped,
            gather_ms=self._gather_ms,
        )
        return subscription.records(lambda: self._closed)

    def stats(self) -> BusStats:
        return BusStats(
            published=self._sender.published,
            dropped=self._sender.dropped,
            buffered=self._sender.buffered,
            skipped=self.skipped.counts,
        )

    async def close(self) -> None:
        """Send buffered records for a bounded time, disconnect, and end subscriptions. Idempotent."""
        self._closed = True
        self._sender.finish()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=CLOSE_TIMEOUT_S)
        await self._tasks.close()
        if self._sender.buffered:
            log.warning("records were not sent", records=self._sender.buffered)


# The time after which a reader that has not reached a partition's earlier end jumps to its present end.
BEHIND_S: Final = 3.0


class KafkaBackReader:
    """A reader of earlier parts of partitions, with its own connection."""

    def __init__(self, consumer: AIOKafkaConsumer, cluster: str) -> None:
        self._consumer = consumer
        self._cluster = cluster

    async def held(self, topic: Topic, partition: int) -> OffsetSpan:
        """Return the offsets that the broker holds now. Raise one of CONNECTION_ERRORS."""
        part = TopicPartition(topic.name(self._cluster), partition)
        start, end = await self._consumer.beginning_offsets([part]), await self._consumer.end_offsets([part])
        return OffsetSpan(start[part], end[part])

    async def between(self, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        """Yield the records with offsets in [start, end), which must be held. Raise one of CONNECTION_ERRORS."""
        part = TopicPartition(topic.name(self._cluster), partition)
        async for raw in read_span(self._consumer, part, start, end):
            # Unreadable records are counted by their first reader.
            if (record := to_record(topic, raw, None)) is not None:
                yield record


class KafkaLiveBus(KafkaBus):
    """A KafkaBus for readers that prefer current records to complete ones."""

    def __init__(
        self,
        bootstrap: Brokers,
        cluster: str,
        client_id: str,
        *,
        on_failure: OnFailure | None = None,
        buffer_records: int = MAX_BUFFERED_RECORDS,
        copies: Copies | None = None,
        node: str = "this host",
    ) -> None:
        """`node` names this host in alerts."""
        super().__init__(
            bootstrap, cluster, client_id, on_failure=on_failure, buffer_records=buffer_records, copies=copies
        )
        self._needed = (copies or Copies()).needed
        self._copies = CopyLog()
        self._reach = BrokerReach(bootstrap, cluster, f"{client_id}-reach", node)

    async def start(self) -> None:
        await super().start()
        self._tasks.spawn("broker reach", self._reach.run())

    def subscribe_live(
        self,
        topics: Sequence[Topic],
        *,
        jumping: Collection[Topic],
        on_gap: Callable[[Gap], None],
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
        gather_ms: Callable[[], int] | None = None,
    ) -> AsyncIterator[Record]:
        """Subscribe as `LiveBus.subscribe_live` does; a partition jumps once it has been behind for `BEHIND_S`."""
        subscription = Subscription(
            self._bootstrap,
            topics,
            self._cluster,
            self._client_id,
            from_start=False,
            since_unix_ns=since_unix_ns,
            wanted=wanted,
            skipped=self.skipped,
            gather_ms=gather_ms or self._gather_ms,
            jumps=Jumps(jumping, BEHIND_S, on_gap),
            on_copies=lambda found: self._copies.add(time.monotonic_ns(), lost_copies(found, self._needed)),
        )
        return subscription.records(lambda: self._closed)

    def lost_copies(self) -> LostCopies | None:
        return self._copies.worst(time.monotonic_ns())

    def unreachable_brokers(self) -> UnreachableBrokers | None:
        return self._reach.found

    @asynccontextmanager
    async def back_reader(self) -> AsyncIterator[KafkaBackReader]:
        """Open a connected reader. Raise one of CONNECTION_ERRORS while the broker is away."""
        async with open_consumer(self._bootstrap, f"{self._client_id}-back") as consumer:
            yield KafkaBackReader(consumer, self._cluster)
