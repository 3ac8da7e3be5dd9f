"""The keeper of batch jobs. It counts the lines of jobs, deals shares to runners and assembles the answers.

Each keeper owns some partitions, or lanes, of the jobs topic. After every SNAPSHOT_EVENTS events of a lane, it
publishes a snapshot of each job and commits the lane's offset to the start of the snapshots. The lane's next keeper
reads from there, so it knows each job's state before it acts.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

import structlog

from libs.bus.work import Lane, Produced, WorkBus
from libs.contracts.errors import (
    FileNotFound,
    FileTooLarge,
    FulcrumError,
    StoreFull,
    StoreUnavailable,
    TopicNotFound,
    TopicRefused,
)
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES
from libs.filestore.port import FileInfo, FileStore
from libs.policy.batch import deal
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from services.gateway.batch.begin import INPUT, begin, cannot_begin
from services.gateway.batch.bounds import TenantBounds
from services.gateway.batch.job import Job, NotRun, ends_s, news
from services.gateway.batch.lines import MAX_ERROR_TEXT_CHARS, AnswerCopies, check_topics, count, read_lines, refused
from services.gateway.batch.output import PART, PART_BYTES, PART_PURPOSE, Assembly
from services.gateway.batch.shares import Dealer
from services.gateway.batch.view import MAX_UNFINISHED, JobTable, JobView, snapshot
from services.gateway.metrics import BatchMetrics

# The number of a job's shares that are refused in one transaction. Each is read as a whole.
SHARES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class RefusedShares:
    """The answers to a job's next shares, none of whose lines run."""

    dealt: pb.JobEvent
    produced: list[Produced]
    """The results and progress events. They are published in one transaction with `dealt`."""
    copies: list[Produced]
    lines: int


class TopicRefusals:
    """The answers to shares of stopped jobs that were never dealt to a runner."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._copies = AnswerCopies()

    async def next(self, dealer: Dealer, reason: NotRun, now_ns: int) -> RefusedShares | None:
        """Return the answers to the next shares, or None if all shares have been dealt. Raise StoreUnavailable."""
        spans = await dealer.next(SHARES_AT_ONCE)
        if not spans:
            return None
        produced: list[Produced] = []
        copies: list[Produced] = []
        for share in map(dealer.share, spans):
            lines = await read_lines(self._files, share)
            results = [refused(share.job_id, line, line.refusal or reason) for line in lines]
            counts = pb.Progress(share=share.number, failed=share.lines, whole=True)
            produced += [(BATCH_RESULTS, result) for result in results]
            produced.append((BATCH_JOBS, pb.JobEvent(job_id=share.job_id, at_unix_ns=now_ns, progress=counts)))
            copies += self._copies.of(share, results)
        dealt = pb.JobEvent(job_id=dealer.job.id, at_unix_ns=now_ns, dealt=dealer.dealt(spans))
        return RefusedShares(dealt, produced, copies, sum(span.lines for span in spans))

    def copies_refused(self, job_id: str, error: TopicRefused) -> None:
        """Stop copying the job's answers to its topic, because the topic refuses them."""
        self._copies.refuse(job_id, error)


async def sweep(files: FileStore, find: Callable[[str], Job | None]) -> None:
    """Delete parts and topic copies that no job needs. `find` returns a job by its id. Files of unknown jobs stay."""
    for info in await files.infos():
        if _is_left(info, find):
            with suppress(FileNotFound):
                await files.delete(info.id)


def _is_left(info: FileInfo, find: Callable[[str], Job | None]) -> bool:
    """Return whether a file is a part of a job that has ended, or a copy of a topic that its job does not use."""
    if info.purpose == PART_PURPOSE:
        part = PART.fullmatch(info.id)
        job = find(part[1]) if part else None
        return job is not None and job.finished is not None
    copy = INPUT.fullmatch(info.id)
    job = find(copy[1]) if copy else None
    return job is not None and bool(job.started or job.finished) and job.input_file_id != info.id


log = structlog.get_logger()

MAX_COUNTED = 4
"""The number of a lane's input files that are read at once to count lines."""
MAX_ASSEMBLED = 16
"""The number of a lane's jobs whose answers are written to files as they arrive.

Answers of other jobs are read once all of them have been published.
"""
MAX_ASSEMBLED_AFTER = 4
"""The number of a lane's completely answered jobs that are assembled at once.

Each such read is finite, so that no job waits for long.
"""
SEAT_POLL_S = 0.25
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
CANCELLED_WAITS_S = 600.0
"""The maximum time that a cancelled job waits for room in the file store. Answers not stored by then are lost."""
DEAL_S = 0.1
"""The interval between checks for runners that need more shares."""
PREDICT_S = 1.0
SNAPSHOT_EVENTS = 1_000
"""The number of a lane's events between snapshots, to which SNAPSHOT_EVENTS_A_JOB is added for each job.

A lane's next keeper reads at most this many events again.
"""
SNAPSHOT_EVENTS_A_JOB = 4
_NEVER = (FileNotFound, FileTooLarge, TopicNotFound)
"""Errors after which a job's lines can never be counted. A job whose lines were counted does not fail from them."""


class JobKeeper:
    def __init__(
        self,
        work: WorkBus,
        files: FileStore,
        view: JobView,
        clock: Clock,
        *,
        max_lines: int,
        max_file_bytes: int,
        max_output_bytes: int,
        metrics: BatchMetrics,
        bounds: TenantBounds | None = None,
        part_bytes: int = PART_BYTES,
        snapshot_events: int = SNAPSHOT_EVENTS,
    ) -> None:
        self.bus = work
        self.files = files
        self.view = view
        self.clock = clock
        self.max_lines = max_lines
        self.max_file_bytes = max_file_bytes
        self.max_output_bytes = max_output_bytes
        self.metrics = metrics
        self.bounds = bounds or TenantBounds()
        self.part_bytes = part_bytes
        self.snapshot_events = snapshot_events

    async def work(self, lane: Lane) -> None:
        """Advance every job of a lane until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                jobs, swept = _LaneJobs(self, lane), False
                group.create_task(jobs.deal())
                group.create_task(jobs.predict_ends())
                async for batch in lane.batches():
                    for record in batch:
                        assert isinstance(record.value, pb.JobEvent)
                        jobs.read(record.offset, record.value)
                    if lane.replayed:
                        for job in jobs.unminded():
                            group.create_task(jobs.keep(job))
                        await jobs.condense()
                        if not swept:
                            swept = True
                            group.create_task(jobs.sweep())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None


class _LaneJobs:
    def __init__(self, keeper: JobKeeper, lane: Lane) -> None:
        self._keeper = keeper
        self._lane = lane
        self._book = JobTable()
        self._open: set[str] = set()
        self._minded: set[str] = set()
        self._dealers: dict[str, Dealer] = {}
        self._refusals = TopicRefusals(keeper.files)
        self._some = asyncio.Event()
        self._begins: int | None = None
        """The offset at which the lane's next keeper begins to read."""
        self._next = 0
        self._events = 0
        self._commits = asyncio.Lock()
        self._counting = keeper.bounds.slots(MAX_COUNTED, MAX_UNFINISHED)
        self._along = asyncio.Semaphore(MAX_ASSEMBLED)
        self._after = keeper.bounds.slots(MAX_ASSEMBLED_AFTER, MAX_UNFINISHED)

    def read(self, offset: int, event: pb.JobEvent) -> None:
        self._begins = offset if self._begins is None else self._begins
        self._next = offset + 1
        self._events += 1
        job = self._book.apply(event)
        if job is None:
            return
        if job.finished:
            self._open.discard(job.id)
        else:
            self._open.add(job.id)

    async def condense(self) -> None:
        """Publish snapshots of all jobs if there have been enough events since the previous ones."""
        if self._events < self._keeper.snapshot_events + SNAPSHOT_EVENTS_A_JOB * len(self._book):
            return
        async with self._commits:
            now_ns = self._keeper.clock.now_ns()
            begins = self._next
            oldest_ns = now_ns - BATCH_JOBS.retention_ms * 1_000_000
            jobs = [job for job in self._book if not job.finished or job.finished_unix_ns > oldest_ns]
            events = [pb.JobEvent(job_id=job.id, at_unix_ns=now_ns, snapshot=snapshot(job)) for job in jobs]
            await self._lane.commit([(BATCH_JOBS, event) for event in events], next_offset=self._begins or 0)
            # A second transaction moves the offset, so that a keeper that begins there is certain to read the
            # snapshots.
            await self._lane.commit([], next_offset=begins)
            self._begins, self._events = begins, 0

    def unminded(self) -> list[Job]:
        """Return the unfinished jobs for which `keep` is not running. The caller must start it for them."""
        new = [job for job_id in sorted(self._open - self._minded) if (job := self._book.get(job_id))]
        self._minded.update(job.id for job in new)
        return new

    async def keep(self, job: Job) -> None:
        """Advance a job through its remaining stages, until it has finished."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while not job.finished:
            try:
                await self._advance(job)
            except FulcrumError as error:
                if job.started is None and isinstance(error, _NEVER):
                    await self._finish(job, cannot_begin(error, job.created))
                    continue
                # A store or a topic is unreachable or full. Nothing is lost, because the broker has all records of the
                # job.
                log.warning("batch waits", job=job.id, error=error.message)
                if (finished := self._given_up(job, error)) is not None:
                    await self._finish(job, finished)
                else:
                    await self._publish_waits(job, error.message[:MAX_ERROR_TEXT_CHARS])
                    await asyncio.sleep(backoff.next_s())
        if job.started:
            # Sweep in any case, because a killed keeper may have written parts that no event names.
            await self.sweep()

    async def deal(self) -> None:
        """Deal shares to runners until cancelled."""
        await self._keeper.view.replayed.wait()
        while True:
            await self._some.wait()
            await asyncio.sleep(DEAL_S)
            keeper = self._keeper
            now_ns = keeper.clock.now_ns()
            own = [found for dealer in self._dealers.values() if (found := dealer.job.standing(now_ns)) is not None]
            every = {**keeper.view.standings(now_ns), **{standing.job_id: standing for standing in own}}
            turns = Counter(deal(every.values(), now_ns, keeper.view.lines_per_s(now_ns)))
            for job_id, dealer in list(self._dealers.items()):
                if dealer.job.finished or not dealer.left:
                    del self._dealers[job_id]
                    continue
                try:
                    if (reason := dealer.job.stopped(now_ns)) is not None:
                        await self._refuse(dealer, reason, now_ns)
                    else:
                        await self._hand_out(dealer, turns[job_id], now_ns)
                except StoreUnavailable as error:
                    log.warning("shares of a batch wait for the file store", job=job_id, error=error.message)
                    await asyncio.sleep(RETRY_FIRST_S)
            if not self._dealers:
                self._some.clear()

    async def _hand_out(self, dealer: Dealer, shares: int, now_ns: int) -> None:
        if spans := await dealer.next(shares):
            event = pb.JobEvent(job_id=dealer.job.id, at_unix_ns=now_ns, dealt=dealer.dealt(spans))
            await self._commit(dealer.job, event, [(BATCH_SHARES, dealer.share(span)) for span in spans])

    async def _refuse(self, dealer: Dealer, reason: NotRun, now_ns: int) -> None:
        if (found := await self._refusals.next(dealer, reason, now_ns)) is None:
            return
        try:
            await self._commit(dealer.job, found.dealt, [*found.produced, *found.copies])
        except TopicRefused as error:
            log.warning("a batch's topic refuses answers", job=dealer.job.id, error=error.message)
            self._refusals.copies_refused(dealer.job.id, error)
            await self._commit(dealer.job, found.dealt, found.produced)
        self._keeper.metrics.committed([False] * found.lines)

    async def predict_ends(self) -> None:
        """Publish predictions of when jobs end, and whether they miss their window, until cancelled."""
        while True:
            await asyncio.sleep(PREDICT_S)
            if not self._open:
                continue
            view, now_ns = self._keeper.view, self._keeper.clock.now_ns()
            per_s, every = view.lines_per_s(now_ns), view.standings(now_ns)
            if per_s is None:
                continue
            ends = ends_s(every.values(), now_ns, per_s)
            for job_id in list(self._open):
                job, standing = self._book.get(job_id), every.get(job_id)
                if job is None or standing is None or job.cancel_unix_ns:
                    continue
                if (end := news(standing, job.expected_end, ends.get(job_id), now_ns)) is not None:
                    if end.late and not (job.expected_end and job.expected_end.late):
                        log.warning("batch will not make its window", job=job_id, end_unix_s=end.end_unix_ns // 10**9)
                    await self._commit(job, pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, foretold=end))

    async def _advance(self, job: Job) -> None:
        keeper = self._keeper
        if job.started is None:
            async with self._counting.slot(job.created.tenant):
                await self._start(job)
            return
        if job.dealt.lines < job.lines and job.id not in self._dealers:
            self._deal(job, await self._repeats(job))
        async with await self._seat(job):
            finished = await Assembly(
                keeper.bus,
                keeper.files,
                job,
                lambda assembled: self._assembled(job, assembled),
                max_bytes=keeper.max_output_bytes,
                part_bytes=keeper.part_bytes,
            ).run()
        await self._finish(job, finished)

    def _deal(self, job: Job, repeats: Sequence[int]) -> None:
        self._dealers[job.id] = Dealer(job, self._keeper.files, repeats)
        self._some.set()

    async def _repeats(self, job: Job) -> Sequence[int]:
        """Return the indices of lines that repeat an earlier custom_id. This reads the whole file."""
        if job.started is None or not job.started.repeats:
            return ()
        try:
            async with self._counting.slot(job.created.tenant):
                return (await count(self._keeper.files, job.input_file_id)).repeats
        except FileNotFound:
            return ()

    async def _assembled(self, job: Job, assembled: pb.Assembled) -> None:
        event = pb.JobEvent(job_id=job.id, at_unix_ns=self._keeper.clock.now_ns(), assembled=assembled)
        await self._commit(job, event)
        await self._publish_waits(job, "")

    async def _publish_waits(self, job: Job, reason: str) -> None:
        if reason != job.waits_for:
            event = pb.JobEvent(job_id=job.id, at_unix_ns=self._keeper.clock.now_ns(), waits=pb.Waits(reason=reason))
            await self._commit(job, event)

    async def sweep(self) -> None:
        """Remove parts and copies that no job needs. Do nothing if the store does not answer."""
        try:
            await sweep(self._keeper.files, self._book.get)
        except FulcrumError as error:
            log.warning("unneeded files of batch jobs could not be deleted yet", error=error.message)

    async def _seat(self, job: Job) -> AbstractAsyncContextManager[None]:
        """Wait until the job may be assembled. Return a context to keep open during the assembly."""
        while True:
            if not self._along.locked():
                return self._along
            if job.answered:
                return self._after.slot(job.created.tenant)
            await asyncio.sleep(SEAT_POLL_S)

    def _given_up(self, job: Job, error: FulcrumError) -> pb.Finished | None:
        """Return the end of a job that can never continue, or None if it may still do so.

        Such a job was stopped before its lines were counted, or it was cancelled long ago and the store has no room for
        its answers.
        """
        now_ns = self._keeper.clock.now_ns()
        cancelled_s = (now_ns - job.cancel_unix_ns) / 1e9 if job.cancel_unix_ns else 0.0
        no_room = job.answered and isinstance(error, StoreFull | FileTooLarge) and cancelled_s > CANCELLED_WAITS_S
        if not (job.stopped(now_ns) if job.started is None else no_room):
            return None
        return pb.Finished(
            outcome=pb.OUTCOME_CANCELLED if job.cancel_unix_ns else pb.OUTCOME_EXPIRED,
            completed=job.completed,
            failed=job.failed,
            error_code=error.code,
            error_message=error.message[:MAX_ERROR_TEXT_CHARS],
        )

    async def _start(self, job: Job) -> None:
        """Count the job's lines. Raise FileNotFound, FileTooLarge or TopicNotFound if that can never succeed."""
        keeper = self._keeper
        await check_topics(keeper.bus, job.created)
        max_lines, bound = keeper.bounds.line_room(keeper.view, job.created.tenant, job.id, keeper.max_lines)
        begun = await begin(
            keeper.bus, keeper.files, job, max_lines=max_lines, bound=bound, max_file_bytes=keeper.max_file_bytes
        )
        if isinstance(begun, pb.Finished):
            await self._finish(job, begun)
            return
        event = pb.JobEvent(job_id=job.id, at_unix_ns=keeper.clock.now_ns(), started=begun.started)
        await self._commit(job, event)
        await self._publish_waits(job, "")
        self._deal(job, begun.repeats)

    async def _finish(self, job: Job, finished: pb.Finished) -> None:
        await self._commit(job, pb.JobEvent(job_id=job.id, at_unix_ns=self._keeper.clock.now_ns(), finished=finished))

    async def _commit(self, job: Job, event: pb.JobEvent, more: Sequence[Produced] = ()) -> None:
        async with self._commits:
            await self._lane.commit([*more, (BATCH_JOBS, event)], next_offset=self._begins or 0)
            self._book.apply(event)
            if job.finished:
                self._open.discard(job.id)
                self._minded.discard(job.id)
