"""The start of a job: parsing of its request, copying of its topic to a file, and counting of the file's lines.

Requests arrive over HTTP or in a topic. Parsing is pure except for new ids.
"""

import hashlib
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from libs.bus.port import Record
from libs.bus.work import Lane, WorkBus
from libs.contracts.classes import check_endpoint, window_s
from libs.contracts.errors import (
    BodyTooLarge,
    FulcrumError,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    QuotaUsed,
    StoreFull,
    StoreUnavailable,
    TopicNotAllowed,
    TopicNotFound,
)
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.port import FileStore
from libs.keys.book import TENANT_NAME
from libs.keys.table import ANYBODY, DEFAULT_TENANT, Caller
from libs.runtime.clock import Clock
from services.gateway.batch.job import Job
from services.gateway.batch.lines import MAX_ERROR_TEXT_CHARS, count
from services.gateway.batch.upload import PURPOSES
from services.gateway.batch.view import JobView, look_back
from services.gateway.request.schema import fit

IDEMPOTENCY_HEADER = "idempotency-key"
MAX_BODY_BYTES = 64 * 1024
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_PRIORITY = 100
_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_TOPIC = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")
# The prefixes of Fulcrum's and Kafka's own topics, which clients may never read or write.
_NEVER = ("fulcrum.", "__")
OWN = "{tenant}"
TOPICS_VARIABLE = "FULCRUM_GATEWAY_BATCH_TOPICS"


class AllowedTopics:
    """The topics that jobs may read and write.

    They are described by patterns, in which * stands for any text and {tenant} for the caller's tenant.
    """

    def __init__(self, patterns: str) -> None:
        """Create the set from the setting's comma-separated patterns. An empty string allows no topic."""
        self._patterns = list(filter(None, re.split(r"[ ,]+", patterns)))

    def need(self, topic: str, *, param: str, tenant: str | None = None) -> None:
        """Raise TopicNotAllowed, which names the field, if no pattern allows the topic.

        A caller with a `tenant` may use only patterns with {tenant}, because others would let tenants use each other's
        topics. A tenant of None is unrestricted.
        """
        if topic.startswith(_NEVER):
            raise TopicNotAllowed(f"topic {topic!r} is not for jobs: it begins with {' or '.join(_NEVER)}", param=param)
        patterns = self._patterns if tenant is None else [each for each in self._patterns if _separates(each)]
        if not any(_matches(each, topic, tenant) for each in patterns):
            whose = f" of tenant {tenant}: patterns with {OWN} allow some" if tenant is not None else ""
            raise TopicNotAllowed(f"topic {topic!r} is not one that {TOPICS_VARIABLE} allows jobs{whose}", param=param)


def _separates(pattern: str) -> bool:
    """Return whether no two tenants can use the same topic under this pattern."""
    return OWN in pattern and f"{OWN}*" not in pattern and f"*{OWN}" not in pattern


def _matches(pattern: str, topic: str, tenant: str | None) -> bool:
    # Without a tenant, {tenant} stands for any name. With one, * matches no separator: a longer tenant name could begin
    # with this one.
    whose, some = (".*", ".*") if tenant is None else (re.escape(tenant), "[A-Za-z0-9]*")
    text = re.escape(pattern).replace(re.escape("*"), some).replace(re.escape(OWN), whose)
    return re.fullmatch(text, topic) is not None


_Key = Annotated[str, Meta(max_length=MAX_KEY_CHARS)]
_Value = Annotated[str, Meta(max_length=MAX_VALUE_CHARS)]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches and of a record in the submission topic."""

    endpoint: str
    input_file_id: str = ""
    completion_window: str = "24h"
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=MAX_METADATA)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    input_topic: str = ""
    output_topic: str = ""
    error_topic: str = ""


def read_request(
    body: bytes, *, topics: AllowedTopics, tenant: str = "", caller: Caller = ANYBODY, now_ns: int
) -> Created:
    """Parse a request for a job.

    Raise InvalidRequest, which names the field, TopicNotAllowed, BodyTooLarge, or PermissionDenied if the priority
    exceeds the caller's. `tenant` is the one in the caller's header. Without it, `tenant` and `priority` are read from
    the metadata if they are valid there, because OpenAI's clients may use these keys for other purposes.
    """
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body is over {MAX_BODY_BYTES} bytes", param="body")
    request = fit(body, BatchRequest, _without_nulls)
    check_endpoint(request.endpoint)
    if bool(request.input_file_id) == bool(request.input_topic):
        raise InvalidRequest("name either input_file_id or input_topic as the source of lines", param="input_file_id")
    for name in ("input_topic", "output_topic", "error_topic"):
        topic = getattr(request, name)
        if topic and not _TOPIC.fullmatch(topic):
            raise InvalidRequest(f"{name} must be the name of a topic", param=name)
        if topic:
            topics.need(topic, param=name, tenant=tenant if caller.role == "user" else None)
    metadata = request.metadata or {}
    priority = _priority(metadata) if request.priority is None else request.priority
    if caller.priority is not None and priority > caller.priority:
        raise PermissionDenied(f"the key's batches have a priority of {caller.priority} at most", param="priority")
    return Created(
        input_file_id=request.input_file_id,
        endpoint=request.endpoint,
        completion_window=request.completion_window,
        expires_unix_ns=now_ns + window_s(request.completion_window) * 1_000_000_000,
        metadata=metadata,
        tenant=tenant or _tenant(metadata),
        priority=priority,
        input_topic=request.input_topic,
        output_topic=request.output_topic,
        error_topic=request.error_topic,
        models=sorted(caller.models),
    )


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}


def job_id(key: str | None, tenant: str) -> str:
    """Return the id of a new job. Requests with the same idempotency key get the same id. Raise InvalidRequest."""
    if key is None:
        return f"batch_{uuid.uuid4().hex}"
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        text = f"header {IDEMPOTENCY_HEADER} must have 1 to 255 characters of ASCII"
        raise InvalidRequest(text, param=IDEMPOTENCY_HEADER)
    return f"batch_{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:32]}"


def same_request(one: Created, other: Created) -> bool:
    """Return whether two requests are equal apart from their time."""
    again = Created()
    again.CopyFrom(other)
    again.expires_unix_ns = one.expires_unix_ns
    return again == one


def _tenant(metadata: dict[str, str]) -> str:
    found = metadata.get("tenant", "")
    return found if TENANT_NAME.fullmatch(found) else DEFAULT_TENANT


def _priority(metadata: dict[str, str]) -> int:
    text = metadata.get("priority", "")
    found = int(text) if re.fullmatch(r"-?[0-9]{1,3}", text) else 0
    return found if abs(found) <= MAX_PRIORITY else 0


INPUT = re.compile(r"file-(.+)-input-[0-9a-f]{16}")
"""The pattern of the file id of a topic's copy. Group 1 is the id of its job."""
WRITE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Begun:
    started: pb.Started
    repeats: Sequence[int]
    """The indices of lines that repeat an earlier custom_id, in order."""


async def begin(
    bus: WorkBus, files: FileStore, job: Job, *, max_lines: int, max_file_bytes: int, bound: str = "a batch may have"
) -> Begun | pb.Finished:
    """Count a job's lines. Return Finished if there are none or too many.

    `bound` says in error messages which bound `max_lines` is. Raise FileNotFound, FileTooLarge or TopicNotFound, which
    are final. Raise StoreFull, StoreUnavailable or BrokerUnavailable, after which the caller may try again.
    """
    file_id = job.created.input_file_id
    if job.created.input_topic:
        # A random name, so that a keeper that has been replaced but does not know it cannot write to the new keeper's
        # file.
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
    """Copy a job's topic to a file of its tenant, one line per record, in order of partition and offset.

    Raise TopicNotFound or FileTooLarge, which are final. Raise StoreFull or BrokerUnavailable, after which the caller
    may try again.
    """
    topic = created.input_topic
    async with files.draft(file_id, max_bytes=max_bytes) as draft:
        buffer = bytearray()
        async for value in bus.values(topic):
            # In JSON, line breaks occur only between tokens, where a space is equivalent.
            buffer += value.replace(b"\n", b" ") + b"\n"
            if len(buffer) >= WRITE_BYTES:
                await draft.write(bytes(buffer))
                buffer.clear()
        await draft.write(bytes(buffer))
        await draft.keep(name=f"{topic}.jsonl", purpose=PURPOSES[0], tenant=created.tenant)


def cannot_begin(error: FulcrumError, created: pb.Created) -> pb.Finished:
    """Return the end of a job whose lines cannot be counted because of `error`."""
    # The error's parameter is that of the store, not the field of the job's request.
    param = error.param if isinstance(error, TopicNotFound) else _input_field(created)
    return failed(error.code, error.message, param)


def failed(code: str, message: str, param: str | None) -> pb.Finished:
    """Return the end of a job that cannot begin. `param` is the faulty field of its request."""
    text = message[:MAX_ERROR_TEXT_CHARS]
    return pb.Finished(outcome=pb.OUTCOME_FAILED, error_code=code, error_message=text, error_param=param or "")


def _input_field(created: pb.Created) -> str:
    return "input_topic" if created.input_topic else "input_file_id"


DEFAULT_WINDOW = "24h"


class Submissions:
    """A handler of the lanes of the submission topic, which creates a job for each record."""

    def __init__(
        self,
        view: JobView,
        clock: Clock,
        cluster: str,
        topics: AllowedTopics,
        check: Callable[[pb.Created], Awaitable[None]] | None = None,
    ) -> None:
        """Create the handler. `check` raises an error if there may be no room for a job's answers."""
        self._check = check
        self._view = view
        self._topics = topics
        self._clock = clock
        self._cluster = cluster

    async def work(self, lane: Lane) -> None:
        """Create a job for each record until cancelled.

        An invalid record, or one above the bound on jobs, becomes a failed job with the reason.
        """
        await self._view.replayed.wait()
        async for batch in lane.batches():
            for record in batch:
                assert isinstance(record.value, pb.Submission)
                body = record.value.body
                job_id = self._job_id(record, body)
                if record.offset < lane.end:
                    # After a broker failed, the committed offset may be older than the last one that was committed.
                    await look_back(self._view, self._clock, lane, job_id, next_offset=record.offset)
                events = [] if self._view.knows(job_id) else await self._events(job_id, body)
                await lane.commit([(BATCH_JOBS, event) for event in events], next_offset=record.offset + 1)

    def _job_id(self, record: Record, body: bytes) -> str:
        # Deterministic, so that a record that is read again gets the same id.
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
