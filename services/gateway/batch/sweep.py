"""Files of jobs that nobody needs any more, also those that a gateway had written when it died."""

from collections.abc import Callable
from contextlib import suppress

from libs.contracts.errors import FileNotFound
from libs.filestore.port import FileInfo, FileStore
from services.gateway.batch.begin import INPUT
from services.gateway.batch.job import Job
from services.gateway.batch.parts import PART, PART_PURPOSE


async def sweep(files: FileStore, find: Callable[[str], Job | None]) -> None:
    """Remove them; `find`: a job by its id. Files of jobs that it does not know stay."""
    for info in await files.infos():
        if _is_left(info, find):
            with suppress(FileNotFound):
                await files.delete(info.id)


def _is_left(info: FileInfo, find: Callable[[str], Job | None]) -> bool:
    """A part of a job that has ended, or a copy of a topic that its job did not begin with."""
    if info.purpose == PART_PURPOSE:
        part = PART.fullmatch(info.id)
        job = find(part[1]) if part else None
        return job is not None and job.finished is not None
    copy = INPUT.fullmatch(info.id)
    job = find(copy[1]) if copy else None
    return job is not None and bool(job.started or job.finished) and job.input_file_id != info.id
