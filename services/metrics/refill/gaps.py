"""What the live reader has left out, and in which order it is read afterwards. Pure."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from libs.bus.port import Gap

MAX_GAPS: Final = 64
"""Sixteen jumps of four partitions. With more the one that lies furthest back is given up."""
CHUNK_NS: Final = 10_000_000_000
"""Read in one go: the newest chunk first, forward within it."""
MARGIN_NS: Final = 3_000_000_000
"""Telemetry before and after a chunk that is read with it, so that steps over its edges and whole seconds are known."""
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
class Chunk:
    """Offsets to read: [start, end) are to be counted, the margins are only to be known."""

    gap: Gap
    start: int
    end: int
    read_from: int
    read_to: int


@dataclass(slots=True)
class _Open:
    """A gap, as far as it is still to be filled: [gap.start, end)."""

    gap: Gap
    end: int
    newest_ns: int
    """About when its newest record was published."""
    due_ns: int
    """From then on there is telemetry after it."""
    rate: float = FIRST_RATE


class Gaps:
    """Of all partitions."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self.jumps = 0
        self.fates = Counter(dict.fromkeys(Fate, 0))
        """Records by what became of them."""

    @property
    def records(self) -> int:
        """That are still to be read."""
        return sum(each.end - each.gap.start for each in self._open)

    def add(self, gap: Gap, now_ns: int) -> None:
        """The live reader has jumped over it."""
        self.jumps += 1
        if gap.end <= gap.start:
            return
        self._open.append(_Open(gap, gap.end, now_ns, now_ns + MARGIN_NS))
        if len(self._open) > MAX_GAPS:
            self._close(min(self._open, key=lambda each: each.newest_ns), Fate.DROPPED)

    def next(self, now_ns: int) -> Chunk | None:
        """The newest that is to be read; None while there is none, or it is too young."""
        due = [each for each in self._open if each.due_ns <= now_ns]
        if not due:
            return None
        found = max(due, key=lambda each: each.newest_ns)
        records = min(max(round(found.rate * CHUNK_NS / 1e9), MIN_CHUNK), MAX_CHUNK)
        margin = min(max(round(found.rate * MARGIN_NS / 1e9), MIN_CHUNK), MAX_CHUNK)
        start = max(found.gap.start, found.end - records)
        return Chunk(found.gap, start, found.end, max(start - margin, 0), found.end + margin)

    def seen(self, gap: Gap, records_a_second: float) -> None:
        """So many come in a second: chunks are cut by that."""
        for each in self._of(gap):
            each.rate = records_a_second

    def filled(self, chunk: Chunk, oldest_ns: int | None) -> None:
        """A chunk has been counted, of which the first record is of that time; None: there was none to be read."""
        for each in self._of(chunk.gap):
            self.fates[Fate.FILLED] += each.end - chunk.start
            each.end = chunk.start
            each.newest_ns = min(each.newest_ns - 1 if oldest_ns is None else oldest_ns, each.newest_ns)
            if each.end <= each.gap.start:
                self._open.remove(each)

    def held_from(self, gap: Gap, offset: int) -> None:
        """The broker has forgotten what lies before."""
        for each in self._of(gap):
            forgotten = min(offset, each.end) - each.gap.start
            if forgotten > 0:
                self.fates[Fate.FORGOTTEN] += forgotten
                each.gap = each.gap._replace(start=each.gap.start + forgotten)
            if each.end <= each.gap.start:
                self._open.remove(each)

    def _close(self, gap: _Open, fate: Fate) -> None:
        self.fates[fate] += gap.end - gap.gap.start
        self._open.remove(gap)

    def _of(self, gap: Gap) -> list[_Open]:
        """The one it is, whatever part of it has been forgotten since."""
        same = (gap.topic, gap.partition, gap.end)
        return [each for each in self._open if (each.gap.topic, each.gap.partition, each.gap.end) == same]
