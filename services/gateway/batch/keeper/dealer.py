"""A job's shares on their way to runners, cut out of its file as they are dealt, a window of it at a time."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from libs.contracts.errors import FileNotFound, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.filestore.port import FileStore
from libs.policy.batch import SHARE_LINES
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.lines.shares import Cutter, ShareSpan, after

WINDOW_BYTES = 1024 * 1024
"""Bytes of a file read at once; twice as many where they hold no whole share."""
SHARES_WITHOUT_FILE = 64
"""Shares of a deleted file that are made at once."""


class Dealer:
    """What of a started job has not been dealt yet."""

    def __init__(self, job: Job, files: FileStore, repeats: Sequence[int]) -> None:
        """`repeats`: places of lines whose custom_id an earlier line has, in order."""
        self.job = job
        self._files = files
        self._repeats = repeats
        self._ready: list[ShareSpan] = []
        """Spans that are dealt next."""

    @property
    def left(self) -> int:
        """Lines to be dealt."""
        return self.job.lines - self.job.dealt.lines

    async def next(self, count: int) -> list[ShareSpan]:
        """The next shares, up to `count`; they are dealt once the job's `dealt` says so."""
        self._ready = [span for span in self._ready if span.number >= self.job.dealt.shares]
        window_bytes = WINDOW_BYTES
        while len(self._ready) < count and self._next().first_place < self.job.lines:
            found = await self._cut(window_bytes)
            window_bytes *= 1 if found else 2
            self._ready += found
        return self._ready[:count]

    def dealt(self, spans: Sequence[ShareSpan]) -> pb.Dealt:
        """What is published with these."""
        end = after(spans[-1])
        return pb.Dealt(
            shares=end.number,
            lines=end.first_place,
            next_byte=end.first_byte,
            next_line=end.first_line,
            gone=not spans[-1].bytes,
        )

    def share(self, span: ShareSpan) -> pb.Share:
        """For a runner."""
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
        """Whole shares that follow those which are ready."""
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
        return cutter.spans[:-1]  # the last one may go on

    async def _check_end(self, end_byte: int) -> None:
        """Raises StoreUnavailable where the store itself says that the file is there and goes on."""
        with suppress(FileNotFound):
            if (await self._files.info(self.job.input_file_id)).bytes > end_byte:
                raise StoreUnavailable("the store does not tell an input to its end")

    @property
    def _gone(self) -> bool:
        """Whether the last share had no text: those after it would have others' if the file came back."""
        return not self._ready[-1].bytes if self._ready else self.job.dealt.gone

    def _next(self) -> ShareSpan:
        """An empty one, where the first one begins that is not ready."""
        dealt = self.job.dealt
        return (
            after(self._ready[-1])
            if self._ready
            else ShareSpan(dealt.shares, dealt.next_line or 1, dealt.lines, dealt.next_byte)
        )

    def _without_file(self) -> list[ShareSpan]:
        """The next shares of a file that is gone, or ends too soon: runners refuse each line of them."""
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
