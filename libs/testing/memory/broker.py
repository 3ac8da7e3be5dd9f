"""A broker's contents: topics, their partitions, and as many records of each as retention keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

from google.protobuf.message import Message

from libs.bus.clients import MAX_RECORD_BYTES
from libs.bus.codec import to_record
from libs.bus.port import OffsetSpan
from libs.contracts.topics import Topic
from libs.testing.memory.server import MemoryServer, Travel, at_once

RETAINED_RECORDS: Final = 20_000
RETAINED_BYTES: Final = 32 * 1024 * 1024
"""The bounds of each partition. At either one, the oldest quarter is dropped at once, like the oldest segment of a log.
"""


class TooLarge(Exception):
    """The record exceeds what any broker accepts."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A record on its way to the broker. Only foreign clients write a value of None."""

    topic: str
    key: bytes
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    at_unix_ns: int
    """The time by its publisher's clock."""


class BrokerRecord(NamedTuple):
    """A record as the broker stores it; `libs.bus.codec.to_record` reads one."""

    offset: int
    partition: int
    at_unix_ms: int
    """Brokers store whole milliseconds."""
    key: bytes
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]


class Partition:
    """The log of one partition."""

    def __init__(self, number: int, retained_records: int, retained_bytes: int) -> None:
        self._number = number
        self._retained_records = retained_records
        self._retained_bytes = retained_bytes
        self._kept: list[BrokerRecord] = []
        self._bytes = 0
        self.end = 0
        """The offset of the next record."""

    @property
    def span(self) -> OffsetSpan:
        """The offsets [first, end) of the records that are kept."""
        return OffsetSpan(self.end - len(self._kept), self.end)

    def append(self, record: Incoming) -> None:
        """Append a record; at the bound, drop old ones."""
        at_unix_ms = record.at_unix_ns // 1_000_000
        self._kept.append(BrokerRecord(self.end, self._number, at_unix_ms, record.key, record.value, record.headers))
        self.end += 1
        self._bytes += len(record.value or b"")
        while len(self._kept) > self._retained_records or self._bytes > self._retained_bytes:
            dropped = max(len(self._kept) // 4, 1)
            self._bytes -= sum(len(each.value or b"") for each in self._kept[:dropped])
            del self._kept[:dropped]

    def read(self, offset: int, most: int) -> list[BrokerRecord]:
        """Return at most `most` records, from an offset or the first one that is kept."""
        first = max(offset - (self.end - len(self._kept)), 0)
        return self._kept[first : first + most]

    def since(self, unix_ns: int) -> int:
        """Return the offset of the first record published at that time or later; the end if there is none."""
        unix_ms = unix_ns // 1_000_000
        return next((each.offset for each in self._kept if each.at_unix_ms >= unix_ms), self.end)


class MemoryBroker(MemoryServer):
    """The broker that all buses of a test share. A kill loses no record, as logs are on disk."""

    def __init__(
        self,
        *,
        travel: Travel = at_once,
        retained_records: int = RETAINED_RECORDS,
        retained_bytes: int = RETAINED_BYTES,
    ) -> None:
        super().__init__(travel)
        self._retained = (retained_records, retained_bytes)
        self._topics: dict[str, list[Partition]] = {}

    def make(self, partitions: Mapping[str, int]) -> None:
        """Create these topics, or extend them to this number of partitions."""
        for topic, count in partitions.items():
            found = self._topics.setdefault(topic, [])
            found += [Partition(number, *self._retained) for number in range(len(found), count)]

    def partitions(self, topic: str) -> Sequence[Partition]:
        """Return the partitions in order; none if the topic does not exist."""
        return self._topics.get(topic, ())

    def append(self, record: Incoming, partition: int | None = None) -> None:
        """Append a record to a partition of an existing topic, or to its key's. Raise TooLarge."""
        if len(record.key) + len(record.value or b"") > MAX_RECORD_BYTES:
            raise TooLarge(f"a record of more than {MAX_RECORD_BYTES} bytes")
        found = self._topics[record.topic]
        found[crc32(record.key) % len(found) if partition is None else partition].append(record)
        self.news.ring()

    def values(self, topic: Topic, cluster: str, *, since_unix_ns: int = 0) -> list[Message]:
        """Return every message of a topic published since a time, partition by partition.

        Raise LookupError if retention has dropped any of them, so that no test takes a part for the whole.
        """
        found: list[Message] = []
        for partition in self.partitions(topic.name(cluster)):
            if partition.span.start > 0:
                raise LookupError(f"retention has dropped {partition.span.start} records of {topic.stem}")
            records = (
                to_record(topic, kept, None) for kept in partition.read(partition.since(since_unix_ns), partition.end)
            )
            found += [record.value for record in records if record is not None]
        return found
