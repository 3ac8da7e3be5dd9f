"""What the live reader has left out, and in which order it is read afterwards. Pure."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)

MAX_GAPS: Final = 64
"""Sixteen jumps of four partitions. With more the one that lies furthest back is given up."""
CHUNK_NS: Final = 10_000_000_000
"""Read in one go: the newest chunk first, forward within it."""
MARGIN_NS: Final = 3_000_000_000
"""Telemetry before and after a chunk that is read with it, so that steps over its edges and whole seconds are known."""
MARGIN_AT_LEAST_NS: Final = MARGIN_NS * 2 // 3
"""With less the chunk is read again with more, where there is more."""
FIRST_RATE: Final = 100.0
"""Records a second of a partition, before anything of it has been read."""
MIN_CHUNK: Final = 100
MAX_CHUNK: Final = 20_000
"""Records; each margin too has no more. Some tens of MB."""


class Fate(StrEnum):
    """What became of records that were left out."""

    FILLED = "filled"
    FORGOTTEN = "forgotten"
    """The broker no longer holds them."""
    DROPPED = "dropped"
    """Of a gap that was given up for want of room."""


@dataclass(frozen=True, slots=True)
class Stretch(Generic[PartitionT]):
    """Records of a partition that were left out: offsets [start, end)."""

    partition: PartitionT
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GapChunk(Generic[PartitionT]):
    """Offsets to read: [start, end) are to be counted, the margins are only to be known."""

    gap: Stretch[PartitionT]
    start: int
    end: int
    read_from: int
    read_to: int


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """What there was of a chunk: which offsets were read, and until when their records tell."""

    low: int
    high: int
    """[low, high), margins included."""
    begins: bool
    """The broker holds nothing before `low` ..."""
    ends: bool
    """... nor from `high` on."""
    records: int
    first_ns: int
    own_first_ns: int
    """Of those that are to be counted."""
    own_last_ns: int
    last_ns: int


@dataclass(slots=True)
class _Open(Generic[PartitionT]):
    """A gap, as far as it is still to be filled: [gap.start, end)."""

    gap: Stretch[PartitionT]
    end: int
    newest_ns: int
    """About when its newest record was published."""
    due_ns: int
    """From then on there is telemetry after it."""
    rate: float = FIRST_RATE


class Gaps(Generic[PartitionT]):
    """Gaps of all partitions."""

    def __init__(self) -> None:
        self._open: list[_Open[PartitionT]] = []
        self.jumps = 0
        self.fates = Counter(dict.fromkeys(Fate, 0))
        """Records by what became of them."""

    @property
    def records(self) -> int:
        """Records that are still to be read."""
        return sum(each.end - each.gap.start for each in self._open)

    def add(self, gap: Stretch[PartitionT], now_ns: int) -> None:
        """The live reader has jumped over it."""
        self.jumps += 1
        if gap.end <= gap.start:
            return
        self._open.append(_Open(gap, gap.end, now_ns, now_ns + MARGIN_NS))
        if len(self._open) > MAX_GAPS:
            self._close(min(self._open, key=lambda each: each.newest_ns), Fate.DROPPED)

    def next(self, now_ns: int) -> GapChunk[PartitionT] | None:
        """The newest that is to be read; None while there is none, or it is too young."""
        due = [each for each in self._open if each.due_ns <= now_ns]
        if not due:
            return None
        found = max(due, key=lambda each: each.newest_ns)
        records = min(max(round(found.rate * CHUNK_NS / 1e9), MIN_CHUNK), MAX_CHUNK)
        margin = min(max(round(found.rate * MARGIN_NS / 1e9), MIN_CHUNK), MAX_CHUNK)
        start = max(found.gap.start, found.end - records)
        return GapChunk(found.gap, start, found.end, max(start - margin, 0), found.end + margin)

    def suffices(self, chunk: GapChunk[PartitionT], read: ChunkRead) -> bool:
        """Whether a chunk can be counted as it was read. If not, its margins are too short: `next` cuts it anew."""
        rate = read.records * 1e9 / max(read.last_ns - read.first_ns, 1)
        before_ns, after_ns = read.own_first_ns - read.first_ns, read.last_ns - read.own_last_ns
        short = (before_ns < MARGIN_AT_LEAST_NS and not read.begins) or (
            after_ns < MARGIN_AT_LEAST_NS and not read.ends
        )
        margin = max(chunk.start - read.low, read.high - chunk.end, 1)
        if short and margin < MAX_CHUNK:
            # At least twice as many, so that this ends.
            self.seen(chunk.gap, max(rate, 2e9 * margin / MARGIN_NS))
            return False
        self.seen(chunk.gap, rate)
        return True

    def seen(self, gap: Stretch[PartitionT], records_a_second: float) -> None:
        """Records that come in a second: chunks are cut by that."""
        for each in self._of(gap):
            each.rate = records_a_second

    def filled(self, chunk: GapChunk[PartitionT], oldest_ns: int | None) -> None:
        """A chunk has been counted, of which the first record is of that time; None: there was none to be read."""
        for each in self._of(chunk.gap):
            self.fates[Fate.FILLED] += each.end - chunk.start
            each.end = chunk.start
            each.newest_ns = min(each.newest_ns - 1 if oldest_ns is None else oldest_ns, each.newest_ns)
            if each.end <= each.gap.start:
                self._open.remove(each)

    def held_from(self, gap: Stretch[PartitionT], offset: int) -> None:
        """The broker has forgotten what lies before."""
        for each in self._of(gap):
            forgotten = min(offset, each.end) - each.gap.start
            if forgotten > 0:
                self.fates[Fate.FORGOTTEN] += forgotten
                each.gap = replace(each.gap, start=each.gap.start + forgotten)
            if each.end <= each.gap.start:
                self._open.remove(each)

    def _close(self, gap: _Open[PartitionT], fate: Fate) -> None:
        self.fates[fate] += gap.end - gap.gap.start
        self._open.remove(gap)

    def _of(self, gap: Stretch[PartitionT]) -> list[_Open[PartitionT]]:
        """The one it is, whatever part of it has been forgotten since."""
        same = (gap.partition, gap.end)
        return [each for each in self._open if (each.gap.partition, each.gap.end) == same]
