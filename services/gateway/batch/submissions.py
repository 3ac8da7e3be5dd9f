"""Jobs that clients submit on a topic: each record becomes one, in a transaction with the record's offset."""

import hashlib

from libs.bus.port import Record
from libs.bus.work import Lane, Produced
from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS
from libs.runtime.clock import Clock
from services.gateway.batch.asked import read_request
from services.gateway.batch.view import JobView

DEFAULT_WINDOW = "24h"


class Submissions:
    """Handles lanes of the topic."""

    def __init__(self, view: JobView, clock: Clock, cluster: str) -> None:
        self._view = view
        self._clock = clock
        self._cluster = cluster

    async def work(self, lane: Lane) -> None:
        """Make a job of each record, until cancelled; of one that asks for none, or for one too many, a job that has
        failed and says why."""
        await self._view.replayed.wait()
        async for batch in lane.batches():
            for record in batch:
                assert isinstance(record.value, pb.Submission)
                events: list[Produced] = [(BATCH_JOBS, event) for event in self._events(record, record.value.body)]
                await lane.commit(events, next_offset=record.offset + 1)

    def _events(self, record: Record, body: bytes) -> list[pb.JobEvent]:
        """None where the record has become a job already: a broker may say that less is done than is."""
        now_ns = self._clock.now_ns()
        place = f"{self._cluster}/{record.partition}/{record.offset}/".encode() + body
        job_id = f"batch_{hashlib.sha256(place).hexdigest()[:32]}"
        if self._view.knows(job_id):
            return []
        created: pb.Created | None = None
        try:
            created = read_request(body, now_ns=now_ns)
            self._view.check_room(created.tenant)
        except (InvalidRequest, QueueFull) as error:
            reason = f"{error.param}: {error.message}" if error.param else error.message
            failed = pb.Finished(outcome=pb.OUTCOME_FAILED, error_code=error.code, error_message=reason)
            created = created or pb.Created(completion_window=DEFAULT_WINDOW, expires_unix_ns=now_ns)
            return [
                pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=created),
                pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, finished=failed),
            ]
        return [pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=created)]
