"""Parsing of a request for a job, from REST or a topic. Pure, except for the ids that it draws."""

import hashlib
import re
import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from libs.contracts.batch_terms import check_endpoint, window_s
from libs.contracts.errors import InvalidRequest, PermissionDenied, TopicNotAllowed
from libs.contracts.http_errors import BodyTooLarge
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created
from libs.keys.book import TENANT_NAME
from libs.keys.table import ANYBODY, DEFAULT_TENANT, Caller
from services.gateway.request.schema import fit

IDEMPOTENCY_HEADER = "idempotency-key"
MAX_BODY_BYTES = 64 * 1024
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_PRIORITY = 100
_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_TOPIC = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")
# Prefixes of Fulcrum's own topics and Kafka's, which no client may read or write, whatever is allowed.
_NEVER = ("fulcrum.", "__")
OWN = "{tenant}"
TOPICS_VARIABLE = "FULCRUM_GATEWAY_BATCH_TOPICS"


class AllowedTopics:
    """The topics that a job may read and write.

    They are given by patterns in which * matches any text and {tenant} the caller's tenant.
    """

    def __init__(self, patterns: str) -> None:
        """`patterns` is the setting's comma-separated list; an empty one allows no topic."""
        self._patterns = list(filter(None, re.split(r"[ ,]+", patterns)))

    def need(self, topic: str, *, param: str, tenant: str | None = None) -> None:
        """Raise TopicNotAllowed that names the field and the patterns that would allow the topic.

        `tenant` restricts the caller to its own topics, which patterns without {tenant} cannot separate from
        others'. None leaves the caller unrestricted.
        """
        if topic.startswith(_NEVER):
            raise TopicNotAllowed(f"topic {topic!r} is not for jobs: it begins with {' or '.join(_NEVER)}", param=param)
        patterns = self._patterns if tenant is None else [each for each in self._patterns if _separates(each)]
        if not any(_matches(each, topic, tenant) for each in patterns):
            whose = f" of tenant {tenant}: patterns with {OWN} allow some" if tenant is not None else ""
            raise TopicNotAllowed(f"topic {topic!r} is not one that {TOPICS_VARIABLE} allows jobs{whose}", param=param)


def _separates(pattern: str) -> bool:
    """Return whether the topics that a pattern allows one tenant are closed to all others."""
    return OWN in pattern and f"{OWN}*" not in pattern and f"*{OWN}" not in pattern


def _matches(pattern: str, topic: str, tenant: str | None) -> bool:
    # Without a tenant, {tenant} matches any. With one, * matches no separator: a longer tenant's name might begin
    # with it.
    whose, some = (".*", ".*") if tenant is None else (re.escape(tenant), "[A-Za-z0-9]*")
    text = re.escape(pattern).replace(re.escape("*"), some).replace(re.escape(OWN), whose)
    return re.fullmatch(text, topic) is not None


_Key = Annotated[str, Meta(max_length=MAX_KEY_CHARS)]
_Value = Annotated[str, Meta(max_length=MAX_VALUE_CHARS)]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches, and of a record that submits a job."""

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

    Raise InvalidRequest that names the field, TopicNotAllowed, BodyTooLarge, or PermissionDenied for a priority
    above the caller's. `tenant` is from the caller's header. Without it, metadata's `tenant` and `priority` count
    if they can be meant that way, since OpenAI's clients may use either for their own ends.
    """
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body is over {MAX_BODY_BYTES} bytes", param="body")
    asked = fit(body, BatchRequest, _without_nulls)
    check_endpoint(asked.endpoint)
    if bool(asked.input_file_id) == bool(asked.input_topic):
        raise InvalidRequest("either input_file_id or input_topic says where the lines are", param="input_file_id")
    for name in ("input_topic", "output_topic", "error_topic"):
        topic = getattr(asked, name)
        if topic and not _TOPIC.fullmatch(topic):
            raise InvalidRequest(f"{name} must be the name of a topic", param=name)
        if topic:
            topics.need(topic, param=name, tenant=tenant if caller.role == "user" else None)
    metadata = asked.metadata or {}
    priority = _priority(metadata) if asked.priority is None else asked.priority
    if caller.priority is not None and priority > caller.priority:
        raise PermissionDenied(f"the key's batches have a priority of {caller.priority} at most", param="priority")
    return Created(
        input_file_id=asked.input_file_id,
        endpoint=asked.endpoint,
        completion_window=asked.completion_window,
        expires_unix_ns=now_ns + window_s(asked.completion_window) * 1_000_000_000,
        metadata=metadata,
        tenant=tenant or _tenant(metadata),
        priority=priority,
        input_topic=asked.input_topic,
        output_topic=asked.output_topic,
        error_topic=asked.error_topic,
        models=sorted(caller.models),
    )


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}


def job_id(key: str | None, tenant: str) -> str:
    """Return the id of a new job; a request with the same idempotency key always gets the same one. Raise
    InvalidRequest.
    """
    if key is None:
        return f"batch_{uuid.uuid4().hex}"
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        text = f"header {IDEMPOTENCY_HEADER} must have 1 to 255 characters of ASCII"
        raise InvalidRequest(text, param=IDEMPOTENCY_HEADER)
    return f"batch_{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:32]}"


def same_request(one: Created, other: Created) -> bool:
    """Return whether both requests are equal except for their times."""
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
