"""The note committed beside a share's offset: which of its lines are answered, and which with an error. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class ShareNote:
    """Two bits per line, written as text: small enough for a broker to keep beside an offset."""

    lines: int
    answered: int = 0
    """Bit n: line n of the share has its answer."""
    failed: int = 0
    """Bit n: the answer of line n is an error."""

    @classmethod
    def read(cls, text: str, lines: int) -> "ShareNote":
        """Parse a committed note; an empty one means that no line is answered."""
        if not text:
            return cls(lines)
        answered, failed = (int(part, 16) for part in text.split("/"))
        return cls(lines, answered, failed)

    def text(self) -> str:
        """The note as it is committed: both bit sets in hexadecimal."""
        return f"{self.answered:x}/{self.failed:x}"

    def add(self, index: int, *, ok: bool) -> None:
        """Mark line `index` of the share as answered."""
        self.answered |= 1 << index
        if not ok:
            self.failed |= 1 << index

    def has(self, index: int) -> bool:
        """Whether line `index` is answered."""
        return bool(self.answered >> index & 1)

    @property
    def whole(self) -> bool:
        """Whether every line is answered."""
        return self.answered == (1 << self.lines) - 1

    @property
    def counts(self) -> tuple[int, int]:
        """Lines completed, lines failed."""
        failed = self.failed.bit_count()
        return self.answered.bit_count() - failed, failed
