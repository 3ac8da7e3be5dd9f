"""Cuts a file of lines into shares, line by line, in little memory. Pure."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from libs.policy.batch import SHARE_LINES

# A share ends with the line that reaches this size.
SHARE_BYTES = 1024 * 1024


@dataclass(slots=True)
class ShareSpan:
    """The location of a share in its file."""

    number: int
    first_line: int
    first_place: int
    first_byte: int
    lines: int = 0
    bytes: int = 0
    file_lines: int = 0
    """The number of lines, including blank ones."""
    repeats: list[int] = field(default_factory=list)


class Cutter:
    """A cutter that collects the spans of a file as its parts arrive."""

    def __init__(self, first: ShareSpan | None = None, on_line: Callable[[bytes], None] = lambda _: None) -> None:
        """`first` is where the first span begins, by default the file's start. `on_line` receives each line that is
        not blank.
        """
        first = first or ShareSpan(0, 1, 0, 0)
        self.spans: list[ShareSpan] = []
        self._next = first
        self._on_line = on_line
        self._splitter = LineSplitter()

    def push(self, part: bytes) -> None:
        for line in self._splitter.push(part):
            self._add(line)

    def flush(self) -> None:
        """End the file and close its last span."""
        for line in self._splitter.flush():
            self._add(line)

    @property
    def lines(self) -> int:
        return sum(span.lines for span in self.spans)

    def _add(self, line: bytes) -> None:
        # With its end, and without the mark that some editors begin a file with. A blank one is none of the job's, and
        # goes with the share before it, if there is one.
        span = self.spans[-1] if self.spans else None
        if not self._next.first_byte and span is None and line.startswith(BOM_UTF8):
            self._next.first_byte, line = len(BOM_UTF8), line[len(BOM_UTF8) :]
        if not line.strip():
            if span is not None:
                span.bytes += len(line)
                span.file_lines += 1
            else:
                self._next.first_byte += len(line)
                self._next.first_line += 1
            return
        if span is None or span.lines >= SHARE_LINES or span.bytes >= SHARE_BYTES:
            span = self._next if span is None else after(span)
            self.spans.append(span)
        span.lines += 1
        span.bytes += len(line)
        span.file_lines += 1
        self._on_line(line)


def after(span: ShareSpan) -> ShareSpan:
    """Return an empty span at the end of `span`, where the next one begins."""
    return ShareSpan(
        number=span.number + 1,
        first_line=span.first_line + span.file_lines,
        first_place=span.first_place + span.lines,
        first_byte=span.first_byte + span.bytes,
    )


class LineSplitter:
    """A splitter of a file's parts into lines with their ends. The upload has checked that lines are short enough."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def push(self, part: bytes) -> Iterator[bytes]:
        """Yield the lines that end in this part."""
        self._rest += part
        start = 0
        while (end := self._rest.find(b"\n", start)) >= 0:
            yield bytes(self._rest[start : end + 1])
            start = end + 1
        del self._rest[:start]

    def flush(self) -> Iterator[bytes]:
        """Yield the last line if it lacks an end."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()
