"""The bus of a service that runs alone: its records reach only the readers in the same process."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final

from google.protobuf.message import Message

from libs.bus.clients import at_once
from libs.bus.port import BackReader, BusStats, Gap, OffsetSpan, Record, Wanted
from libs.contracts.topics import Topic
from libs.policy.copies import LostCopies, UnreachableBrokers

MAX_QUEUED_RECORDS: Final = 20_000
"""The maximum number of records by which one reader may be behind; the oldest are dropped and counted."""


class _Queue:
    def __init__(self, topics: Sequence[Topic]) -> None:
        self.topics = frozenset(each.stem for each in topics)
        self.records: deque[Record] = deque()
        self.wake = asyncio.Event()


class LocalBus:
    """A LiveBus without a broker. Records are not kept: readers get those published after their subscription.

    A published message belongs to its readers, so its publisher must not change it.
    """

    def __init__(self) -> None:
        self._queues: list[_Queue] = []
        self._offsets: dict[str, int] = {}
        self._published = self._dropped = 0
        self._closed = False

    async def start(self) -> None:
        pass

    def publish(self, topic: Topic, value: Message) -> None:
        """Hand a record to every reader of its topic."""
        if not isinstance(value, topic.value):
            raise TypeError(f"topic {topic.stem} takes {topic.value.DESCRIPTOR.full_name}, not {type(value).__name__}")
        offset = self._offsets.get(topic.stem, 0)
        self._offsets[topic.stem] = offset + 1
        self._published += 1
        for queue in self._queues:
            if topic.stem in queue.topics:
                queue.records.append(Record(topic, str(getattr(value, topic.key)), value, 0, offset))
                if len(queue.records) > MAX_QUEUED_RECORDS:
                    queue.records.popleft()
                    self._dropped += 1
                queue.wake.set()

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """Read the records published from now on; earlier ones are not kept."""
        return self._records(self._queue(topics), at_once)

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
        """Read as `subscribe` does, gathering records for `gather_ms`; a reader never jumps."""
        return self._records(self._queue(topics), gather_ms or at_once)

    def lost_copies(self) -> LostCopies | None:
        return None

    def unreachable_brokers(self) -> UnreachableBrokers | None:
        return None

    @asynccontextmanager
    async def back_reader(self) -> AsyncIterator[BackReader]:
        yield _NothingHeld()

    def stats(self) -> BusStats:
        return BusStats(self._published, self._dropped, 0)

    async def close(self) -> None:
        self._closed = True
        for queue in self._queues:
            queue.wake.set()

    def _queue(self, topics: Sequence[Topic]) -> _Queue:
        queue = _Queue(topics)
        self._queues.append(queue)
        return queue

    async def _records(self, queue: _Queue, gather_ms: Callable[[], int]) -> AsyncIterator[Record]:
        try:
            while not self._closed:
                await queue.wake.wait()
                if wait_ms := gather_ms():
                    await asyncio.sleep(wait_ms / 1000)
                queue.wake.clear()
                while queue.records:
                    yield queue.records.popleft()
        finally:
            self._queues.remove(queue)


class _NothingHeld:
    async def held(self, topic: Topic, partition: int) -> OffsetSpan:
        return OffsetSpan(0, 0)

    async def between(self, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        records: tuple[Record, ...] = ()
        for record in records:
            yield record
