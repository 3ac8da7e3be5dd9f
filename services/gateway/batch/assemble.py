"""Both output files of a job, from the results topic: each line once, in the order in which answers came.

Where the broker keeps what it has told, answers are put into files of PART_BYTES that stay, with one that says which
lines they are of, and an event names them and says up to where: a keeper that takes over goes on from there.
"""

from collections.abc import Awaitable, Callable

import structlog

from libs.bus.port import Record
from libs.bus.work import WorkBus
from libs.contracts.errors import FileNotFound, FulcrumError, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_RESULTS
from libs.filestore.port import FileStore
from services.gateway.batch.job import Job
from services.gateway.batch.output import Output
from services.gateway.batch.parts import Parts
from services.gateway.batch.places import Places

log = structlog.get_logger()

PART_BYTES = 16 * 1024 * 1024
"""Of both files together: at most so much is read and written again when another keeper takes over."""

Save = Callable[[pb.Assembled], Awaitable[None]]
"""Publishes it; raises when it is not known to be there."""


class Assembly:
    """Of one job, one time. Memory is one bit a line and two write buffers."""

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
        self._told = job.assembled or pb.Assembled(results_next=job.started.results_since)
        self._since = job.started.results_since
        self._next = list(self._told.results_next)
        self._lines = job.started.lines
        self._places = Places(self._lines)
        self._expired = self._told.expired
        self._cancelled = self._told.cancelled
        self._parts = Parts(files, job.id)
        self._good = Output(files, self._parts, job.id, "output", self._told.output, max_bytes=max_bytes)
        self._bad = Output(files, self._parts, job.id, "errors", self._told.errors, max_bytes=max_bytes)

    async def run(self) -> pb.Finished:
        """Until every line is there. Raises StoreFull, FileTooLarge or StoreUnavailable, after which a new one goes on
        from the last part; where a part is gone, from the job's first answer."""
        good, bad = self._good, self._bad
        try:
            async with good, bad:
                await self._recall()
                await self._read()
                if self._told.places:
                    # What is copied below is in parts that were told of, so that trying again writes none.
                    await self._keep_parts()
                    # Found out now, not by copying until the store is full, each time that it is tried.
                    await self._files.need_room(await good.kept_bytes() + await bad.kept_bytes())
                output_file_id, error_file_id = await good.keep(), await bad.keep()
        except FileNotFound as error:
            await self._save(pb.Assembled(results_next=self._since, attempt=self._told.attempt + 1))
            raise StoreUnavailable(f"what was assembled is gone, and is assembled again: {error.message}") from error
        return pb.Finished(
            outcome=self._outcome(),
            completed=good.lines,
            failed=bad.lines,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
        )

    async def _recall(self) -> None:
        """Which lines are in parts: their answers may come again behind these."""
        if self._told.places:
            pieces = [piece async for piece in self._parts.read("places", self._told.places)]
            self._places = Places(self._lines, b"".join(pieces))

    async def _read(self) -> None:
        if not self._left:
            return
        async for record in self._bus.follow(BATCH_RESULTS, tuple(self._next)):
            await self._take(record)
            if not self._left:
                return
            if self._good.open_bytes + self._bad.open_bytes >= self._part_bytes:
                await self._keep_parts()

    async def _take(self, record: Record) -> None:
        result = record.value
        assert isinstance(result, pb.Result)
        # One that comes again is left out: the first answer counts.
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
        before = self._told
        self._told = pb.Assembled(
            results_next=self._next,
            output=output,
            errors=errors,
            expired=self._expired,
            cancelled=self._cancelled,
            places=places,
            attempt=before.attempt,
        )
        self._parts.told()
        await self._save(self._told)
        if before.places:
            await self._parts.remove("places", before.places)

    @property
    def _left(self) -> int:
        return int(self._lines) - self._good.lines - self._bad.lines

    def _outcome(self) -> pb.Outcome:
        if self._cancelled:  # of a line at least: one that was asked for after the last answer cancels nothing
            return pb.OUTCOME_CANCELLED
        return pb.OUTCOME_EXPIRED if self._expired else pb.OUTCOME_COMPLETED
