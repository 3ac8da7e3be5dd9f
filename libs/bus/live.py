"""A bus for readers of the present: a subscription that jumps ahead when it is behind, and a second reader for the
gaps.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition

from libs.bus.clients import open_consumer, read_span
from libs.bus.codec import to_record
from libs.bus.kafka import KafkaBus
from libs.bus.port import Gap, OffsetSpan, Record, Wanted
from libs.bus.subscription import Jumps, Subscription
from libs.contracts.topics import Topic

# A reader jumps to the end of a partition if it takes this long to reach where the partition ended before.
BEHIND_S: Final = 3.0


class KafkaBackReader:
    """A reader of earlier parts of partitions, with a connection of its own."""

    def __init__(self, consumer: AIOKafkaConsumer, cluster: str) -> None:
        self._consumer = consumer
        self._cluster = cluster

    async def held(self, topic: Topic, partition: int) -> OffsetSpan:
        """Return the offsets that the broker holds now. Raises one of CONNECTION_ERRORS."""
        part = TopicPartition(topic.name(self._cluster), partition)
        start, end = await self._consumer.beginning_offsets([part]), await self._consumer.end_offsets([part])
        return OffsetSpan(start[part], end[part])

    async def between(self, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        """Yield the records with offsets in [start, end), which must be held. Raises one of CONNECTION_ERRORS."""
        part = TopicPartition(topic.name(self._cluster), partition)
        async for raw in read_span(self._consumer, part, start, end):
            # Unreadable records are counted by their first reader.
            if (record := to_record(topic, raw, None)) is not None:
                yield record


class KafkaLiveBus(KafkaBus):
    """A KafkaBus for a reader to whom the present matters most."""

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
        )
        return subscription.records(lambda: self._closed)

    @asynccontextmanager
    async def back_reader(self) -> AsyncIterator[KafkaBackReader]:
        """Open a connected reader. Raises one of CONNECTION_ERRORS while the broker is away."""
        async with open_consumer(self._bootstrap, f"{self._client_id}-back") as consumer:
            yield KafkaBackReader(consumer, self._cluster)
