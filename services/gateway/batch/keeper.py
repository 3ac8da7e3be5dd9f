"""Work on jobs: a new one is cut into shares, a started one is followed until its files are whole.

A lane of the jobs topic is committed up to the oldest job that is not finished; whoever gets the lane next reads all
events from there, and so knows what has been done before it does anything.
"""

import asyncio
from collections.abc import Sequence

import structlog
from google.protobuf.message import Message

from libs.bus.work import Lane, WorkBus
from libs.contracts.errors import FileNotFound, FulcrumError
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES, Topic
from libs.filestore.port import FileStore
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from services.gateway.batch.assemble import Assembly
from services.gateway.batch.jobs import Job, JobBook
from services.gateway.batch.shares import Cutter

log = structlog.get_logger()

MAX_KEPT = 16
"""Jobs of a lane that are worked on at once; others wait."""
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0


class Keeper:
    """Handles lanes of the jobs topic."""

    def __init__(self, work: WorkBus, files: FileStore, clock: Clock, *, max_lines: int, max_output_bytes: int) -> None:
        self.bus = work
        self.files = files
        self.clock = clock
        self.max_lines = max_lines
        self.max_output_bytes = max_output_bytes

    async def work(self, lane: Lane) -> None:
        """Keep every job of a lane, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                kept = _Kept(self, lane)
                async for batch in lane.batches():
                    for record in batch:
                        assert isinstance(record.value, pb.JobEvent)
                        kept.read(record.offset, record.value)
                    if lane.replayed:
                        for job in kept.unkept():
                            group.create_task(kept.keep(job))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None


class _Kept:
    """The jobs of one lane."""

    def __init__(self, keeper: Keeper, lane: Lane) -> None:
        self._keeper = keeper
        self._lane = lane
        self._book = JobBook()
        self._open: dict[str, int] = {}
        """Offsets at which unfinished jobs were created."""
        self._kept: set[str] = set()
        self._next = 0
        self._commits = asyncio.Lock()
        self._at_once = asyncio.Semaphore(MAX_KEPT)

    def read(self, offset: int, event: pb.JobEvent) -> None:
        """Take an event of the lane."""
        self._next = offset + 1
        job = self._book.apply(event)
        if job is None:
            return
        if job.finished:
            self._open.pop(job.id, None)
        else:
            self._open.setdefault(job.id, offset)

    def unkept(self) -> list[Job]:
        """Jobs to be kept from now on."""
        new = [job for job_id in self._open if job_id not in self._kept and (job := self._book.get(job_id))]
        self._kept.update(job.id for job in new)
        return new

    async def keep(self, job: Job) -> None:
        """From wherever the job is to its end."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        async with self._at_once:
            while not job.finished:
                try:
                    await self._advance(job)
                except FulcrumError as error:
                    # What a job needs is away or full: nothing is lost, all of it is on the broker.
                    log.warning("batch waits", job=job.id, error=error.message)
                    await asyncio.sleep(backoff.next_s())

    async def _advance(self, job: Job) -> None:
        if job.started is None:
            await self._start(job)
        else:
            assembly = Assembly(self._keeper.bus, self._keeper.files, job, max_bytes=self._keeper.max_output_bytes)
            await self._finish(job, await assembly.run())

    async def _start(self, job: Job) -> None:
        keeper = self._keeper
        cutter = Cutter()
        try:
            async for part in keeper.files.read(job.created.input_file_id):
                await asyncio.to_thread(cutter.push, part)
            cutter.flush()
            if suspects := cutter.suspects():
                marker = cutter.marker(suspects)
                async for part in keeper.files.read(job.created.input_file_id):
                    await asyncio.to_thread(marker.push, part)
                marker.flush()
        except FileNotFound as error:
            await self._fail(job, error.code, error.message)
            return
        if not 0 < cutter.lines <= keeper.max_lines:
            code, text = (
                ("too_many_lines", "more lines than") if cutter.lines else ("empty_file", "no line, of at most")
            )
            await self._fail(job, code, f"the file has {text} {keeper.max_lines} that a batch may have")
            return
        started = pb.Started(lines=cutter.lines, results_since=await keeper.bus.ends(BATCH_RESULTS))
        event = pb.JobEvent(job_id=job.id, at_unix_ns=keeper.clock.now_ns(), started=started)
        shares: list[tuple[Topic, Message]] = [
            (
                BATCH_SHARES,
                pb.Share(
                    share_id=f"{job.id}/{span.number}",
                    job_id=job.id,
                    number=span.number,
                    input_file_id=job.created.input_file_id,
                    endpoint=job.created.endpoint,
                    first_line=span.first_line,
                    lines=span.lines,
                    first_byte=span.first_byte,
                    bytes=span.bytes,
                    repeats=span.repeats,
                    expires_unix_ns=job.created.expires_unix_ns,
                    first_place=span.first_place,
                ),
            )
            for span in cutter.spans
        ]
        await self._commit(job, event, shares)

    async def _fail(self, job: Job, code: str, message: str) -> None:
        await self._finish(job, pb.Finished(outcome=pb.OUTCOME_FAILED, error_code=code, error_message=message))

    async def _finish(self, job: Job, finished: pb.Finished) -> None:
        await self._commit(job, pb.JobEvent(job_id=job.id, at_unix_ns=self._keeper.clock.now_ns(), finished=finished))

    async def _commit(self, job: Job, event: pb.JobEvent, more: Sequence[tuple[Topic, Message]] = ()) -> None:
        async with self._commits:
            ends = event.WhichOneof("event") == "finished"
            unfinished = [offset for job_id, offset in self._open.items() if not (ends and job_id == job.id)]
            await self._lane.commit([*more, (BATCH_JOBS, event)], next_offset=min(unfinished, default=self._next))
            self._book.apply(event)
            if ends:
                self._open.pop(job.id, None)
                self._kept.discard(job.id)
