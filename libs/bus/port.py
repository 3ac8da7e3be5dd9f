"""The bus port: publishing and subscribing over Kafka. One contract suite runs over the embedded broker and a real
one.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from google.protobuf.message import Message
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.topics import Topic
from libs.policy.copies import LostCopies, UnreachableBrokers

TAKEN_OVER_NS: Final = 10_000_000_000
"""The age of the oldest records read from a newly wanted partition, whose former reader may have been gone for some
seconds.
"""


class Record(NamedTuple):
    """A record in the form in which readers receive it."""

    topic: Topic
    key: str
    value: Message
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class BusStats:
    """The counters of a bus since start."""

    published: int
    dropped: int
    """The oldest records, dropped because the buffer was full while the broker was away."""
    buffered: int
    skipped: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Records skipped as foreign or malformed, by topic and reason (see `libs.bus.codec.SkippedRecords`)."""


class Gap(NamedTuple):
    """Records of a partition that a subscription has skipped, with offsets in [start, end)."""

    topic: Topic
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """Offsets of one partition that the broker holds, in [start, end)."""

    start: int
    end: int


Wanted = Callable[[Topic, int], bool]
"""A function that returns whether a partition of a topic must be read now; called about once a second."""


class Bus(Protocol):
    """Publishing and subscribing. Publishing never blocks, and never raises while the broker is away."""

    async def start(self) -> None:
        """Connect and create topics. If the broker is away, return and keep trying in the background."""
        ...

    def publish(self, topic: Topic, value: Message) -> None:
        """Queue a record. If the buffer is full, the oldest record is dropped and counted."""
        ...

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """Read all partitions without a group, from the end unless `from_start`, continuing through outages.

        With `since_unix_ns`, reading begins at the first record published then or later, by its publisher's clock.
        Earlier ones may also arrive, since a broker that cannot look up times is read from its start. `wanted` selects
        partitions; one that becomes wanted later is read from ten seconds before that.
        """
        ...

    def stats(self) -> BusStats: ...

    async def close(self) -> None:
        """Send buffered records for a bounded time, and disconnect. Idempotent."""
        ...


class BackReader(Protocol):
    """A reader of earlier parts of partitions. It raises libs.bus.clients.CONNECTION_ERRORS."""

    async def held(self, topic: Topic, partition: int) -> OffsetSpan:
        """Return the offsets that the broker holds now."""
        ...

    def between(self, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        """Yield the readable records with offsets in [start, end), which must be held."""
        ...


class LiveBus(Bus, Protocol):
    """A bus for readers of the present."""

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
        """Subscribe, but jump to the end of partitions that stay behind in the topics of `jumping`.

        `on_gap` is called with the skipped records. `gather_ms` returns the accepted delay of records for fewer and
        larger responses; it is called repeatedly.
        """
        ...

    def lost_copies(self) -> LostCopies | None:
        """Return the recently missing copies of the subscribed topics; None without an answer."""
        ...

    def unreachable_brokers(self) -> UnreachableBrokers | None:
        """Return the brokers that do not answer this process; None while none answers."""
        ...

    def back_reader(self) -> AbstractAsyncContextManager[BackReader]:
        """Open a reader for skipped records, with its own connection. Raise the errors of `BackReader`."""
        ...


class BusCollector(Collector):
    """A collector that reads `Bus.stats` at each scrape."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def collect(self) -> Iterator[Metric]:
        """Yield the records published, dropped, skipped, and waiting to be sent."""
        stats = self._bus.stats()
        yield CounterMetricFamily(names.BUS_PUBLISHED_TOTAL, "Records given to the bus.", stats.published)
        yield CounterMetricFamily(
            names.BUS_DROPPED_TOTAL, "Records given up because the buffer was full.", stats.dropped
        )
        skipped = CounterMetricFamily(
            names.BUS_SKIPPED_TOTAL,
            "Records skipped as unreadable, or for the field that is out of its range.",
            labels=("topic", "reason"),
        )
        for labels, count in sorted(stats.skipped.items()):
            skipped.add_metric(labels, count)
        yield skipped
        yield GaugeMetricFamily(names.BUS_BUFFERED_RECORDS, "Records that the broker has not taken.", stats.buffered)
