"""Jobs that clients submit on a topic. Each record becomes a job in one transaction with the record's offset."""

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress

from libs.bus.port import Record
from libs.bus.work import Lane
from libs.contracts.errors import InvalidRequest, QueueFull, QuotaUsed, StoreFull, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS
from libs.runtime.clock import Clock
from services.gateway.batch.jobs.catch_up import look_back
from services.gateway.batch.jobs.order import AllowedTopics, read_request
from services.gateway.batch.jobs.view import JobView
from services.gateway.batch.keeper.begin import failed

DEFAULT_WINDOW = "24h"


class Submissions:
    """The handler of the submission topic's lanes."""

    def __init__(
        self,
        view: JobView,
        clock: Clock,
        cluster: str,
        topics: AllowedTopics,
        check: Callable[[pb.Created], Awaitable[None]] | None = None,
    ) -> None:
        """`check` raises if there may be no room for a job's answers."""
        self._check = check
        self._view = view
        self._topics = topics
        self._clock = clock
        self._cluster = cluster

    async def work(self, lane: Lane) -> None:
        """Create a job for each record until cancelled.

        An invalid record, or one above the bound on jobs, becomes a failed job that holds the reason.
        """
        await self._view.replayed.wait()
        async for batch in lane.batches():
            for record in batch:
                assert isinstance(record.value, pb.Submission)
                body = record.value.body
                job_id = self._job_id(record, body)
                if record.offset < lane.end:
                    # A broker may say that less is done than is.
                    await look_back(self._view, self._clock, lane, job_id, next_offset=record.offset)
                events = [] if self._view.knows(job_id) else await self._events(job_id, body)
                await lane.commit([(BATCH_JOBS, event) for event in events], next_offset=record.offset + 1)

    def _job_id(self, record: Record, body: bytes) -> str:
        # Deterministic, so a record that is read again gets the same id.
        place = f"{self._cluster}/{record.partition}/{record.offset}/".encode() + body
        return f"batch_{hashlib.sha256(place).hexdigest()[:32]}"

    async def _events(self, job_id: str, body: bytes) -> list[pb.JobEvent]:
        now_ns = self._clock.now_ns()
        created: pb.Created | None = None
        try:
            created = read_request(body, topics=self._topics, now_ns=now_ns)
            self._view.check_room(created.tenant)
            if self._check is not None:
                with suppress(StoreUnavailable):  # the job waits for the store when it begins
                    await self._check(created)
        except (InvalidRequest, QueueFull, QuotaUsed, StoreFull) as error:
            reason = f"{error.param}: {error.message}" if error.param else error.message
            created = created or pb.Created(completion_window=DEFAULT_WINDOW, expires_unix_ns=now_ns)
            return [
                pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=created),
                pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, finished=failed(error.code, reason, error.param)),
            ]
        return [pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=created)]
