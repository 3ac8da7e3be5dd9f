"""The division of a job's file into shares, one window at a time, as they are dealt to runners.

Lines are read one by one, so that memory does not grow with the file.
"""

import asyncio
from bisect import bisect_left
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from libs.contracts.errors import FileNotFound, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.filestore.port import FileStore
from libs.policy.batch import SHARE_LINES
from services.gateway.batch.job import Job

# The size at which a share is complete, including its last line.
SHARE_BYTES = 1024 * 1024


@dataclass(slots=True)
class ShareSpan:
    number: int
    first_line: int
    first_place: int
    first_byte: int
    lines: int = 0
    bytes: int = 0
    file_lines: int = 0
    """The number of lines including blank ones."""
    repeats: list[int] = field(default_factory=list)


class Cutter:
    """A divider of a file into spans as its parts arrive."""

    def __init__(self, first: ShareSpan | None = None, on_line: Callable[[bytes], None] = lambda _: None) -> None:
        """Create a divider. The first span begins at `first`, which defaults to the start of the file.

        `on_line` receives each line that is not blank.
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
        """End the file and complete its last span."""
        for line in self._splitter.flush():
            self._add(line)

    @property
    def lines(self) -> int:
        return sum(span.lines for span in self.spans)

    def _add(self, line: bytes) -> None:
        # A line includes its line break and excludes a byte order mark, which some editors write. A blank line is not
        # part of the job. It belongs to the preceding share, if there is one.
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
    """Return an empty span that begins where `span` ends."""
    return ShareSpan(
        number=span.number + 1,
        first_line=span.first_line + span.file_lines,
        first_place=span.first_place + span.lines,
        first_byte=span.first_byte + span.bytes,
    )


class LineSplitter:
    """A splitter of a file's parts into lines with their line breaks.

    The upload has checked that lines are short enough to be held in memory.
    """

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
        """Yield the last line if it has no line break."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()


# The number of bytes of a file to read at once. It is doubled if they contain no complete share.
WINDOW_BYTES = 1024 * 1024
# The bound on the shares of a deleted file that are created at once.
SHARES_WITHOUT_FILE = 64


class Dealer:
    """The shares of a started job that have not been dealt to runners."""

    def __init__(self, job: Job, files: FileStore, repeats: Sequence[int]) -> None:
        """Create a dealer. `repeats` contains, in order, the indices of lines that repeat an earlier custom_id."""
        self.job = job
        self._files = files
        self._repeats = repeats
        self._ready: list[ShareSpan] = []

    @property
    def left(self) -> int:
        return self.job.lines - self.job.dealt.lines

    async def next(self, count: int) -> list[ShareSpan]:
        """Return up to `count` shares that follow the dealt ones.

        Until the job's `dealt` includes them, the same shares are returned again.
        """
        self._ready = [span for span in self._ready if span.number >= self.job.dealt.shares]
        window_bytes = WINDOW_BYTES
        while len(self._ready) < count and self._next().first_place < self.job.lines:
            found = await self._cut(window_bytes)
            window_bytes *= 1 if found else 2
            self._ready += found
        return self._ready[:count]

    def dealt(self, spans: Sequence[ShareSpan]) -> pb.Dealt:
        end = after(spans[-1])
        return pb.Dealt(
            shares=end.number,
            lines=end.first_place,
            next_byte=end.first_byte,
            next_line=end.first_line,
            gone=not spans[-1].bytes,
        )

    def share(self, span: ShareSpan) -> pb.Share:
        job, end = self.job, span.first_place + span.lines
        repeats = self._repeats[bisect_left(self._repeats, span.first_place) : bisect_left(self._repeats, end)]
        return pb.Share(
            share_id=f"{job.id}/{span.number}",
            job_id=job.id,
            number=span.number,
            input_file_id=job.input_file_id,
            endpoint=job.created.endpoint,
            first_line=span.first_line,
            lines=span.lines,
            first_byte=span.first_byte,
            bytes=span.bytes,
            repeats=[place - span.first_place for place in repeats],
            expires_unix_ns=job.created.expires_unix_ns,
            first_place=span.first_place,
            tenant=job.created.tenant,
            output_topic=job.created.output_topic,
            error_topic=job.created.error_topic,
            models=job.created.models,
        )

    async def _cut(self, window_bytes: int) -> list[ShareSpan]:
        """Return complete shares that follow those in `_ready`."""
        first, read_bytes = self._next(), 0
        if self._gone:
            return self._without_file()
        cutter = Cutter(replace(first))
        try:
            async for part in self._files.read(self.job.input_file_id, first.first_byte, window_bytes):
                read_bytes += len(part)
                await asyncio.to_thread(cutter.push, part)
        except FileNotFound:
            await self._check_end(first.first_byte)
            return self._without_file()
        if read_bytes < window_bytes:
            await self._check_end(first.first_byte + read_bytes)
            cutter.flush()
            return cutter.spans or self._without_file()
        return cutter.spans[:-1]  # the last one may continue

    async def _check_end(self, end_byte: int) -> None:
        """Raise StoreUnavailable if the store reports that the file is longer than this."""
        with suppress(FileNotFound):
            if (await self._files.info(self.job.input_file_id)).bytes > end_byte:
                raise StoreUnavailable("the store does not return an input to its end")

    @property
    def _gone(self) -> bool:
        # Once a share without text was dealt, all later shares must be without text. If the file reappeared, its lines
        # would be shifted.
        return not self._ready[-1].bytes if self._ready else self.job.dealt.gone

    def _next(self) -> ShareSpan:
        """Return an empty span at the start of the first share that is not in `_ready`."""
        dealt = self.job.dealt
        return (
            after(self._ready[-1])
            if self._ready
            else ShareSpan(dealt.shares, dealt.next_line or 1, dealt.lines, dealt.next_byte)
        )

    def _without_file(self) -> list[ShareSpan]:
        """Return shares without text, for a file that is gone or too short. Runners refuse all of their lines."""
        first, lines = self._next(), self.job.lines
        places = range(first.first_place, lines, SHARE_LINES)[:SHARES_WITHOUT_FILE]
        return [
            replace(
                first,
                number=first.number + number,
                first_line=first.first_line + place - first.first_place,
                first_place=place,
                lines=(count := min(SHARE_LINES, lines - place)),
                file_lines=count,
            )
            for number, place in enumerate(places)
        ]
