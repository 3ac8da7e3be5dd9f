"""This gateway's view of every job in the cluster, a moment behind the broker."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from libs.bus.work import WorkBus
from libs.contracts.errors import BatchNotFound, BrokerUnavailable, QueueFull, quoted
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent
from libs.contracts.topics import BATCH_JOBS
from libs.policy.batch import OpenJob
from libs.runtime.backoff import Backoff
from services.gateway.batch.jobs.ending import LineRate
from services.gateway.batch.jobs.fold import JobBook
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.jobs.progress import ShareNote

KEEPERS = "batch-keepers.v2"
"""The consumer group of the jobs topic. The name holds a version, as groups of different versions would fence each
other. Readers begin at its committed offsets: snapshots of all jobs follow them."""
READY_TIMEOUT_S = 5.0
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
RETRY_AFTER_S = 2.0
FULL_RETRY_AFTER_S = 60.0
MAX_UNFINISHED = 1_000
"""Unfinished jobs in the cluster. Gateways that accept jobs at the same moment may exceed it by a few."""
MAX_TENANT_UNFINISHED = 250
"""Unfinished jobs of one tenant, which leaves room for others."""
SEEN_TIMEOUT_S = 2.0
"""How long a lookup waits for a job that another gateway may have published just now."""
SEEN_POLL_S = 0.02
JOB_ID = re.compile(r"batch_[0-9a-f]{32}")


class JobView:
    def __init__(self, bus: WorkBus) -> None:
        self._bus = bus
        self._book = JobBook()
        self._rate = LineRate()
        self._working: set[str] = set()
        """The jobs whose lines runners hold."""
        self._creating: Counter[str] = Counter()
        """The jobs that this gateway is creating, by tenant."""
        self._unread: set[str] = set()
        """Jobs that this gateway created and has not read back yet."""
        self._awaited: dict[int, asyncio.Event] = {}
        """The events that are set once their token is read back."""
        self.replayed = asyncio.Event()
        """Set once all events from before the start are read: a job that is unknown then does not exist."""

    async def follow(self) -> None:
        since = await self._begins()
        async for record in self._bus.follow(BATCH_JOBS, since, on_replayed=self.replayed.set):
            assert isinstance(record.value, JobEvent)
            self.apply(record.value)

    async def _begins(self) -> list[int]:
        """Offsets to begin at: snapshots after them hold everything from before."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while True:
            try:
                return await self._bus.committed(BATCH_JOBS, KEEPERS)
            except BrokerUnavailable:
                await asyncio.sleep(backoff.next_s())

    def published(self, event: JobEvent) -> None:
        """Apply an event that this gateway has published, before it is read back: a client that got the job's id may
        ask for it at once, and reading waits long behind a transaction whose gateway was killed."""
        if event.HasField("created") and not self.knows(event.job_id):
            self._unread.add(event.job_id)
        self._fold(event)

    def apply(self, event: JobEvent) -> None:
        """Apply an event that was read from the broker."""
        if event.HasField("look_back"):
            if (awaited := self._awaited.get(event.look_back.token)) is not None:
                awaited.set()
            return
        if event.job_id in self._unread and event.HasField("created"):
            self._unread.remove(event.job_id)
            # Another gateway may have created the same job first; the first one counts.
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
        # A snapshot counts lines answered long ago, and lines of a stopped job are no work.
        if not event.HasField("snapshot") and job.stopped(event.at_unix_ns) is None:
            self._rate.add(event.at_unix_ns, max(job.completed + job.failed - answered, 0))

    @property
    def dropped_events(self) -> int:
        """Events of unknown jobs that were dropped for lack of room."""
        return self._book.dropped

    def lines_per_s(self, now_ns: int) -> float | None:
        """The cluster's rate of answers; None where it is not known."""
        return self._rate.per_s(now_ns) if self._working else None

    def standings(self, now_ns: int) -> dict[str, OpenJob]:
        """Return the entries for dealing of jobs with unanswered lines, by id."""
        return {job.id: standing for job in self._book if (standing := job.standing(now_ns)) is not None}

    def cancelled(self, job_id: str) -> bool:
        job = self._book.get(job_id)
        return job is not None and bool(job.cancel_unix_ns)

    @contextmanager
    def awaiting(self, token: int) -> Iterator[asyncio.Event]:
        """An event that is set once a `LookBack` with this token is read."""
        self._awaited[token] = asyncio.Event()
        try:
            yield self._awaited[token]
        finally:
            del self._awaited[token]

    def note(self, job_id: str, share: int, lines: int) -> ShareNote:
        """Which of a share's lines are answered, as far as this gateway knows."""
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
        """Return the jobs for which `wanted` holds, youngest first."""
        return sorted(filter(wanted, self._book), key=lambda job: (-job.created_unix_ns, job.id))

    def unfinished(self) -> list[Job]:
        return [job for job in self._book if job.finished is None]

    async def ready(self) -> None:
        """Wait until all jobs are known; raises BrokerUnavailable after `READY_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self.replayed.wait()
        except TimeoutError:
            text = "this gateway has just started and still reads from the broker which batches there are"
            raise BrokerUnavailable(text, retry_after_s=RETRY_AFTER_S) from None

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull when the cluster or the tenant has its full number of unfinished jobs. Jobs that this
        gateway is creating count."""
        unfinished, creating = self.unfinished(), self._creating
        if len(unfinished) + creating.total() >= MAX_UNFINISHED:
            raise QueueFull(f"{MAX_UNFINISHED} batches are not finished yet", retry_after_s=FULL_RETRY_AFTER_S)
        if sum(job.created.tenant == tenant for job in unfinished) + creating[tenant] >= MAX_TENANT_UNFINISHED:
            text = f"{MAX_TENANT_UNFINISHED} batches of tenant {tenant} are not finished yet"
            raise QueueFull(text, retry_after_s=FULL_RETRY_AFTER_S)

    @contextmanager
    def room(self, tenant: str) -> Iterator[None]:
        """Reserve room for a job that is created within the context; raises as `check_room` does."""
        self.check_room(tenant)
        self._creating[tenant] += 1
        try:
            yield
        finally:
            self._creating[tenant] -= 1
            if not self._creating[tenant]:
                del self._creating[tenant]

    async def seen(self, job_id: str) -> Job:
        """The job, waiting up to `SEEN_TIMEOUT_S` for it; raises BatchNotFound when it does not appear, and
        BrokerUnavailable while the view is not complete."""
        await self.ready()
        loop = asyncio.get_running_loop()
        # No gateway makes an id of another form, so it is not worth a wait.
        deadline_s = loop.time() + (SEEN_TIMEOUT_S if JOB_ID.fullmatch(job_id) else -1.0)
        while True:
            job = self._book.get(job_id)
            if job is not None:
                return job
            if loop.time() > deadline_s:
                raise BatchNotFound(f"no batch {quoted(job_id)} is known", param="batch_id")
            await asyncio.sleep(SEEN_POLL_S)
