"""Write a job's two output files from the results topic: each line once, in the order in which answers came.

Answers are stored in part files of PART_BYTES. Beside them a file of places says which lines they answer, and an event
names the parts and the offsets they reach: a keeper that takes over goes on from there.
"""

from collections.abc import Awaitable, Callable

import structlog

from libs.bus.port import Record
from libs.bus.work import WorkBus
from libs.contracts.errors import FileNotFound, FulcrumError, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_RESULTS
from libs.filestore.port import FileStore
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.keeper.output import Output
from services.gateway.batch.lines.parts import Parts

log = structlog.get_logger()

PART_BYTES = 16 * 1024 * 1024
"""Bytes of a part of both files together; a keeper that takes over reads and writes at most this much again."""

Save = Callable[[pb.Assembled], Awaitable[None]]
"""Publishes an event; raises unless it is known to be on the broker."""


class Places:
    """The lines of a job that are written to its outputs, one bit per line. `before`: an earlier `content`."""

    def __init__(self, lines: int, before: bytes = b"") -> None:
        self._lines = lines
        self._bits = bytearray(before.ljust((lines + 7) // 8, b"\0"))

    def add(self, place: int) -> bool:
        """Add a line; returns False where the job has no such line, or it was there before."""
        byte, bit = divmod(place, 8)
        if place >= self._lines or self._bits[byte] >> bit & 1:
            return False
        self._bits[byte] |= 1 << bit
        return True

    @property
    def content(self) -> bytes:
        """The bytes of the file of places."""
        return bytes(self._bits)


class Assembly:
    """One attempt to assemble one job. Memory: one bit per line and two write buffers."""

    def __init__(
        self,
        bus: WorkBus,
        files: FileStore,
        job: Job,
        save: Save,
        *,
        max_bytes: int,
        part_bytes: int = PART_BYTES,
    ) -> None:
        assert job.started is not None
        self._bus = bus
        self._files = files
        self._job = job
        self._save = save
        self._part_bytes = part_bytes
        self._published = job.assembled or pb.Assembled(results_next=job.started.results_since)
        self._since = job.started.results_since
        self._next = list(self._published.results_next)
        self._lines = job.started.lines
        self._places = Places(self._lines)
        self._expired = self._published.expired
        self._cancelled = self._published.cancelled
        self._parts = Parts(files, job.id)
        self._good = Output(files, self._parts, job, "output", self._published.output, max_bytes=max_bytes)
        self._bad = Output(files, self._parts, job, "errors", self._published.errors, max_bytes=max_bytes)

    async def run(self) -> pb.Finished:
        """Assemble until every line has its answer. Raises StoreFull, FileTooLarge or StoreUnavailable; the next
        attempt goes on from the last part, or from the job's first answer where a part is gone."""
        good, bad = self._good, self._bad
        try:
            async with good, bad:
                await self._recall()
                await self._read()
                if self._published.places:
                    # The copies below read from published parts, so that another attempt writes no part again.
                    await self._keep_parts()
                    # Check now, rather than copy at each attempt until the store is full.
                    await self._files.need_room(await good.kept_bytes() + await bad.kept_bytes())
                output_file_id, error_file_id = await good.keep(), await bad.keep()
        except FileNotFound as error:
            await self._save(pb.Assembled(results_next=self._since, attempt=self._published.attempt + 1))
            raise StoreUnavailable(f"what was assembled is gone, and is assembled again: {error.message}") from error
        return pb.Finished(
            outcome=self._outcome(),
            completed=good.lines,
            failed=bad.lines,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
        )

    async def _recall(self) -> None:
        """Read which lines are in parts already, as their answers may come again."""
        if self._published.places:
            pieces = [piece async for piece in self._parts.read("places", self._published.places)]
            self._places = Places(self._lines, b"".join(pieces))

    async def _read(self) -> None:
        if self._left <= 0:
            return
        async for record in self._bus.follow(BATCH_RESULTS, tuple(self._next)):
            await self._take(record)
            if self._left <= 0:
                return
            if self._good.open_bytes + self._bad.open_bytes >= self._part_bytes:
                await self._keep_parts()

    async def _take(self, record: Record) -> None:
        result = record.value
        assert isinstance(result, pb.Result)
        # The first answer to a line counts; later ones are left out.
        if result.job_id == self._job.id and self._places.add(result.place):
            self._expired |= result.expired
            self._cancelled |= result.cancelled
            await (self._good if result.ok else self._bad).write(result.answer)
        self._next += [0] * (record.partition + 1 - len(self._next))
        self._next[record.partition] = record.offset + 1

    async def _keep_parts(self) -> None:
        if not self._good.open_bytes + self._bad.open_bytes:
            return
        try:
            output, errors = await self._good.keep_part(), await self._bad.keep_part()
            places = await self._parts.write("places", self._places.content)
        except FulcrumError:
            await self._parts.drop()
            raise
        before = self._published
        self._published = pb.Assembled(
            results_next=self._next,
            output=output,
            errors=errors,
            expired=self._expired,
            cancelled=self._cancelled,
            places=places,
            attempt=before.attempt,
        )
        self._parts.published()
        await self._save(self._published)
        if before.places:
            await self._parts.remove("places", before.places)

    @property
    def _left(self) -> int:
        return int(self._lines) - self._good.lines - self._bad.lines

    def _outcome(self) -> pb.Outcome:
        if self._cancelled:  # of a line at least: one that was asked for after the last answer cancels nothing
            return pb.OUTCOME_CANCELLED
        return pb.OUTCOME_EXPIRED if self._expired else pb.OUTCOME_COMPLETED
