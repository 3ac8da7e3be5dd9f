"""A gateway's view of all batch jobs in the cluster, built from the jobs' events and slightly behind the broker.

Applying an event is pure, and applying it twice changes nothing.

`look_back` waits until this gateway has read all events of a job from before it received the job's lane. A lane's
committed offset and note are not sufficient, because lanes have begun at much older offsets after a broker was killed.

Events are reliable instead: the transaction that performs a piece of work also publishes an event about it. The gateway
publishes a token in the job's partition. Once it has read the token, it has read all earlier events.
"""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from libs.bus.work import Lane, WorkBus
from libs.contracts.errors import BatchNotFound, BrokerUnavailable, QueueFull, quoted
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent, LookBack
from libs.contracts.topics import BATCH_JOBS
from libs.policy.batch import OpenJob
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from services.gateway.batch.job import Job, LineRate, ShareCounts, ShareNote


def snapshot(job: Job) -> pb.Snapshot:
    counts = job.counts
    return pb.Snapshot(
        created=job.created,
        created_unix_ns=job.created_unix_ns,
        started=job.started,
        started_unix_ns=job.started_unix_ns,
        dealt=job.dealt,
        foretold=job.expected_end,
        waits=job.waits,
        assembled=job.assembled,
        cancel_unix_ns=job.cancel_unix_ns,
        finished=job.finished,
        finished_unix_ns=job.finished_unix_ns,
        completed=counts.completed,
        failed=counts.failed,
        answered_unix_ns=job.answered_unix_ns,
        open_shares=[progress for _, progress in sorted(counts.open.items())],
        whole_below=counts.whole_below,
        whole_above=[progress for _, progress in sorted(counts.whole_above.items())],
    )


def revive(job_id: str, stored: pb.Snapshot) -> Job:
    return Job(
        id=job_id,
        created=stored.created,
        created_unix_ns=stored.created_unix_ns,
        started=stored.started if stored.HasField("started") else None,
        started_unix_ns=stored.started_unix_ns,
        cancel_unix_ns=stored.cancel_unix_ns,
        finished=stored.finished if stored.HasField("finished") else None,
        finished_unix_ns=stored.finished_unix_ns,
        answered_unix_ns=stored.answered_unix_ns,
        dealt=stored.dealt,
        waits=stored.waits if stored.HasField("waits") else None,
        expected_end=stored.foretold if stored.HasField("foretold") else None,
        assembled=stored.assembled if stored.HasField("assembled") else None,
        counts=ShareCounts(
            completed=stored.completed,
            failed=stored.failed,
            open={progress.share: progress for progress in stored.open_shares},
            whole_below=stored.whole_below,
            whole_above={progress.share: progress for progress in stored.whole_above},
        ),
    )


MAX_JOBS = 10_000
"""The number of jobs in memory. Above it, the oldest finished job of the tenant with most finished jobs is dropped.

If no job is finished, the new job is dropped. MAX_UNFINISHED bounds the unfinished jobs that gateways accept.
"""
MAX_EARLY = 10_000
"""The number of stored events of unknown jobs.

A snapshot is published slightly after it was taken. A reader that begins in between reads events of the job before its
snapshot.
"""


class JobTable:
    """The known jobs by id, in the order in which they became known."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[str, Job] = {}
        self._early: dict[str, list[pb.JobEvent]] = {}
        self._early_events = 0
        self.dropped = 0
        """The number of dropped events and jobs: events of unknown jobs above `MAX_EARLY`, unfinished jobs above
        `MAX_JOBS`.
        """

    def get(self, job_id: str) -> Job | None:
        """Return the job, or None if it is unknown or was dropped."""
        return self._jobs.get(job_id)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def apply(self, event: pb.JobEvent) -> Job | None:
        """Apply an event and return its job, or None if the job is unknown."""
        job = self._jobs.get(event.job_id)
        match event.WhichOneof("event"):
            case "created" if job is None:
                job = self._add(Job(event.job_id, event.created, event.at_unix_ns))
            case "snapshot" if job is None:
                job = self._add(revive(event.job_id, event.snapshot))
            case "snapshot" if job is not None:
                # A repeated `created` event was read before the snapshot.
                _merge(job, revive(event.job_id, event.snapshot))
            case _ if job is not None:
                _apply(job, event)
            case _:
                self._wait(event)
        return job

    def _wait(self, event: pb.JobEvent) -> None:
        if self._early_events >= MAX_EARLY:
            oldest = self._early.pop(next(iter(self._early)))
            self._early_events -= len(oldest)
            self.dropped += len(oldest)
        self._early.setdefault(event.job_id, []).append(event)
        self._early_events += 1

    def _add(self, job: Job) -> Job | None:
        early = self._early.pop(job.id, [])
        self._early_events -= len(early)
        for event in early:
            _apply(job, event)
        self._jobs[job.id] = job
        if len(self._jobs) > self._max_jobs:
            self._drop_one(job)
        return self._jobs.get(job.id)

    def _drop_one(self, new: Job) -> None:
        """Drop the oldest finished job of the tenant with most finished jobs. If no job is finished, drop `new`."""
        finished = [job for job in self._jobs.values() if job.finished]
        if not finished:  # gateways do not accept that many unfinished jobs
            self.dropped += 1
            del self._jobs[new.id]
            return
        most, _ = Counter(job.created.tenant for job in finished).most_common(1)[0]
        del self._jobs[next(job.id for job in finished if job.created.tenant == most)]


def _apply(job: Job, event: pb.JobEvent) -> None:
    match event.WhichOneof("event"):
        case "started" if job.started is None:
            job.started, job.started_unix_ns = event.started, event.at_unix_ns
        case "dealt" if event.dealt.shares > job.dealt.shares:
            job.dealt = event.dealt
        case "foretold":
            job.expected_end = event.foretold
        case "waits":
            job.waits = event.waits
        case "assembled" if job.finished is None and _further(event.assembled, job.assembled):
            job.assembled = event.assembled
        case "progress" if job.finished is None and job.counts.add(event.progress):
            job.answered_unix_ns = event.at_unix_ns
        case "cancel_asked" if not job.cancel_unix_ns:
            job.cancel_unix_ns = event.at_unix_ns
        case "finished" if job.finished is None:
            job.finished, job.finished_unix_ns = event.finished, event.at_unix_ns
            job.counts, job.assembled = ShareCounts(), None
        case _:
            pass


def _merge(job: Job, stored: Job) -> None:
    """Add the state in a snapshot to a job, for the fields that the events read so far have not set."""
    job.created, job.created_unix_ns = stored.created, stored.created_unix_ns
    if job.started is None:
        job.started, job.started_unix_ns = stored.started, stored.started_unix_ns
    if stored.dealt.shares > job.dealt.shares:
        job.dealt = stored.dealt
    job.expected_end = job.expected_end or stored.expected_end
    job.waits = stored.waits if job.waits is None else job.waits
    job.cancel_unix_ns = job.cancel_unix_ns or stored.cancel_unix_ns
    if job.finished is None:
        job.finished, job.finished_unix_ns = stored.finished, stored.finished_unix_ns
    if job.finished is not None:
        job.counts, job.assembled = ShareCounts(), None
        return
    if stored.assembled is not None and _further(stored.assembled, job.assembled):
        job.assembled = stored.assembled
    job.counts = job.counts.merged(stored.counts)
    job.answered_unix_ns = job.answered_unix_ns or stored.answered_unix_ns


def _further(new: pb.Assembled, known: pb.Assembled | None) -> bool:
    """Return whether `new` belongs to a later attempt, or has more lines in the same attempt."""
    return known is None or _extent(new) > _extent(known)


def _extent(assembled: pb.Assembled) -> tuple[int, int]:
    return assembled.attempt, assembled.output.lines + assembled.errors.lines


KEEPERS = "batch-keepers.v2"
"""The consumer group of the jobs topic. Other readers begin at its committed offsets, after which snapshots follow.

The name contains a version, because keepers of different versions in one group would take lanes from each other.
"""
READY_TIMEOUT_S = 5.0
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
RETRY_AFTER_S = 2.0
FULL_RETRY_AFTER_S = 60.0
MAX_UNFINISHED = 1_000
"""The maximum number of unfinished jobs in the cluster.

Gateways that accept jobs at the same moment may exceed it slightly.
"""
MAX_TENANT_UNFINISHED = 250
"""The maximum number of unfinished jobs of one tenant, so that others have room."""
SEEN_TIMEOUT_S = 2.0
"""The time for which a lookup waits for a job that another gateway may just have published."""
SEEN_POLL_S = 0.02
JOB_ID = re.compile(r"batch_[0-9a-f]{32}")


class JobView:
    def __init__(self, bus: WorkBus) -> None:
        self._bus = bus
        self._book = JobTable()
        self._rate = LineRate()
        self._working: set[str] = set()
        self._creating: Counter[str] = Counter()
        """The number of jobs that this gateway is creating, by tenant."""
        self._unread: set[str] = set()
        """The jobs that this gateway created and whose events it has not read back."""
        self._awaited: dict[int, asyncio.Event] = {}
        """The events to set once their token is read back."""
        self.replayed = asyncio.Event()
        """Set once all events from before the start have been read. A job that is still unknown does not exist."""

    async def follow(self) -> None:
        since = await self._begins()
        async for record in self._bus.follow(BATCH_JOBS, since, on_replayed=self.replayed.set):
            assert isinstance(record.value, JobEvent)
            self.apply(record.value)

    async def _begins(self) -> list[int]:
        """Return the offsets at which to begin. Snapshots after them contain the state of all earlier events."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while True:
            try:
                return await self._bus.committed(BATCH_JOBS, KEEPERS)
            except BrokerUnavailable:
                await asyncio.sleep(backoff.next_s())

    def published(self, event: JobEvent) -> None:
        """Apply an event that this gateway has published, without waiting to read it back.

        A client may request its new job at once. Reading the event back may take long if a killed gateway left an open
        transaction.
        """
        if event.HasField("created") and not self.knows(event.job_id):
            self._unread.add(event.job_id)
        self._fold(event)

    def apply(self, event: JobEvent) -> None:
        if event.HasField("look_back"):
            if (awaited := self._awaited.get(event.look_back.token)) is not None:
                awaited.set()
            return
        if event.job_id in self._unread and event.HasField("created"):
            self._unread.remove(event.job_id)
            # Another gateway may have created the same job first. The first event in the topic is authoritative.
            if (job := self._book.get(event.job_id)) is not None:
                job.created, job.created_unix_ns = event.created, event.at_unix_ns
        self._fold(event)

    def _fold(self, event: JobEvent) -> None:
        before = self._book.get(event.job_id)
        answered = before.completed + before.failed if before else 0
        job = self._book.apply(event)
        if job is None:
            return
        standing = job.standing(event.at_unix_ns)
        if standing is None:
            self._working.discard(job.id)
        elif standing.open_lines:
            if not self._working:
                self._rate.work_begins(event.at_unix_ns)
            self._working.add(job.id)
        # A snapshot contains lines that were answered long ago. The lines of a stopped job are not run.
        if not event.HasField("snapshot") and job.stopped(event.at_unix_ns) is None:
            self._rate.add(event.at_unix_ns, max(job.completed + job.failed - answered, 0))

    @property
    def dropped_events(self) -> int:
        """The number of events of unknown jobs that were dropped for lack of room."""
        return self._book.dropped

    def lines_per_s(self, now_ns: int) -> float | None:
        """Return the lines that the cluster answers per second, or None if the rate is unknown."""
        return self._rate.per_s(now_ns) if self._working else None

    def standings(self, now_ns: int) -> dict[str, OpenJob]:
        """Return the inputs to the dealing of shares, by id of each job with unanswered lines."""
        return {job.id: standing for job in self._book if (standing := job.standing(now_ns)) is not None}

    def cancelled(self, job_id: str) -> bool:
        job = self._book.get(job_id)
        return job is not None and bool(job.cancel_unix_ns)

    @contextmanager
    def awaiting(self, token: int) -> Iterator[asyncio.Event]:
        """Yield an event that is set once a `LookBack` with this token has been read."""
        self._awaited[token] = asyncio.Event()
        try:
            yield self._awaited[token]
        finally:
            del self._awaited[token]

    def note(self, job_id: str, share: int, lines: int) -> ShareNote:
        """Return the lines of a share whose answers this gateway has read."""
        job = self._book.get(job_id)
        if job is not None and (job.finished or job.counts.whole(share)):
            return ShareNote(lines, answered=(1 << lines) - 1)
        known = job.counts.open.get(share) if job is not None else None
        return ShareNote.read(known.note if known is not None else "", lines)

    def get(self, job_id: str) -> Job | None:
        return self._book.get(job_id)

    def knows(self, job_id: str) -> bool:
        return self._book.get(job_id) is not None

    def jobs(self, wanted: Callable[[Job], bool] = lambda _: True) -> list[Job]:
        """Return the jobs that satisfy `wanted`, youngest first."""
        return sorted(filter(wanted, self._book), key=lambda job: (-job.created_unix_ns, job.id))

    def unfinished(self) -> list[Job]:
        return [job for job in self._book if job.finished is None]

    async def ready(self) -> None:
        """Wait until all jobs are known. Raise BrokerUnavailable after `READY_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self.replayed.wait()
        except TimeoutError:
            text = "this gateway has just started and still reads from the broker which batches there are"
            raise BrokerUnavailable(text, retry_after_s=RETRY_AFTER_S) from None

    def check_room(self, tenant: str) -> None:
        """Raise QueueFull if the cluster or the tenant has the maximum number of unfinished jobs.

        Jobs that are being created count as unfinished.
        """
        unfinished, creating = self.unfinished(), self._creating
        if len(unfinished) + creating.total() >= MAX_UNFINISHED:
            raise QueueFull(f"{MAX_UNFINISHED} batches are not finished yet", retry_after_s=FULL_RETRY_AFTER_S)
        if sum(job.created.tenant == tenant for job in unfinished) + creating[tenant] >= MAX_TENANT_UNFINISHED:
            text = f"{MAX_TENANT_UNFINISHED} batches of tenant {tenant} are not finished yet"
            raise QueueFull(text, retry_after_s=FULL_RETRY_AFTER_S)

    @contextmanager
    def room(self, tenant: str) -> Iterator[None]:
        """Reserve room for a job that is created within the context. Raise QueueFull as `check_room` does."""
        self.check_room(tenant)
        self._creating[tenant] += 1
        try:
            yield
        finally:
            self._creating[tenant] -= 1
            if not self._creating[tenant]:
                del self._creating[tenant]

    async def seen(self, job_id: str) -> Job:
        """Return a job, for which the call waits up to `SEEN_TIMEOUT_S`.

        Raise BatchNotFound if the job does not appear, and BrokerUnavailable while the view is incomplete.
        """
        await self.ready()
        loop = asyncio.get_running_loop()
        # Only ids of this form are created, so there is no point in waiting for another one.
        deadline_s = loop.time() + (SEEN_TIMEOUT_S if JOB_ID.fullmatch(job_id) else -1.0)
        while True:
            job = self._book.get(job_id)
            if job is not None:
                return job
            if loop.time() > deadline_s:
                raise BatchNotFound(f"no batch {quoted(job_id)} is known", param="batch_id")
            await asyncio.sleep(SEEN_POLL_S)


log = structlog.get_logger()

LOOK_BACK_S = 30.0
"""The time after which a token that has not been read back is published again."""


async def look_back(view: JobView, clock: Clock, lane: Lane, job_id: str, *, next_offset: int, note: str = "") -> None:
    """Wait until this gateway has read all earlier events of the job. Call it before any work on the record at
    `next_offset`.

    Raise the error that ended the lane. The wait is unlimited, because lanes of other partitions continue meanwhile.
    """
    # A gateway that began at the snapshots knows all jobs only after it has read all records from before its start.
    await view.replayed.wait()
    while True:
        token = secrets.randbits(64)
        event = JobEvent(job_id=job_id, at_unix_ns=clock.now_ns(), look_back=LookBack(token=token))
        with view.awaiting(token) as read:
            await lane.commit([(BATCH_JOBS, event)], next_offset=next_offset, note=note)
            try:
                async with asyncio.timeout(LOOK_BACK_S):
                    await read.wait()
                    return
            except TimeoutError:
                log.warning("a lane waits for the outcome of earlier lines", job=job_id, partition=lane.partition)
