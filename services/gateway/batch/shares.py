"""Cutting a file of lines into shares, line by line, in little memory. Pure.

A custom_id that comes again is found by its hash; as hashes of different ids may meet, a second pass over the file
looks at those that did.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

SHARE_LINES = 256
"""Lines of a share: few enough that the answered ones of it fit into the note of an offset."""
SHARE_BYTES = 1024 * 1024
"""A share ends with the line that reaches this."""


class _Named(msgspec.Struct):
    """As much of a line as tells it from others."""

    custom_id: str | None = None


_decoder = msgspec.json.Decoder(_Named)


@dataclass(slots=True)
class Span:
    """Where a share is in its file."""

    number: int
    first_line: int
    first_place: int
    first_byte: int
    lines: int = 0
    bytes: int = 0
    repeats: list[int] = field(default_factory=list)


def custom_id_of(line: bytes) -> str | None:
    """The line's custom_id; None where there is none, or the line is no JSON object."""
    try:
        return _decoder.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Cutter:
    """First pass: spans, the number of lines, and hashes of their custom_ids (8 bytes a line)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.lines = 0
        self._read_lines = 0
        self._read_bytes = 0
        self._hashes = array("Q")
        self._splitter = LineSplitter()

    def push(self, part: bytes) -> None:
        """The next part of the file."""
        for line in self._splitter.push(part):
            self._add(line)

    def flush(self) -> None:
        """There is no more."""
        for line in self._splitter.flush():
            self._add(line)

    def _add(self, line: bytes) -> None:
        # With its end. A blank one is none of the job's.
        first_byte, self._read_bytes = self._read_bytes, self._read_bytes + len(line)
        self._read_lines += 1
        if not line.strip():
            if self.spans and self.spans[-1].first_byte + self.spans[-1].bytes == first_byte:
                self.spans[-1].bytes += len(line)
            return
        span = self.spans[-1] if self.spans else None
        if span is None or span.lines >= SHARE_LINES or span.bytes >= SHARE_BYTES:
            span = Span(len(self.spans), self._read_lines, self.lines, first_byte)
            self.spans.append(span)
        span.lines += 1
        span.bytes = self._read_bytes - span.first_byte
        self.lines += 1
        custom_id = custom_id_of(line)
        # A line without one is unlike every other.
        text = f"{self.lines}\n" if custom_id is None else custom_id
        self._hashes.append(xxhash.xxh3_64_intdigest(text.encode()))

    def suspects(self) -> frozenset[int]:
        """Hashes that several lines have."""
        values = np.frombuffer(self._hashes, dtype=np.uint64).copy()
        values.sort()
        return frozenset(values[1:][values[1:] == values[:-1]].tolist())

    def marker(self, suspects: frozenset[int]) -> "RepeatMarker":
        """What the second pass is made with."""
        return RepeatMarker(self.spans, self._hashes, suspects)


class RepeatMarker:
    """Second pass, needed only where there are suspects: notes every line whose custom_id an earlier one has."""

    def __init__(self, spans: Sequence[Span], hashes: Sequence[int], suspects: frozenset[int]) -> None:
        self._spans = spans
        self._hashes = hashes
        self._suspects = suspects
        self._seen: set[str] = set()
        self._place = 0
        self._span = 0
        self._splitter = LineSplitter()

    def push(self, part: bytes) -> None:
        """The next part of the file."""
        for line in self._splitter.push(part):
            self._add(line)

    def flush(self) -> None:
        """There is no more."""
        for line in self._splitter.flush():
            self._add(line)

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        span = self._spans[self._span]
        if self._place - span.first_place >= span.lines:
            self._span += 1
            span = self._spans[self._span]
        if self._hashes[self._place] in self._suspects and (custom_id := custom_id_of(line)) is not None:
            if custom_id in self._seen:
                span.repeats.append(self._place - span.first_place)
            self._seen.add(custom_id)
        self._place += 1


class LineSplitter:
    """Parts of a file to its lines, each with its end. That lines are short enough was seen to when they came in."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def push(self, part: bytes) -> Iterator[bytes]:
        """Lines that end in this part."""
        self._rest += part
        start = 0
        while (end := self._rest.find(b"\n", start)) >= 0:
            yield bytes(self._rest[start : end + 1])
            start = end + 1
        del self._rest[:start]

    def flush(self) -> Iterator[bytes]:
        """The last line, where its end is missing."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()
