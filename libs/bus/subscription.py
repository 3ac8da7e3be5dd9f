"""The reading half of the bus, which reads every partition of some topics without gaps between successive clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from libs.bus.broker import copies, describe, numbers
from libs.bus.clients import CONNECTION_ERRORS, BrokerAway, Brokers, at_once, gather, open_admin, open_consumer
from libs.bus.codec import SkippedRecords, to_record
from libs.bus.port import TAKEN_OVER_NS, Gap, Record, Wanted
from libs.contracts.topics import Topic
from libs.policy.copies import PartitionCopies
from libs.policy.reading import Behind
from libs.runtime.backoff import Backoff

log = structlog.get_logger()

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
CHECK_S = 1.0
"""The interval of checks for new partitions and for a broker that has gone away."""
REPLAY_CHECK_S = 0.1
"""The interval of checks for the end of a replay, while a caller waits for it."""
CHECK_TIMEOUT_S = 10.0
# The time without existing records after which a client counts as unusable.
STALL_S = 3.0
POLL_MS = 500
MAX_POLL_RECORDS = 500


PartitionT = TypeVar("PartitionT", bound=Hashable)


class Progress(Generic[PartitionT]):
    """A tracker of the time for which each partition has had unread records."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_at_s: dict[PartitionT, float] = {}
        self._positions: Mapping[PartitionT, int] = {}

    def stalled(
        self, now_s: float, positions: Mapping[PartitionT, int], ends: Mapping[PartitionT, int], *, full: bool = False
    ) -> list[PartitionT]:
        """Return the partitions that have been short of their end, at one position, for longer than the bound.

        After a `full` poll there are none, because records of a partition may have arrived and wait for those of
        another.
        """
        for partition, position in positions.items():
            if full or position >= ends[partition] or position != self._positions.get(partition):
                self._moved_at_s[partition] = now_s
        self._positions = positions
        return [partition for partition in positions if now_s - self._moved_at_s[partition] > self._stall_s]


class Turns:
    """The polls of a consumer, in which every partition has its turn, and the partitions that they do not advance."""

    def __init__(self, consumer: AIOKafkaConsumer, now_s: Callable[[], float]) -> None:
        self._consumer = consumer
        self._progress: Progress[TopicPartition] = Progress(STALL_S)
        self._now_s = now_s
        self._polled_at_s = now_s()
        self._served: set[TopicPartition] = set()
        self._full = False
        """True if the last poll returned as many records as one may."""
        self._stall_clock_s = 0.0
        """The time for which polls have had the chance to return a record.

        A poll adds at most its own timeout. The time of a slow reader, or of a stopped process, is no sign of a lost
        broker.
        """

    async def poll(self, assigned: Collection[TopicPartition]) -> Mapping[TopicPartition, list[Any]]:
        """Return the next records, at most MAX_POLL_RECORDS."""
        found: Mapping[TopicPartition, list[Any]] = {}
        # aiokafka empties one partition after another, so a backlog of one would delay the others.
        if self._served and (waiting := [each for each in assigned if each not in self._served]):
            found = await self._consumer.getmany(*waiting, timeout_ms=0, max_records=MAX_POLL_RECORDS)
        if not found:
            self._served.clear()
            found = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=MAX_POLL_RECORDS)
        self._full = sum(map(len, found.values())) >= MAX_POLL_RECORDS
        self._served = {*self._served, *found} if self._full else set()
        now_s = self._now_s()
        self._stall_clock_s += min(now_s - self._polled_at_s, POLL_MS / 1000)
        self._polled_at_s = now_s
        return found

    def stalled(
        self, positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> list[TopicPartition]:
        """Return the partitions whose next record has not arrived for `STALL_S` of polling."""
        return self._progress.stalled(self._stall_clock_s, positions, ends, full=self._full)


@dataclass(frozen=True, slots=True)
class Jumps:
    """The handling of partitions on which a subscription is behind."""

    topics: Collection[Topic]
    """The topics in which the subscription jumps to the end."""
    after_s: float
    """The delay after which `Behind` reports a partition."""
    on_gap: Callable[[Gap], None]
    """The callback for skipped records, called before any record that follows."""


class Subscription:
    """A reader of topics without a group. It stores the positions, which last as long as the object."""

    def __init__(
        self,
        bootstrap: Brokers,
        topics: Sequence[Topic],
        cluster: str,
        client_id: str,
        *,
        from_start: bool,
        skipped: SkippedRecords,
        since: Sequence[int] = (),
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
        gather_ms: Callable[[], int] = at_once,
        on_replayed: Callable[[], None] | None = None,
        jumps: Jumps | None = None,
        on_copies: Callable[[Iterable[PartitionCopies]], None] | None = None,
    ) -> None:
        """- `since`: the first offsets, by partition.
        - `on_replayed`: called once all records that existed at the beginning have been yielded.
        - `jumps`: None reads everything.
        - `on_copies`: called at each check with the copies of each partition.
        """
        self._bootstrap = bootstrap
        self._topics = {topic.name(cluster): topic for topic in topics}
        self._cluster = cluster
        self._client_id = client_id
        self._from_start = from_start
        self._skipped = skipped
        self._since = since
        self._since_unix_ns = since_unix_ns
        self._wanted = wanted
        self._unwanted: set[TopicPartition] = set()
        """Partitions that exist but must not be read at present."""
        self._gather_ms = gather_ms
        self._on_replayed = on_replayed
        self._jumps = jumps
        self._on_copies = on_copies
        self._behind: Behind[TopicPartition] = Behind(jumps.after_s if jumps else 0.0)
        self._replay_ends: Mapping[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int] = {}

    async def records(self, closed: Callable[[], bool]) -> AsyncGenerator[Record, None]:
        """Yield records, in order within each partition, until `closed()`. Continue through outages."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        now_s = asyncio.get_running_loop().time
        while not closed():
            started_s = now_s()
            try:
                async with (
                    open_admin(self._bootstrap, self._client_id) as admin,
                    open_consumer(self._bootstrap, self._client_id) as consumer,
                    aclosing(self._read(admin, consumer, closed)) as records,
                ):
                    async for record in records:
                        yield record
            except CONNECTION_ERRORS as error:
                if now_s() - started_s > BACKOFF_MAX_S:
                    backoff.reset()
                wait_s = backoff.next_s()
                if backoff.failures == 1:
                    log.warning("broker is away, reading waits", error=repr(error))
                await asyncio.sleep(wait_s)

    async def _read(
        self, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, closed: Callable[[], bool]
    ) -> AsyncGenerator[Record, None]:
        """Yield records over one connection. Raise one of CONNECTION_ERRORS when it becomes unusable."""
        now_s = asyncio.get_running_loop().time
        check_at_s = now_s()
        assigned: set[TopicPartition] = set()
        turns = Turns(consumer, now_s)
        while not closed():
            if now_s() >= check_at_s:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    assigned = await self._check(admin, consumer, assigned, turns)
                check_at_s = now_s() + (CHECK_S if self._on_replayed is None else REPLAY_CHECK_S)
            gather(consumer, self._gather_ms())
            if not assigned:
                await asyncio.sleep(CHECK_S)
                continue
            for partition, batch in (await turns.poll(assigned)).items():
                topic = self._topics[partition.topic]
                for raw in batch:
                    self._positions[partition] = raw.offset + 1
                    if (record := to_record(topic, raw, self._skipped)) is not None:
                        yield record

    async def _check(
        self,
        admin: AIOKafkaAdminClient,
        consumer: AIOKafkaConsumer,
        assigned: set[TopicPartition],
        turns: Turns,
    ) -> set[TopicPartition]:
        """Start reading new partitions. Raise one of CONNECTION_ERRORS if the clients cannot continue."""
        found = await self._partitions(admin)
        if found != assigned:
            await self._assign(consumer, found)
            if self._on_replayed is not None:
                self._replay_ends = await consumer.end_offsets(found)
        elif found:
            # A fetch on a closing connection can end aiokafka's fetching for good without any error.
            ends = await consumer.end_offsets(found)
            positions = {partition: await consumer.position(partition) for partition in found}
            if stalled := turns.stalled(positions, ends):
                raise BrokerAway(f"{len(stalled)} partitions have records that do not arrive")
            self._look_at_replay(positions)
            if self._jumps is not None:
                self._jump(self._jumps, consumer, positions, ends)
        return found

    def _jump(
        self,
        jumps: Jumps,
        consumer: AIOKafkaConsumer,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
    ) -> None:
        """Jump to the end of partitions that are behind. Everything fetched before `positions` has been yielded."""
        looked_at = {each: at for each, at in positions.items() if self._topics[each.topic] in jumps.topics}
        for partition in self._behind.note(asyncio.get_running_loop().time(), looked_at, ends):
            start, end = positions[partition], ends[partition]
            consumer.seek(partition, end)
            self._positions[partition] = end
            self._behind.forget(partition)
            jumps.on_gap(Gap(self._topics[partition.topic], partition.partition, start, end))

    def _look_at_replay(self, positions: Mapping[TopicPartition, int]) -> None:
        ends = self._replay_ends
        if self._on_replayed is not None and all(position >= ends.get(each, 0) for each, position in positions.items()):
            self._on_replayed()
            self._on_replayed = None

    async def _partitions(self, admin: AIOKafkaAdminClient) -> set[TopicPartition]:
        described = await describe(admin, list(self._topics.values()), self._cluster)
        if self._on_copies is not None:
            self._on_copies(copies(described))
        there = {TopicPartition(name, number) for name, found in numbers(described).items() for number in found}
        if self._wanted is None:
            return there
        unwanted = {each for each in there if not self._wanted(self._topics[each.topic], each.partition)}
        self._unwanted |= unwanted
        return there - unwanted

    async def _assign(self, consumer: AIOKafkaConsumer, found: set[TopicPartition]) -> None:
        """Read exactly these partitions, continuing known ones at their positions."""
        self._behind.note(0.0, {}, {})  # forget the state of the previous assignment
        taken_over = sorted(found & self._unwanted)
        new = sorted(found - self._positions.keys() - self._unwanted)
        if taken_over:
            since_unix_ns = time.time_ns() - TAKEN_OVER_NS
            self._positions |= await self._offsets_since(consumer, taken_over, since_unix_ns)
        if new:
            offsets = await self._first_offsets(consumer, new)
            for partition, offset in offsets.items():
                known = partition.partition < len(self._since)
                self._positions[partition] = max(offset, self._since[partition.partition]) if known else offset
        self._unwanted -= found  # only after the broker has answered, so that a retry takes over the same ones
        self._from_start = True  # partitions that appear later are younger than the subscription
        self._positions = {partition: self._positions[partition] for partition in found}
        consumer.assign(sorted(found))
        for partition, offset in self._positions.items():
            consumer.seek(partition, offset)

    async def _first_offsets(
        self, consumer: AIOKafkaConsumer, new: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        if self._from_start:
            beginning: Mapping[TopicPartition, int] = await consumer.beginning_offsets(new)
            return beginning
        if self._since_unix_ns is not None:
            return await self._offsets_since(consumer, new, self._since_unix_ns)
        ends: Mapping[TopicPartition, int] = await consumer.end_offsets(new)
        return ends

    async def _offsets_since(
        self, consumer: AIOKafkaConsumer, new: Sequence[TopicPartition], since_unix_ns: int
    ) -> Mapping[TopicPartition, int]:
        """Return the offsets of the first records published then or later."""
        ends: Mapping[TopicPartition, int] = await consumer.end_offsets(new)
        found = await consumer.offsets_for_times(dict.fromkeys(new, since_unix_ns // 1_000_000))
        return {partition: at.offset if (at := found.get(partition)) else ends[partition] for partition in new}
