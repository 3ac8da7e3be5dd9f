"""The bus port: what services ask of Kafka. One contract suite runs over the embedded broker and a real one."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from google.protobuf.message import Message

from libs.contracts.topics import Topic

TAKEN_OVER_NS: Final = 10_000_000_000
"""A partition that comes to be wanted is read from so long ago: whoever had it may have been gone for some seconds."""


class Record(NamedTuple):
    """One record read."""

    topic: Topic
    key: str
    value: Message
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class BusStats:
    """Counters since start."""

    published: int
    dropped: int
    """Oldest records given up because the buffer was full while the broker was away."""
    buffered: int
    skipped: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Records that nobody of the suite writes, by topic and reason: see `libs.bus.codec.SkippedRecords`."""


class Gap(NamedTuple):
    """Records of a partition that a subscription has left out: offsets [start, end)."""

    topic: Topic
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """Offsets of one partition that the broker holds, [start, end)."""

    start: int
    end: int


Wanted = Callable[[Topic, int], bool]
"""Whether a partition of a topic is to be read now; asked about once a second."""


class Bus(Protocol):
    """Publish and subscribe. Publishing never blocks and never raises for a broker that is away."""

    async def start(self) -> None:
        """Connect and make topics. Returns also when the broker is away: it is then tried in the background."""
        ...

    def publish(self, topic: Topic, value: Message) -> None:
        """Queue a record; at the bound the oldest is dropped and counted."""
        ...

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """All partitions, without a group, from the end unless `from_start`; goes on through broker outages.

        `since_unix_ns`: from the first record that was published then or later, by its publisher's clock. Earlier ones
        may come too: a broker that cannot look times up is read from its start. `wanted`: of the partitions only those;
        one that comes to be wanted later is read from ten seconds before that on.
        """
        ...

    def stats(self) -> BusStats:
        """Counters for metrics."""
        ...

    async def close(self) -> None:
        """Send what is buffered, for a bounded time, and disconnect. Idempotent."""
        ...


class BackReader(Protocol):
    """Reads parts of partitions that lie behind. A broker that is away is one of libs.bus.clients.CONNECTION_ERRORS."""

    async def held(self, topic: Topic, partition: int) -> OffsetSpan:
        """What the broker holds now."""
        ...

    def between(self, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        """Records from `start` to before `end`, both of what is held; unreadable ones are left out."""
        ...


class LiveBus(Bus, Protocol):
    """A bus for who shows the present."""

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
        """`subscribe`; in topics of `jumping` a partition that stays behind goes on at its end, and `on_gap` is called
        with what it left out. `gather_ms`: how much later records may come for fewer and larger answers, asked again
        and again."""
        ...

    def back_reader(self) -> AbstractAsyncContextManager[BackReader]:
        """For what was left out, over a connection of its own; raises as `BackReader` does."""
        ...
