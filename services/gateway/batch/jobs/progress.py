"""The note committed beside a share's offset: which of its lines are answered, and which with an error. Pure."""

import re
from dataclasses import dataclass
from typing import Final

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
