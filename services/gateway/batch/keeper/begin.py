"""The start of a job: a topic of lines is copied into a file, and the file's lines are counted."""

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from libs.bus.port import Record
from libs.bus.work import Lane, WorkBus
from libs.contracts.errors import (
    FulcrumError,
    InvalidRequest,
    QueueFull,
    QuotaUsed,
    StoreFull,
    StoreUnavailable,
    TopicNotFound,
)
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.port import FileStore
from libs.runtime.clock import Clock
from services.gateway.batch.jobs.catch_up import look_back
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.jobs.order import AllowedTopics, read_request
from services.gateway.batch.jobs.view import JobView
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
