"""The format of records on the broker (protobuf bytes, a text key, a header that names the message) and their queue."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError, Message

from libs.bus.port import Record
from libs.contracts.ranges import fault_of
from libs.contracts.topics import Topic

MAX_BUFFERED_RECORDS = 20_000
MAX_BUFFERED_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record, encoded at the time of publishing."""

    topic: str
    key: bytes
    value: bytes
    schema: bytes
    """The full name of the message in `value`."""


class Buffer:
    """A queue that drops its oldest record rather than refuse a new one."""

    def __init__(self, *, max_records: int = MAX_BUFFERED_RECORDS, max_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: deque[Outgoing] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Outgoing) -> int:
        """Append a record and return the number of others dropped for it."""
        self._records.append(record)
        self._bytes += len(record.value)
        return self._drop_oldest()

    def take(self, max_records: int) -> list[Outgoing]:
        """Remove and return up to `max_records` of the oldest records."""
        taken = [self._records.popleft() for _ in range(min(max_records, len(self._records)))]
        self._bytes -= sum(len(record.value) for record in taken)
        return taken

    def put_back(self, records: Sequence[Outgoing]) -> int:
        """Return taken records to the front in their order, and return the number dropped for them."""
        self._records.extendleft(reversed(records))
        self._bytes += sum(len(record.value) for record in records)
        return self._drop_oldest()

    def _drop_oldest(self) -> int:
        dropped = 0
        while len(self._records) > self._max_records or self._bytes > self._max_bytes:
            self._bytes -= len(self._records.popleft().value)
            dropped += 1
        return dropped


log = structlog.get_logger()

SCHEMA_HEADER = "schema"
UNREADABLE: Final = "unreadable"
"""The reason for skipping a record whose header does not name the topic's message, or which cannot be parsed."""
LOG_EVERY_S: Final = 10.0
"""The interval between log lines about skipped records of one topic."""


class SkippedRecords:
    """Counters of skipped records by topic and reason, logged at a bounded rate.

    A reason is `UNREADABLE`, or the name of a field that is out of range.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._now_s = now_s
        self._logged: dict[str, tuple[float, int]] = {}
        """The time of the last log line and the count by then, by topic."""

    def add(self, topic: Topic, reason: str, partition: int, offset: int) -> None:
        """Count a skipped record, logging if the interval has passed."""
        self.counts[topic.stem, reason] += 1
        now_s, (logged_s, known) = self._now_s(), self._logged.get(topic.stem, (-LOG_EVERY_S, 0))
        if now_s - logged_s < LOG_EVERY_S:
            return
        skipped = sum(count for (stem, _), count in self.counts.items() if stem == topic.stem)
        self._logged[topic.stem] = now_s, skipped
        log.warning(
            "invalid records are skipped: no service of this suite writes such", topic=topic.stem, reason=reason,
            partition=partition, offset=offset, skipped=skipped - known,
        )  # fmt: skip


def encode(topic: Topic, cluster: str, value: Message) -> Outgoing:
    """Encode `value` as a record. Raise TypeError if it is not the topic's message."""
    if not isinstance(value, topic.value):
        raise TypeError(f"topic {topic.stem} takes {topic.value.DESCRIPTOR.full_name}, not {type(value).__name__}")
    return Outgoing(
        topic=topic.name(cluster),
        key=str(getattr(value, topic.key)).encode(),
        value=value.SerializeToString(),
        schema=_schema(topic),
    )


def decode(topic: Topic, value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Message | str:
    """Return the topic's message, or the reason for skipping the record (see `SkippedRecords`)."""
    if value is None:
        return UNREADABLE
    if topic.wraps:
        message = topic.value(**{topic.wraps: value})
    elif (SCHEMA_HEADER, _schema(topic)) in headers:
        try:
            message = topic.value.FromString(value)
        except DecodeError:
            return UNREADABLE
    else:
        return UNREADABLE
    return fault_of(message, len(value)) or message


def to_record(topic: Topic, raw: Any, skipped: SkippedRecords | None) -> Record | None:
    """Convert a record of aiokafka's; return None for one that is skipped, and count it in `skipped`."""
    value = decode(topic, raw.value, raw.headers)
    if isinstance(value, str):
        if skipped is not None:
            skipped.add(topic, value, raw.partition, raw.offset)
        return None
    return Record(topic, (raw.key or b"").decode(errors="replace"), value, raw.partition, raw.offset)


@cache
def _schema(topic: Topic) -> bytes:
    return topic.value.DESCRIPTOR.full_name.encode()
