"""Which lines of a job have been written to its outputs, one bit a line. Pure."""


class Places:
    """Of a job of so many lines."""

    def __init__(self, lines: int, before: bytes = b"") -> None:
        """`before`: what `content` has told."""
        self._lines = lines
        self._bits = bytearray(before.ljust((lines + 7) // 8, b"\0"))

    def add(self, place: int) -> bool:
        """Whether it is a line of the job, and was not there before."""
        byte, bit = divmod(place, 8)
        if place >= self._lines or self._bits[byte] >> bit & 1:
            return False
        self._bits[byte] |= 1 << bit
        return True

    @property
    def content(self) -> bytes:
        """Of the file that keeps them."""
        return bytes(self._bits)
