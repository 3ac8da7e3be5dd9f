"""Readers of a broker in memory: a subscription, and a reader of the records that it skipped."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from libs.bus.clients import REQUEST_TIMEOUT_MS
from libs.bus.codec import SkippedRecords, to_record
from libs.bus.port import TAKEN_OVER_NS, Gap, OffsetSpan, Record, Wanted
from libs.bus.subscription import BACKOFF_FIRST_S, BACKOFF_MAX_S, CHECK_S, MAX_POLL_RECORDS, Jumps
from libs.contracts.topics import Topic
from libs.policy.reading import Behind
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from libs.testing.memory.broker import BrokerRecord, MemoryBroker, Partition
from libs.testing.memory.server import ServerAway

T = TypeVar("T")
CALL_TIMEOUT_S = REQUEST_TIMEOUT_MS / 1000


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: Topic
    number: int


@dataclass(frozen=True, slots=True)
class SharedBroker:
    """The connection state that all readers of one bus share."""

    broker: MemoryBroker
    cluster: str
    clock: Clock
    skipped: SkippedRecords
    gather_ms: Callable[[], int]


class MemoryReader:
    """A subscription that adopts new partitions and survives outages, as libs.bus.subscription does."""

    def __init__(
        self,
        connection: SharedBroker,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
        jumps: Jumps | None = None,
    ) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._topics = topics
        self._from_start = from_start
        self._since_unix_ns = since_unix_ns
        self._wanted = wanted
        self._jumps = jumps
        self._behind: Behind[TopicPartition] = Behind(jumps.after_s if jumps else 0.0)
        self._unwanted: set[TopicPartition] = set()
        """Partitions that exist but are paused."""
        self._positions: dict[TopicPartition, int] = {}

    async def records(self, closed: Callable[[], bool]) -> AsyncGenerator[Record, None]:
        """Yield records in the order of their partitions until `closed()`, across outages."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        check_at_s = 0.0
        while not closed():
            try:
                if _now_s() >= check_at_s:
                    await self._check()
                    check_at_s = _now_s() + CHECK_S
                seen = self._broker.news.rung
                fetched = await self._ask(self._fetch)
                backoff.reset()
            except ServerAway:
                check_at_s = 0.0
                await asyncio.sleep(backoff.next_s())
                continue
            for part, kept in fetched:
                self._positions[part] = kept.offset + 1
                if (record := to_record(part.topic, kept, self._connection.skipped)) is not None:
                    yield record
            if not fetched and await self._broker.news.past(seen, check_at_s - _now_s()):
                await asyncio.sleep(self._connection.gather_ms() / 1000)

    async def _check(self) -> None:
        """Adopt new partitions, or skip ahead if this reader is behind."""
        there = await self._ask(lambda: dict(self._there()))
        found = set(there)
        if self._wanted is not None:
            unwanted = {part for part in found if not self._wanted(part.topic, part.number)}
            self._unwanted |= unwanted
            found -= unwanted
        if found != self._positions.keys():
            self._take_up(found, there)
        elif self._jumps is not None:
            self._jump(self._jumps, there)

    def _there(self) -> list[tuple[TopicPartition, Partition]]:
        return [
            (TopicPartition(topic, number), partition)
            for topic in self._topics
            for number, partition in enumerate(self._broker.partitions(topic.name(self._connection.cluster)))
        ]

    def _take_up(self, found: set[TopicPartition], there: Mapping[TopicPartition, Partition]) -> None:
        """Read exactly these partitions, known ones from their present offset."""
        self._behind.note(0.0, {}, {})  # notes about other partitions are void
        positions: dict[TopicPartition, int] = {}
        for part, partition in there.items():
            if part not in found:
                continue
            if part in self._unwanted:
                positions[part] = partition.since(self._connection.clock.now_ns() - TAKEN_OVER_NS)
            else:
                known = self._positions.get(part)
                positions[part] = self._first(partition) if known is None else known
        self._positions = positions
        self._unwanted -= found
        self._from_start = True  # partitions that appear later are younger than the subscription

    def _first(self, partition: Partition) -> int:
        if self._from_start:
            return partition.span.start
        return partition.end if self._since_unix_ns is None else partition.since(self._since_unix_ns)

    def _jump(self, jumps: Jumps, there: Mapping[TopicPartition, Partition]) -> None:
        looked_at = {part: at for part, at in self._positions.items() if part.topic in jumps.topics}
        ends = {part: there[part].end for part in looked_at}
        for part in self._behind.note(_now_s(), looked_at, ends):
            start, self._positions[part] = looked_at[part], ends[part]
            self._behind.forget(part)
            jumps.on_gap(Gap(part.topic, part.number, start, ends[part]))

    def _fetch(self) -> list[tuple[TopicPartition, BrokerRecord]]:
        """Return the next records, at most MAX_POLL_RECORDS."""
        most = MAX_POLL_RECORDS // max(len(self._positions), 1) + 1
        parts = dict(self._there())
        return [(part, kept) for part, at in self._positions.items() for kept in parts[part].read(at, most)]

    async def _ask(self, act: Callable[[], T]) -> T:
        return await self._broker.call(act, timeout_s=CALL_TIMEOUT_S)


class MemoryBackReader:
    """A BackReader over a broker in memory."""

    def __init__(self, broker: MemoryBroker, cluster: str) -> None:
        self._broker = broker
        self._cluster = cluster

    async def held(self, topic: Topic, partition: int) -> OffsetSpan:
        """Return the offsets that the broker holds now. Raise ServerAway."""
        return await self._ask(lambda: self._partition(topic, partition).span)

    async def between(self, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        """Yield the records with offsets in [start, end), which must be held. Raise ServerAway."""
        while start < end:
            most = min(end - start, MAX_POLL_RECORDS)
            batch = await self._ask(lambda: self._partition(topic, partition).read(start, most))  # noqa: B023
            for kept in batch:
                if kept.offset < end and (record := to_record(topic, kept, None)) is not None:
                    yield record
            start = batch[-1].offset + 1 if batch else end

    def _partition(self, topic: Topic, number: int) -> Partition:
        return self._broker.partitions(topic.name(self._cluster))[number]

    def _ask(self, act: Callable[[], T]) -> Awaitable[T]:
        return self._broker.call(act, timeout_s=CALL_TIMEOUT_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
