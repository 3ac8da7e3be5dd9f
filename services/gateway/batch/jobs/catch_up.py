"""Wait until this gateway has read every event of a job that was published before it got the job's lane.

A lane's committed offset and note alone are not enough: after a broker was killed, lanes have begun at offsets from
long before. The transaction that does a piece of work also publishes an event about it, so the events are the truth.
The gateway publishes a token in the job's partition; once it reads the token back, it has read all events before it.
"""

import asyncio
import secrets

import structlog

from libs.bus.work import Lane
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent, LookBack
from libs.contracts.topics import BATCH_JOBS
from libs.runtime.clock import Clock
from services.gateway.batch.jobs.view import JobView

log = structlog.get_logger()

LOOK_BACK_S = 30.0
"""A token that was not read back after this long is published again."""


async def look_back(view: JobView, clock: Clock, lane: Lane, job_id: str, *, next_offset: int, note: str = "") -> None:
    """Return once the gateway knows all earlier events of the job. Call it before work on the record at `next_offset`.

    Raises the error that ended the lane. It waits without a limit: lanes of other partitions go on meanwhile.
    """
    # A gateway that begins at the snapshots knows every job only after it has read all that was there at its start.
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
                log.warning("a lane waits to know what was done before it", job=job_id, partition=lane.partition)
