"""The queue of outgoing records, bounded in records and bytes, which drops the oldest first. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Append a record and return how many others were dropped for it."""
        self._records.append(record)
        self._bytes += len(record.value)
        return self._drop_oldest()

    def take(self, max_records: int) -> list[Outgoing]:
        """Remove and return up to `max_records` of the oldest records."""
        taken = [self._records.popleft() for _ in range(min(max_records, len(self._records)))]
        self._bytes -= sum(len(record.value) for record in taken)
        return taken

    def put_back(self, records: Sequence[Outgoing]) -> int:
        """Return taken records to the front in their order, and return how many were dropped for them."""
        self._records.extendleft(reversed(records))
        self._bytes += sum(len(record.value) for record in records)
        return self._drop_oldest()

    def _drop_oldest(self) -> int:
        dropped = 0
        while len(self._records) > self._max_records or self._bytes > self._max_bytes:
            self._bytes -= len(self._records.popleft().value)
            dropped += 1
        return dropped
