"""Until this gateway knows all that was told of a job before it had a lane.

A lane's offset and its note should tell, but lanes have begun at offsets from long before, on a broker that had been
killed. What was done is told in the transaction that did it as well, and that is believed: a token is published in the
job's partition, and once it has been read, so has all that was told before.
"""

import asyncio
import secrets

import structlog

from libs.bus.work import Lane
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent, LookBack
from libs.contracts.topics import BATCH_JOBS
from libs.runtime.clock import Clock
from services.gateway.batch.view import JobView

log = structlog.get_logger()

LOOK_BACK_S = 30.0
"""How long a token may take, before another one is published."""


async def look_back(view: JobView, clock: Clock, lane: Lane, job_id: str, *, next_offset: int, note: str = "") -> None:
    """Before anything is done of the job for the record at `next_offset`; raises what makes the lane useless.

    As long as it takes: lanes of other partitions go on meanwhile.
    """
    # Who begins to read where jobs were told anew knows each of them only once all that was there has been read.
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
