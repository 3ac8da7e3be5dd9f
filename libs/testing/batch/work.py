"""A work bus in memory for tests of batch jobs, with one lane and what was committed on it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from libs.bus.port import Record
from libs.bus.work import Handle, Produced
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, Topic
from libs.filestore.local import LocalFiles


class MemoryWork:
    """A WorkBus and its only Lane: records by topic, in one partition each, and the last commit."""

    partition = 0
    note = ""
    replayed = False

    def __init__(self, topic: Topic) -> None:
        """`topic` is the lane's."""
        self._topic = topic
        self._records: dict[str, list[Record]] = {}
        self._news = asyncio.Condition()
        self.next_offset = 0
        self.trimmed: dict[str, list[int]] = {}
        self.end = 0
        """The end of the topic when the last lane began."""

    def values_of(self, topic: Topic) -> list[Message]:
        """Return all values of a topic."""
        return [record.value for record in self._records.get(topic.stem, ())]

    async def send(self, topic: Topic, value: Message) -> None:
        async with self._news:
            records = self._records.setdefault(topic.stem, [])
            records.append(Record(topic, "", value, 0, len(records)))
            self._news.notify_all()

    async def ends(self, topic: Topic) -> list[int]:
        """Return the end of the topic's partition."""
        return [len(self.values_of(topic))]

    async def trim(self, topic: Topic, before: Sequence[int]) -> None:
        """Record the offsets; the values stay."""
        self.trimmed[topic.stem] = list(before)

    async def committed(self, topic: Topic, group: str) -> list[int]:
        """Return the committed offset of the only lane."""
        return [self.next_offset if topic is self._topic else 0]

    async def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        """Yield all records as they arrive."""
        place = since[0] if since else 0
        while True:
            for record in self._records.get(topic.stem, [])[place:]:
                place += 1
                yield record
            if on_replayed is not None:
                on_replayed()
                on_replayed = None
            async with self._news:
                while len(self.values_of(topic)) == place:
                    await self._news.wait()

    async def values(self, name: str) -> AsyncIterator[bytes]:
        """Yield nothing, as there are no topics of clients."""
        none: tuple[bytes, ...] = ()
        for value in none:
            yield value

    async def check_topic(self, name: str, *, param: str) -> None:
        """Accept every topic."""

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        await handle(self)

    async def batches(self) -> AsyncIterator[list[Record]]:
        """Begin a new lane, and yield one record at a time."""
        self.end = len(self.values_of(self._topic))
        self.replayed = self.next_offset >= self.end
        async for record in self.follow(self._topic, [self.next_offset]):
            self.replayed = self.replayed or record.offset + 1 >= self.end
            yield [record]

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        """Publish and commit at once."""
        for item in produced:
            assert isinstance(item, tuple)
            await self.send(*item)
        self.next_offset, self.note = next_offset, note


HOUR_NS = 3_600 * 10**9


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run tasks while the context is open; none may end by itself."""
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def created(job_id: str, **own: Any) -> pb.JobEvent:
    """Build the event of a new job of tenant ann; `own` overrides its fields."""
    now_ns = time.time_ns()
    event = pb.Created(**{"endpoint": "/v1/completions", "expires_unix_ns": now_ns + HOUR_NS, "tenant": "ann", **own})
    return pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=event)


def job_events(work: MemoryWork) -> list[pb.JobEvent]:
    """Return all published events of jobs, in order."""
    return [event for event in work.values_of(BATCH_JOBS) if isinstance(event, pb.JobEvent)]


async def store(tmp_path: Path, *, max_bytes: int = 10**6) -> LocalFiles:
    """Create a store with `file-1`, which has one line."""
    files = LocalFiles(tmp_path / "files", max_bytes=max_bytes)
    async with files.draft("file-1", max_bytes=999) as draft:
        await draft.write(b'{"custom_id": "a"}\n')
        await draft.keep(name="f", purpose="batch")
    return files
