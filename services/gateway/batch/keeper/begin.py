"""The start of a job: a topic of lines is copied into a file, and the file's lines are counted."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from libs.bus.work import WorkBus
from libs.contracts.errors import FulcrumError, TopicNotFound
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_RESULTS
from libs.filestore.port import FileStore
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.lines.answers import MAX_ERROR_TEXT_CHARS
from services.gateway.batch.lines.repeats import count
from services.gateway.batch.lines.upload import PURPOSES

INPUT = re.compile(r"file-(.+)-input-[0-9a-f]{16}")
"""The id of a topic's copy; group 1 is the id of its job."""
WRITE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Begun:
    started: pb.Started
    repeats: Sequence[int]
    """The indices of lines that repeat an earlier custom_id."""


async def begin(
    bus: WorkBus, files: FileStore, job: Job, *, max_lines: int, max_file_bytes: int, bound: str = "a batch may have"
) -> Begun | pb.Finished:
    """Count a job's lines; return Finished if there are none or too many. `bound` names whose bound `max_lines` is.

    Raise FileNotFound, FileTooLarge or TopicNotFound, which are final. Raise StoreFull, StoreUnavailable or
    BrokerUnavailable, after which the caller may try again.
    """
    file_id = job.created.input_file_id
    if job.created.input_topic:
        # A random name: a keeper that was replaced and does not know it writes no file that another one reads.
        file_id = f"file-{job.id}-input-{secrets.token_hex(8)}"
        await spool(bus, files, job.created, file_id, max_bytes=max_file_bytes)
    found = await count(files, file_id)
    if not 0 < found.lines <= max_lines:
        code, text = ("too_many_lines", "more lines than") if found.lines else ("empty_file", "no line, of at most")
        return failed(code, f"the input has {text} {max_lines} that {bound}", _input_field(job.created))
    since = await bus.ends(BATCH_RESULTS)
    started = pb.Started(lines=found.lines, results_since=since, input_file_id=file_id, repeats=bool(found.repeats))
    return Begun(started, found.repeats)


async def spool(bus: WorkBus, files: FileStore, created: pb.Created, file_id: str, *, max_bytes: int) -> None:
    """Copy a job's topic into a file of its tenant, one line per record, in the order of partitions and offsets.

    Raise TopicNotFound or FileTooLarge, or StoreFull or BrokerUnavailable, after which the caller may try again.
    """
    topic = created.input_topic
    async with files.draft(file_id, max_bytes=max_bytes) as draft:
        buffer = bytearray()
        async for value in bus.values(topic):
            # JSON has line ends only between its tokens, where a blank means the same.
            buffer += value.replace(b"\n", b" ") + b"\n"
            if len(buffer) >= WRITE_BYTES:
                await draft.write(bytes(buffer))
                buffer.clear()
        await draft.write(bytes(buffer))
        await draft.keep(name=f"{topic}.jsonl", purpose=PURPOSES[0], tenant=created.tenant)


def cannot_begin(error: FulcrumError, created: pb.Created) -> pb.Finished:
    """Return the end of a job whose lines can never be counted because of `error`."""
    # The store's error names the file by the store's own parameter, not by the field of the job's request.
    param = error.param if isinstance(error, TopicNotFound) else _input_field(created)
    return failed(error.code, error.message, param)


def failed(code: str, message: str, param: str | None) -> pb.Finished:
    """Return the end of a job that cannot begin. `param` is the field of its request at fault."""
    text = message[:MAX_ERROR_TEXT_CHARS]
    return pb.Finished(outcome=pb.OUTCOME_FAILED, error_code=code, error_message=text, error_param=param or "")


def _input_field(created: pb.Created) -> str:
    return "input_topic" if created.input_topic else "input_file_id"
