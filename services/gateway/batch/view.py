"""Every job of the cluster as this gateway sees it: a moment behind the broker."""

import asyncio
from collections.abc import Callable

from libs.bus.work import WorkBus
from libs.contracts.errors import BatchNotFound
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent
from libs.contracts.topics import BATCH_JOBS
from services.gateway.batch.jobs import Job, JobBook

SEEN_TIMEOUT_S = 2.0
"""How long one who asks waits for what another gateway may have published just now."""
SEEN_POLL_S = 0.02


class JobView:
    """Follows the jobs topic."""

    def __init__(self, bus: WorkBus) -> None:
        self._bus = bus
        self._book = JobBook()

    async def follow(self) -> None:
        """Read events until cancelled."""
        async for record in self._bus.follow(BATCH_JOBS):
            assert isinstance(record.value, JobEvent)
            self._book.apply(record.value)

    def cancelled(self, job_id: str) -> bool:
        """Whether its client has cancelled the job."""
        job = self._book.get(job_id)
        return job is not None and bool(job.cancel_unix_ns)

    def jobs(self) -> list[Job]:
        """The youngest first."""
        return sorted(self._book, key=lambda job: (-job.created_unix_ns, job.id))

    async def seen(self, job_id: str, holds: Callable[[Job], object] = bool) -> Job:
        """The job, once `holds` of it or a little later; raises BatchNotFound when it does not appear."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SEEN_TIMEOUT_S
        while True:
            job = self._book.get(job_id)
            if job is not None and (holds(job) or loop.time() > deadline_s):
                return job
            if loop.time() > deadline_s:
                raise BatchNotFound(f"no batch {job_id!r} is known", param="batch_id")
            await asyncio.sleep(SEEN_POLL_S)
