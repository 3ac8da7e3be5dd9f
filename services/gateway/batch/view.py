"""Every job of the cluster as this gateway sees it: a moment behind the broker."""

import asyncio
import re
from collections.abc import Callable

from libs.bus.work import WorkBus
from libs.contracts.errors import BatchNotFound
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent
from libs.contracts.topics import BATCH_JOBS
from services.gateway.batch.deal import Standing
from services.gateway.batch.foretell import LineRate
from services.gateway.batch.jobs import Job, JobBook

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

    async def follow(self) -> None:
        """Read events until cancelled."""
        async for record in self._bus.follow(BATCH_JOBS):
            assert isinstance(record.value, JobEvent)
            self.apply(record.value)

    def apply(self, event: JobEvent) -> None:
        """Take an event."""
        before = self._book.get(event.job_id)
        answered = before.completed + before.failed if before else 0
        job = self._book.apply(event)
        if job is None:
            return
        standing = job.standing()
        if standing is None:
            self._working.discard(job.id)
        elif standing.open_lines:
            if not self._working:
                self._rate.work_begins(event.at_unix_ns)
            self._working.add(job.id)
        self._rate.add(event.at_unix_ns, max(job.completed + job.failed - answered, 0))

    def lines_per_s(self, now_ns: int) -> float | None:
        """That the cluster answers; None where that is not known."""
        return self._rate.per_s(now_ns) if self._working else None

    def standings(self) -> dict[str, Standing]:
        """Jobs that have lines to be answered, by id."""
        return {job.id: standing for job in self._book if (standing := job.standing()) is not None}

    def cancelled(self, job_id: str) -> bool:
        """Whether its client has cancelled the job."""
        job = self._book.get(job_id)
        return job is not None and bool(job.cancel_unix_ns)

    def jobs(self) -> list[Job]:
        """The youngest first."""
        return sorted(self._book, key=lambda job: (-job.created_unix_ns, job.id))

    def unfinished(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self._book if job.finished is None]

    async def seen(self, job_id: str, holds: Callable[[Job], object] = bool) -> Job:
        """The job, once `holds` of it or a little later; raises BatchNotFound when it does not appear."""
        loop = asyncio.get_running_loop()
        # What no gateway can have named is not waited for.
        deadline_s = loop.time() + (SEEN_TIMEOUT_S if JOB_ID.fullmatch(job_id) else -1.0)
        while True:
            job = self._book.get(job_id)
            if job is not None and (holds(job) or loop.time() > deadline_s):
                return job
            if loop.time() > deadline_s:
                raise BatchNotFound(f"no batch {job_id!r} is known", param="batch_id")
            await asyncio.sleep(SEEN_POLL_S)
