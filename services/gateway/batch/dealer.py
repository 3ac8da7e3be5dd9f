"""A job's shares on their way to runners: cut once more where a keeper takes over, dealt from where that has come."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from libs.contracts.errors import FileNotFound
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.filestore.port import FileStore
from services.gateway.batch.jobs import Job
from services.gateway.batch.shares import SHARE_LINES, Cutter, Span


@dataclass(slots=True)
class Dealer:
    """What of a started job has not been dealt yet."""

    job: Job
    spans: list[Span]
    """All of the job."""

    def shares(self, count: int) -> Iterator[pb.Share]:
        """The next ones."""
        job, start = self.job, self.job.dealt_shares
        for span in self.spans[start : start + count]:
            yield pb.Share(
                share_id=f"{job.id}/{span.number}",
                job_id=job.id,
                number=span.number,
                input_file_id=job.input_file_id,
                endpoint=job.created.endpoint,
                first_line=span.first_line,
                lines=span.lines,
                first_byte=span.first_byte,
                bytes=span.bytes,
                repeats=span.repeats,
                expires_unix_ns=job.created.expires_unix_ns,
                first_place=span.first_place,
                tenant=job.created.tenant,
                output_topic=job.created.output_topic,
                error_topic=job.created.error_topic,
            )

    @property
    def left(self) -> int:
        """Shares to be dealt."""
        return len(self.spans) - self.job.dealt_shares

    def dealt(self, count: int) -> pb.Dealt:
        """What is published with them."""
        shares = min(self.job.dealt_shares + count, len(self.spans))
        return pb.Dealt(shares=shares, lines=sum(span.lines for span in self.spans[:shares]))


async def cut(files: FileStore, file_id: str) -> Cutter:
    """A file cut into shares, with repeats marked; raises FileNotFound."""
    cutter = Cutter()
    async for part in files.read(file_id):
        await asyncio.to_thread(cutter.push, part)
    cutter.flush()
    if suspects := cutter.suspects():
        marker = cutter.marker(suspects)
        async for part in files.read(file_id):
            await asyncio.to_thread(marker.push, part)
        marker.flush()
    return cutter


async def spans_of(files: FileStore, job: Job) -> list[Span]:
    """The spans of a job that was started: the same ones again, or, once its file is gone, some for runners to say so
    of each line."""
    assert job.started is not None
    try:
        return (await cut(files, job.input_file_id)).spans
    except FileNotFound:
        first = job.dealt_lines
        dealt = [Span(number, 1, 0, 0) for number in range(job.dealt_shares)]
        rest = [
            Span(job.dealt_shares + number, place + 1, place, 0, lines=min(SHARE_LINES, job.lines - place))
            for number, place in enumerate(range(first, job.lines, SHARE_LINES))
        ]
        return dealt + rest
