"""The note committed beside a share's offset: which of its lines are answered, and which with an error. Pure."""

import re
from dataclasses import dataclass, field
from typing import Final

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Progress

_NOTE: Final = re.compile(r"([0-9a-f]{1,2048})/([0-9a-f]{1,2047})")


@dataclass(slots=True)
class ShareNote:
    """Two bits per line, written as text: small enough for a broker to keep beside an offset."""

    lines: int
    answered: int = 0
    """A bit set in which bit n says that line n of the share has its answer."""
    failed: int = 0
    """A bit set in which bit n says that line n was answered with an error."""

    @classmethod
    def read(cls, text: str, lines: int) -> "ShareNote":
        """Parse a committed note; an empty one, or one that is no note, means that no line is answered."""
        found = _NOTE.fullmatch(text)
        if not found:
            return cls(lines)
        answered = int(found[1], 16) & (1 << lines) - 1
        return cls(lines, answered, int(found[2], 16) & answered)

    def text(self) -> str:
        """The note as it is committed: both bit sets in hexadecimal."""
        return f"{self.answered:x}/{self.failed:x}"

    def add(self, index: int, *, ok: bool) -> None:
        """Mark line `index` of the share as answered."""
        self.answered |= 1 << index
        if not ok:
            self.failed |= 1 << index

    def has(self, index: int) -> bool:
        return bool(self.answered >> index & 1)

    @property
    def whole(self) -> bool:
        return self.answered == (1 << self.lines) - 1

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of lines answered without and with an error."""
        failed = self.failed.bit_count()
        return self.answered.bit_count() - failed, failed


@dataclass(slots=True)
class ShareCounts:
    """The progress of each share. Counts only grow, so an older report that arrives late or twice has no effect."""

    completed: int = 0
    failed: int = 0
    open: dict[int, Progress] = field(default_factory=dict)
    """The latest progress of each share that still lacks answers."""
    whole_below: int = 0
    """The number below which every share has all its answers."""
    whole_above: dict[int, Progress] = field(default_factory=dict)
    """The final progress of complete shares from `whole_below` on."""

    def whole(self, share: int) -> bool:
        return share < self.whole_below or share in self.whole_above

    def add(self, progress: Progress) -> bool:
        """Add new progress; return False if it is older than the progress already counted."""
        share = progress.share
        if self.whole(share):
            return False
        known = self.open.get(share, Progress())
        if progress.completed + progress.failed <= known.completed + known.failed:
            return False
        self.completed += progress.completed - known.completed
        self.failed += progress.failed - known.failed
        if not progress.whole:
            self.open[share] = progress
            return True
        self.open.pop(share, None)
        self.whole_above[share] = progress
        while self.whole_below in self.whole_above:
            del self.whole_above[self.whole_below]
            self.whole_below += 1
        return True

    def merged(self, other: "ShareCounts") -> "ShareCounts":
        """Return the union of both counts, which may modify and reuse either."""
        most, least = (other, self) if other.whole_below > self.whole_below else (self, other)
        for progress in (*least.whole_above.values(), *least.open.values()):
            most.add(progress)
        return most
