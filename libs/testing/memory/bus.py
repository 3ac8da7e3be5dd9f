"""The bus over a broker in memory. As over Kafka, delivery is at least once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress

from google.protobuf.message import Message

from libs.bus.clients import at_once
from libs.bus.codec import MAX_BUFFERED_RECORDS, SCHEMA_HEADER, Buffer, Outgoing, SkippedRecords, encode
from libs.bus.kafka import BEHIND_S, CLOSE_TIMEOUT_S, START_TIMEOUT_S
from libs.bus.port import BusStats, Gap, Record, Wanted
from libs.bus.sender import BACKOFF_FIRST_S, BACKOFF_MAX_S, MAX_BATCH_RECORDS, PAUSE_S
from libs.bus.subscription import Jumps
from libs.contracts.topics import ALL, Topic
from libs.policy.copies import LostCopies, UnreachableBrokers
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock, SystemClock
from libs.runtime.tasks import OnFailure, TaskOwner
from libs.testing.memory.broker import Incoming, MemoryBroker, TooLarge
from libs.testing.memory.reader import CALL_TIMEOUT_S, MemoryBackReader, MemoryReader, SharedBroker
from libs.testing.memory.server import ServerAway


class MemoryBus:
    """A LiveBus of one process."""

    def __init__(
        self,
        broker: MemoryBroker,
        cluster: str,
        *,
        clock: Clock | None = None,
        topics: Sequence[Topic] = ALL,
        on_failure: OnFailure | None = None,
        buffer_records: int = MAX_BUFFERED_RECORDS,
        gather_ms: Callable[[], int] = at_once,
        behind_s: float = BEHIND_S,
    ) -> None:
        """The arguments are those of KafkaBus; `behind_s` is libs.bus.kafka.BEHIND_S there."""
        self._broker = broker
        self._cluster = cluster
        self._clock = clock or SystemClock()
        self._topics = topics
        self._gather_ms = gather_ms
        self._behind_s = behind_s
        self._buffer = Buffer(max_records=buffer_records)
        self._in_flight: Sequence[Outgoing] = ()
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()
        """Set after the first attempt to connect, whether it succeeded or not."""
        self._published = self._dropped = 0
        self._skipped = SkippedRecords()
        self._tasks = TaskOwner(on_failure)
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Connect and create topics. If the broker is away, return and keep trying in the background."""
        self._sending = self._tasks.spawn("bus sender", self._send_forever())
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._tried.wait()

    def publish(self, topic: Topic, value: Message) -> None:
        """Queue a record. At the bound, drop the oldest and count it."""
        self._published += 1
        self._dropped += self._buffer.append(encode(topic, self._cluster, value))
        self._wake.set()

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """Read all or the given partitions, without a group. The end is their end at the time of connecting."""
        return MemoryReader(
            self._connection(), topics, from_start=from_start, since_unix_ns=since_unix_ns, wanted=wanted
        ).records(lambda: self._closed)

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
        """Subscribe, and skip to the end in partitions of `jumping` that stay behind; `on_gap` gets those records."""
        return MemoryReader(
            self._connection(gather_ms),
            topics,
            since_unix_ns=since_unix_ns,
            wanted=wanted,
            jumps=Jumps(jumping, self._behind_s, on_gap),
        ).records(lambda: self._closed)

    def lost_copies(self) -> LostCopies | None:
        return None

    def unreachable_brokers(self) -> UnreachableBrokers | None:
        return None

    @asynccontextmanager
    async def back_reader(self) -> AsyncIterator[MemoryBackReader]:
        """Open a connected reader. Raise ServerAway."""
        await self._broker.call(lambda: None, timeout_s=CALL_TIMEOUT_S)
        yield MemoryBackReader(self._broker, self._cluster)

    def stats(self) -> BusStats:
        buffered = len(self._buffer) + len(self._in_flight)
        return BusStats(self._published, self._dropped, buffered, self._skipped.counts)

    def unsent(self) -> list[Outgoing]:
        """Return the number of records that a kill of this process would lose now."""
        waiting = self._buffer.take(len(self._buffer))
        self._buffer.put_back(waiting)
        return [*self._in_flight, *waiting]

    async def close(self) -> None:
        """Send what is buffered within a bounded time, then disconnect and end subscriptions. Idempotent."""
        self._closed = True
        self._wake.set()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=CLOSE_TIMEOUT_S)
        await self._tasks.close()

    def _connection(self, gather_ms: Callable[[], int] | None = None) -> SharedBroker:
        return SharedBroker(self._broker, self._cluster, self._clock, self._skipped, gather_ms or self._gather_ms)

    # ------------------------------------------------------------ sending

    async def _send_forever(self) -> None:
        """Send until closed, across outages."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        wanted = {topic.name(self._cluster): topic.partitions for topic in self._topics}
        while True:
            try:
                await self._broker.call(lambda: self._broker.make(wanted), timeout_s=CALL_TIMEOUT_S)
                self._tried.set()
                backoff.reset()
                await self._send_queued()
            except ServerAway:
                self._tried.set()
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def _send_queued(self) -> None:
        while self._buffer or not self._closed:
            self._wake.clear()
            while batch := self._buffer.take(MAX_BATCH_RECORDS):
                await self._send(batch)
            if not self._closed:
                await asyncio.sleep(PAUSE_S)
                await self._wake.wait()

    async def _send(self, batch: Sequence[Outgoing]) -> None:
        """Send a batch; one whose confirmation was lost is sent again."""
        self._in_flight = batch
        try:
            self._dropped += await self._broker.call(lambda: self._append(batch), timeout_s=CALL_TIMEOUT_S)
            self._in_flight = ()
        finally:
            unsent, self._in_flight = self._in_flight, ()
            self._dropped += self._buffer.put_back(unsent)

    def _append(self, batch: Sequence[Outgoing]) -> int:
        """Append records, and return how many the broker refused."""
        at_unix_ns, refused = self._clock.now_ns(), 0
        for each in batch:
            headers = ((SCHEMA_HEADER, each.schema),)
            try:
                self._broker.append(Incoming(each.topic, each.key, each.value, headers, at_unix_ns))
            except TooLarge:
                refused += 1
        return refused
