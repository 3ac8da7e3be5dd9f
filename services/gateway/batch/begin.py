"""How a job begins: a topic of lines becomes a file, and the file's lines are counted."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from libs.bus.work import WorkBus
from libs.contracts.errors import FulcrumError, TopicNotFound
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_RESULTS
from libs.filestore.port import FileStore
from services.gateway.batch.answers import MAX_TOLD_CHARS
from services.gateway.batch.count import count
from services.gateway.batch.job import Job
from services.gateway.batch.spool import spool

INPUT = re.compile(r"file-(.+)-input-[0-9a-f]{16}")
"""The id of a copy of a topic, with that of its job."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A job whose lines are known."""

    started: pb.Started
    repeats: Sequence[int]
    """Places of lines whose custom_id an earlier one has."""


async def begin(
    bus: WorkBus, files: FileStore, job: Job, *, max_lines: int, max_file_bytes: int
) -> Begun | pb.Finished:
    """Count its lines; Finished where there are none, or too many.

    Raises FileNotFound, FileTooLarge and TopicNotFound where that can never be done, StoreFull, StoreUnavailable and
    BrokerUnavailable where it may be tried again.
    """
    file_id = job.created.input_file_id
    if job.created.input_topic:
        # Drawn by chance: a keeper that has been replaced and does not know writes no file that another one reads.
        file_id = f"file-{job.id}-input-{secrets.token_hex(8)}"
        await spool(bus, files, job.created.input_topic, file_id, max_bytes=max_file_bytes)
    found = await count(files, file_id)
    if not 0 < found.lines <= max_lines:
        code, text = ("too_many_lines", "more lines than") if found.lines else ("empty_file", "no line, of at most")
        return failed(code, f"the input has {text} {max_lines} that a batch may have", _input_field(job.created))
    since = await bus.ends(BATCH_RESULTS)
    started = pb.Started(lines=found.lines, results_since=since, input_file_id=file_id, repeats=bool(found.repeats))
    return Begun(started, found.repeats)


def cannot_begin(error: FulcrumError, created: pb.Created) -> pb.Finished:
    """A job that can never be counted, because of this."""
    # A store names a file by how the store was asked for it.
    param = error.param if isinstance(error, TopicNotFound) else _input_field(created)
    return failed(error.code, error.message, param)


def failed(code: str, message: str, param: str | None) -> pb.Finished:
    """A job that cannot begin. `param`: the field of its request that this is about."""
    text = message[:MAX_TOLD_CHARS]
    return pb.Finished(outcome=pb.OUTCOME_FAILED, error_code=code, error_message=text, error_param=param or "")


def _input_field(created: pb.Created) -> str:
    return "input_topic" if created.input_topic else "input_file_id"
