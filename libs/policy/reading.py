"""The reading of telemetry: the shares of its partitions, partitions on which a reader is behind, and skipped gaps."""

from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)

# Instances announce themselves ten times a second; one silent for this long loses its partitions to the others.
ALIVE_NS: Final = 1_500_000_000
# Further instances are ignored, as there are fewer partitions.
MAX_INSTANCES: Final = 64


class Shares:
    """The partitions that each live instance reads, assigned round robin in order of instance names.

    While two instances have not seen each other, both may read a partition. That costs time and changes no figure.
    """

    def __init__(self, own_id: str) -> None:
        self.own_id = own_id
        self._seen_ns: dict[str, int] = {}

    def mark_alive(self, instance_id: str, now_ns: int) -> None:
        if instance_id in self._seen_ns or len(self._seen_ns) < MAX_INSTANCES:
            self._seen_ns[instance_id] = now_ns

    def alive(self, now_ns: int) -> list[str]:
        """Return the sorted names of live instances, including this one."""
        self._seen_ns = {name: at_ns for name, at_ns in self._seen_ns.items() if now_ns - at_ns < ALIVE_NS}
        return sorted({self.own_id, *self._seen_ns})

    def mine(self, partition: int, now_ns: int) -> bool:
        """Return whether this instance reads a partition."""
        alive = self.alive(now_ns)
        return alive[partition % len(alive)] == self.own_id

    def leads(self, now_ns: int) -> bool:
        """Return whether this instance is the first live one, which does the work that only one need do."""
        return self.alive(now_ns)[0] == self.own_id

    def traces(self, *, own: bool, covered_to_ns: int | None, now_ns: int) -> bool:
        """Return whether this instance exports the traces of a worker with telemetry up to `covered_to_ns`.

        If no instance seems to read the worker, all of them export, since duplicate traces are identical.
        """
        return own or covered_to_ns is None or covered_to_ns < now_ns - ALIVE_NS


# Lag is measured by this process's own clock, from the ends that the broker reported some seconds ago. Publishers'
# clocks do not matter, nor does a pause after which the reader catches up by itself.


# A partition is sampled about once a second, and samples older than the bound are dropped.
MAX_SAMPLES: Final = 64


class Behind(Generic[PartitionT]):
    """A bounded history of the ends of partitions."""

    def __init__(self, after_s: float) -> None:
        """Count a reader as behind if it has not reached the partition's end of `after_s` ago."""
        self._after_s = after_s
        # (time, end) pairs, the oldest first: one as old as the bound, and all younger ones.
        self._ends: dict[PartitionT, deque[tuple[float, int]]] = {}

    def note(
        self, now_s: float, positions: Mapping[PartitionT, int], ends: Mapping[PartitionT, int]
    ) -> list[PartitionT]:
        """Return the partitions that are behind; partitions missing from `positions` are forgotten."""
        self._ends = {each: self._ends.get(each) or deque(maxlen=MAX_SAMPLES) for each in positions}
        behind = []
        for partition, position in positions.items():
            samples = self._ends[partition]
            samples.append((now_s, ends[partition]))
            while len(samples) > 1 and samples[1][0] <= now_s - self._after_s:
                samples.popleft()
            at_s, end = samples[0]
            if at_s <= now_s - self._after_s and position < end:
                behind.append(partition)
        return behind

    def forget(self, partition: PartitionT) -> None:
        """Drop the history of a partition, for example after the reader moved."""
        self._ends.pop(partition, None)


# Sixteen jumps of four partitions. Beyond that, the oldest gap is dropped.
MAX_GAPS: Final = 64
# The newest chunk of a gap is read first, forward within it.
CHUNK_NS: Final = 10_000_000_000
# Telemetry around a chunk is read with it, so that steps across its edges and whole seconds are known.
MARGIN_NS: Final = 3_000_000_000
# A chunk with a shorter margin is read again with a longer one if the broker holds more.
MARGIN_AT_LEAST_NS: Final = MARGIN_NS * 2 // 3
FIRST_RATE: Final = 100.0
"""The assumed records per second of a partition that has not been read."""
MIN_CHUNK: Final = 100
MAX_CHUNK: Final = 20_000
"""The maximum number of records of a chunk, and of each margin; some tens of MB."""


class Fate(StrEnum):
    """The outcome of records that the live reader skipped."""

    FILLED = "filled"
    FORGOTTEN = "forgotten"
    """The broker no longer holds the records."""
    DROPPED = "dropped"
    """The gap was dropped because there were too many."""


@dataclass(frozen=True, slots=True)
class Stretch(Generic[PartitionT]):
    """The skipped records of a partition at offsets [start, end)."""

    partition: PartitionT
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GapChunk(Generic[PartitionT]):
    """The offsets to read: [start, end) are counted, and the margins only give context."""

    gap: Stretch[PartitionT]
    start: int
    end: int
    read_from: int
    read_to: int


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """The offsets read for a chunk, and the time span of their records."""

    low: int
    high: int
    """Together with `low` the half-open range of offsets, margins included."""
    begins: bool
    """True if the broker holds nothing before `low`."""
    ends: bool
    """True if the broker holds nothing from `high` on."""
    records: int
    first_ns: int
    own_first_ns: int
    """The first record of the chunk without its margins."""
    own_last_ns: int
    last_ns: int


@dataclass(slots=True)
class _OpenGap(Generic[PartitionT]):
    """The part [gap.start, end) of a gap that is still to be filled."""

    gap: Stretch[PartitionT]
    end: int
    newest_ns: int
    """The approximate publication time of its newest record."""
    due_ns: int
    """The time from which telemetry after the gap exists."""
    rate: float = FIRST_RATE


class Gaps(Generic[PartitionT]):
    """The gaps of all partitions, with counts of their outcomes."""

    def __init__(self) -> None:
        self._open: list[_OpenGap[PartitionT]] = []
        self.jumps = 0
        self.fates = Counter(dict.fromkeys(Fate, 0))

    @property
    def records(self) -> int:
        """The number of records still to be read."""
        return sum(each.end - each.gap.start for each in self._open)

    def add(self, gap: Stretch[PartitionT], now_ns: int) -> None:
        """Record a jump of the live reader over a gap."""
        self.jumps += 1
        if gap.end <= gap.start:
            return
        self._open.append(_OpenGap(gap, gap.end, now_ns, now_ns + MARGIN_NS))
        if len(self._open) > MAX_GAPS:
            self._close(min(self._open, key=lambda each: each.newest_ns), Fate.DROPPED)

    def next(self, now_ns: int) -> GapChunk[PartitionT] | None:
        """Return the newest chunk to read; None if there is none or all are too young."""
        ready = [each for each in self._open if each.due_ns <= now_ns]
        if not ready:
            return None
        found = max(ready, key=lambda each: each.newest_ns)
        records = min(max(round(found.rate * CHUNK_NS / 1e9), MIN_CHUNK), MAX_CHUNK)
        margin = min(max(round(found.rate * MARGIN_NS / 1e9), MIN_CHUNK), MAX_CHUNK)
        start = max(found.gap.start, found.end - records)
        return GapChunk(found.gap, start, found.end, max(start - margin, 0), found.end + margin)

    def suffices(self, chunk: GapChunk[PartitionT], read: ChunkRead) -> bool:
        """Return whether a chunk can be counted as read; if its margins are too short, `next` cuts it anew."""
        rate = read.records * 1e9 / max(read.last_ns - read.first_ns, 1)
        before_ns, after_ns = read.own_first_ns - read.first_ns, read.last_ns - read.own_last_ns
        short = (before_ns < MARGIN_AT_LEAST_NS and not read.begins) or (
            after_ns < MARGIN_AT_LEAST_NS and not read.ends
        )
        margin = max(chunk.start - read.low, read.high - chunk.end, 1)
        if short and margin < MAX_CHUNK:
            # The margin at least doubles, so that the retries end.
            self.seen(chunk.gap, max(rate, 2e9 * margin / MARGIN_NS))
            return False
        self.seen(chunk.gap, rate)
        return True

    def seen(self, gap: Stretch[PartitionT], records_a_second: float) -> None:
        """Record the rate of a gap's records, which determines the size of chunks."""
        for each in self._of(gap):
            each.rate = records_a_second

    def filled(self, chunk: GapChunk[PartitionT], oldest_ns: int | None) -> None:
        """Mark a chunk as counted; `oldest_ns` is the time of its first record, None if it had none."""
        for each in self._of(chunk.gap):
            self.fates[Fate.FILLED] += each.end - chunk.start
            each.end = chunk.start
            each.newest_ns = min(each.newest_ns - 1 if oldest_ns is None else oldest_ns, each.newest_ns)
            if each.end <= each.gap.start:
                self._open.remove(each)

    def held_from(self, gap: Stretch[PartitionT], offset: int) -> None:
        """Count records below `offset` as forgotten by the broker."""
        for each in self._of(gap):
            forgotten = min(offset, each.end) - each.gap.start
            if forgotten > 0:
                self.fates[Fate.FORGOTTEN] += forgotten
                each.gap = replace(each.gap, start=each.gap.start + forgotten)
            if each.end <= each.gap.start:
                self._open.remove(each)

    def _close(self, gap: _OpenGap[PartitionT], fate: Fate) -> None:
        self.fates[fate] += gap.end - gap.gap.start
        self._open.remove(gap)

    def _of(self, gap: Stretch[PartitionT]) -> list[_OpenGap[PartitionT]]:
        """Return the open gap that `gap` refers to, even if part of it has been forgotten since."""
        same = (gap.partition, gap.end)
        return [each for each in self._open if (each.gap.partition, each.gap.end) == same]
