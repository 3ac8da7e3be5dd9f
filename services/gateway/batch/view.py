"""Every job of the cluster as this gateway sees it: a moment behind the broker."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from libs.bus.work import WorkBus
from libs.contracts.errors import BatchNotFound, BrokerUnavailable, QueueFull, quoted
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent
from libs.contracts.topics import BATCH_JOBS
from libs.policy.batch.deal import Standing
from libs.runtime.backoff import Backoff
from services.gateway.batch.foretell import LineRate
from services.gateway.batch.job import Job
from services.gateway.batch.jobs import JobBook
from services.gateway.batch.note import ShareNote

KEEPERS = "batch-keepers.v2"
"""The group that works on the jobs topic, named with its version: those of different ones would fence each other. Where
it has committed is where the story of all jobs begins."""
READY_TIMEOUT_S = 5.0
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
RETRY_AFTER_S = 2.0
FULL_RETRY_AFTER_S = 60.0
MAX_UNFINISHED = 1_000
"""Jobs of the cluster that have not ended. Several gateways that take jobs in one moment may pass it by a few."""
MAX_TENANT_UNFINISHED = 250
"""Of one tenant, so that others find room."""
SEEN_TIMEOUT_S = 2.0
"""How long one who asks waits for what another gateway may have published just now."""
SEEN_POLL_S = 0.02
JOB_ID = re.compile(r"batch_[0-9a-f]{32}")


class JobView:
    """Follows the jobs topic."""

    def __init__(self, bus: WorkBus) -> None:
        self._bus = bus
        self._book = JobBook()
        self._rate = LineRate()
        self._working: set[str] = set()
        """Jobs that runners have lines of."""
        self._creating: Counter[str] = Counter()
        """By tenant, jobs that this gateway is about to create."""
        self._unread: set[str] = set()
        """Jobs that this gateway has created and not read of yet."""
        self._awaited: dict[int, asyncio.Event] = {}
        """By token, those who wait until this one has been read."""
        self.replayed = asyncio.Event()
        """All events have been read that were there at start: what is not known is not there."""

    async def follow(self) -> None:
        """Read events until cancelled."""
        since = await self._begins()
        async for record in self._bus.follow(BATCH_JOBS, since, on_replayed=self.replayed.set):
            assert isinstance(record.value, JobEvent)
            self.apply(record.value)

    async def _begins(self) -> list[int]:
        """Where to begin to read: what was there before is told again after it."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while True:
            try:
                return await self._bus.committed(BATCH_JOBS, KEEPERS)
            except BrokerUnavailable:
                await asyncio.sleep(backoff.next_s())

    def published(self, event: JobEvent) -> None:
        """Take an event that this gateway has put on the broker: who was told of it may ask before it can be read
        there, which takes long behind a transaction whose gateway was killed."""
        if event.HasField("created") and not self.knows(event.job_id):
            self._unread.add(event.job_id)
        self._fold(event)

    def apply(self, event: JobEvent) -> None:
        """Take an event as it is read."""
        if event.HasField("look_back"):
            if (awaited := self._awaited.get(event.look_back.token)) is not None:
                awaited.set()
            return
        if event.job_id in self._unread and event.HasField("created"):
            self._unread.remove(event.job_id)
            # Another gateway may have created the same one first, and that is what counts.
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
        # A snapshot tells what was answered long ago, and a stopped job's lines are no work.
        if not event.HasField("snapshot") and job.stopped(event.at_unix_ns) is None:
            self._rate.add(event.at_unix_ns, max(job.completed + job.failed - answered, 0))

    @property
    def dropped_events(self) -> int:
        """Of jobs that were not known, for which there was no room."""
        return self._book.dropped

    def lines_per_s(self, now_ns: int) -> float | None:
        """That the cluster answers; None where that is not known."""
        return self._rate.per_s(now_ns) if self._working else None

    def standings(self, now_ns: int) -> dict[str, Standing]:
        """Jobs that have lines to be answered, by id."""
        return {job.id: standing for job in self._book if (standing := job.standing(now_ns)) is not None}

    def cancelled(self, job_id: str) -> bool:
        """Whether its client has cancelled the job."""
        job = self._book.get(job_id)
        return job is not None and bool(job.cancel_unix_ns)

    @contextmanager
    def awaiting(self, token: int) -> Iterator[asyncio.Event]:
        """Is set once a `LookBack` of this token has been read."""
        self._awaited[token] = asyncio.Event()
        try:
            yield self._awaited[token]
        finally:
            del self._awaited[token]

    def note(self, job_id: str, share: int, lines: int) -> ShareNote:
        """Which of a share's lines are answered, as far as is known here."""
        job = self._book.get(job_id)
        if job is not None and (job.finished or job.counts.whole(share)):
            return ShareNote(lines, answered=(1 << lines) - 1)
        known = job.counts.open.get(share) if job is not None else None
        return ShareNote.read(known.note if known is not None else "", lines)

    def get(self, job_id: str) -> Job | None:
        """The job, where it is known."""
        return self._book.get(job_id)

    def knows(self, job_id: str) -> bool:
        """Whether there is such a job."""
        return self._book.get(job_id) is not None

    def jobs(self) -> list[Job]:
        """The youngest first."""
        return sorted(self._book, key=lambda job: (-job.created_unix_ns, job.id))

    def unfinished(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self._book if job.finished is None]

    async def ready(self) -> None:
        """Until it knows all jobs; raises BrokerUnavailable when that takes too long."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self.replayed.wait()
        except TimeoutError:
            text = "this gateway has just started and still reads from the broker which batches there are"
            raise BrokerUnavailable(text, retry_after_s=RETRY_AFTER_S) from None

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull when the cluster, or the tenant, has as many unfinished jobs as it may, with those
        that this gateway is about to create."""
        unfinished, creating = self.unfinished(), self._creating
        if len(unfinished) + creating.total() >= MAX_UNFINISHED:
            raise QueueFull(f"{MAX_UNFINISHED} batches are not finished yet", retry_after_s=FULL_RETRY_AFTER_S)
        if sum(job.created.tenant == tenant for job in unfinished) + creating[tenant] >= MAX_TENANT_UNFINISHED:
            text = f"{MAX_TENANT_UNFINISHED} batches of tenant {tenant} are not finished yet"
            raise QueueFull(text, retry_after_s=FULL_RETRY_AFTER_S)

    @contextmanager
    def room(self, tenant: str) -> Iterator[None]:
        """Room for a job that is created meanwhile; raises as `check_room` does."""
        self.check_room(tenant)
        self._creating[tenant] += 1
        try:
            yield
        finally:
            self._creating[tenant] -= 1
            if not self._creating[tenant]:
                del self._creating[tenant]

    async def seen(self, job_id: str) -> Job:
        """The job, now or a little later; raises BatchNotFound when it does not appear, and BrokerUnavailable while
        that cannot be known."""
        await self.ready()
        loop = asyncio.get_running_loop()
        # What no gateway can have named is not waited for.
        deadline_s = loop.time() + (SEEN_TIMEOUT_S if JOB_ID.fullmatch(job_id) else -1.0)
        while True:
            job = self._book.get(job_id)
            if job is not None:
                return job
            if loop.time() > deadline_s:
                raise BatchNotFound(f"no batch {quoted(job_id)} is known", param="batch_id")
            await asyncio.sleep(SEEN_POLL_S)
