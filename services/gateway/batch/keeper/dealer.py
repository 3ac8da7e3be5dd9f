"""Cuts a job's shares out of its file as they are dealt to runners, one window at a time."""

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

# Bytes of a file read at once; twice as many if they hold no whole share.
WINDOW_BYTES = 1024 * 1024
# Bound on the shares of a deleted file that are made at once.
SHARES_WITHOUT_FILE = 64


class Dealer:
    """The shares of a started job that are still to be dealt."""

    def __init__(self, job: Job, files: FileStore, repeats: Sequence[int]) -> None:
        """`repeats` holds the indices of lines that repeat an earlier custom_id, in order."""
        self.job = job
        self._files = files
        self._repeats = repeats
        self._ready: list[ShareSpan] = []

    @property
    def left(self) -> int:
        """Return the number of lines still to be dealt."""
        return self.job.lines - self.job.dealt.lines

    async def next(self, count: int) -> list[ShareSpan]:
        """Return up to `count` next shares. They count as dealt once the job's `dealt` includes them."""
        self._ready = [span for span in self._ready if span.number >= self.job.dealt.shares]
        window_bytes = WINDOW_BYTES
        while len(self._ready) < count and self._next().first_place < self.job.lines:
            found = await self._cut(window_bytes)
            window_bytes *= 1 if found else 2
            self._ready += found
        return self._ready[:count]

    def dealt(self, spans: Sequence[ShareSpan]) -> pb.Dealt:
        """Return the event that deals these spans."""
        end = after(spans[-1])
        return pb.Dealt(
            shares=end.number,
            lines=end.first_place,
            next_byte=end.first_byte,
            next_line=end.first_line,
            gone=not spans[-1].bytes,
        )

    def share(self, span: ShareSpan) -> pb.Share:
        """Return the share that a runner receives."""
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
        """Cut whole shares after those that are ready."""
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
        """Raise StoreUnavailable if the store reports that the file exists and continues."""
        with suppress(FileNotFound):
            if (await self._files.info(self.job.input_file_id)).bytes > end_byte:
                raise StoreUnavailable("the store does not tell an input to its end")

    @property
    def _gone(self) -> bool:
        # After a share without text the rest must have none either: a file that came back would shift the lines.
        return not self._ready[-1].bytes if self._ready else self.job.dealt.gone

    def _next(self) -> ShareSpan:
        """Return an empty span where the first share begins that is not ready."""
        dealt = self.job.dealt
        return (
            after(self._ready[-1])
            if self._ready
            else ShareSpan(dealt.shares, dealt.next_line or 1, dealt.lines, dealt.next_byte)
        )

    def _without_file(self) -> list[ShareSpan]:
        """Return the next shares of a file that is gone or ends too soon. Runners refuse each line of them."""
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
