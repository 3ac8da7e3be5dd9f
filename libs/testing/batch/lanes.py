"""What tests of batch lanes tell and read."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS
from libs.filestore.local import LocalFiles
from libs.testing.batch.work import MemoryWork

HOUR_NS = 3_600 * 10**9


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While they run; none may end by itself."""
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def created(job_id: str, **own: Any) -> pb.JobEvent:
    """A new job of ann's, with `own` fields."""
    now_ns = time.time_ns()
    asked = pb.Created(**{"endpoint": "/v1/completions", "expires_unix_ns": now_ns + HOUR_NS, "tenant": "ann", **own})
    return pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=asked)


def job_events(work: MemoryWork) -> list[pb.JobEvent]:
    """All published events of jobs, in order."""
    return [event for event in work.values_of(BATCH_JOBS) if isinstance(event, pb.JobEvent)]


async def store(tmp_path: Path, *, max_bytes: int = 10**6) -> LocalFiles:
    """With one file of one line, `file-1`."""
    files = LocalFiles(tmp_path / "files", max_bytes=max_bytes)
    async with files.draft("file-1", max_bytes=999) as draft:
        await draft.write(b'{"custom_id": "a"}\n')
        await draft.keep(name="f", purpose="batch")
    return files
