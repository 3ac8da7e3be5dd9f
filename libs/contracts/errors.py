"""The tree of errors. Each error is mapped once to HTTP (OpenAI's shape) and once to gRPC, in the table below.

Over gRPC the class and message survive (in the status details as "code: message"); `param` and the traceback do not.
"""

import math
import random
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

# Statuses are strings, since importing grpc would take a fifth of a command's time.
GrpcStatus = Literal[
    "INTERNAL",
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "DATA_LOSS",
]
ErrorType = Literal[
    "server_error",
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "service_unavailable_error",
]
Wire = tuple[str, ErrorType, int, GrpcStatus]
"""The code, type, HTTP status and gRPC status of an error."""

# The longest Retry-After that clients wait for by themselves; openai 3.51.0 for Python has the same limit.
MAX_RETRY_WAIT_S: Final = 120.0

SERVER: Final = "server_error"
INVALID: Final = "invalid_request_error"
AUTH: Final = "authentication_error"
RATE: Final = "rate_limit_error"
AWAY: Final = "service_unavailable_error"

# Limits the amount of a client's text that a message repeats.
MAX_QUOTED_CHARS = 80


def quoted(text: str) -> str:
    """Return `text` in quotes for a message, cut at `MAX_QUOTED_CHARS`."""
    return repr(text) if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]!r}..."


def one_line(error: BaseException, most_chars: int) -> str:
    """Return an error's message in one line of at most `most_chars` characters; its class if it has none."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most_chars]


class FulcrumError(Exception):
    """An error that is shown to its caller as one line. `message` says what to do if there is a remedy.

    A subclass sets its row of the table as `wire`, or inherits that of its base.
    """

    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = SERVER
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[GrpcStatus] = "INTERNAL"
    retry_spread: ClassVar[float] = 0.25
    """The largest share by which Retry-After is extended at random."""
    repeatable: ClassVar[bool] = True
    """True if clients that retry automatically, by status, may do so."""

    def __init_subclass__(cls, *, wire: Wire | None = None) -> None:
        super().__init_subclass__()
        if wire is not None:
            cls.code, cls.error_type, cls.http_status, cls.grpc_status = wire

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def http_body(self) -> dict[str, dict[str, str | None]]:
        """The response's body in the shape of OpenAI's API."""
        shown = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": shown}

    @property
    def http_headers(self) -> dict[str, str]:
        """Retry-After in whole seconds if the error has one, and a notice if retries would be useless or harmful.

        OpenAI's and Anthropic's clients retry by status unless the notice forbids it.
        """
        headers = {} if self.repeatable else {"x-should-retry": "false"}
        if self.retry_after_s is not None:
            # Clients refused at the same moment must not all return at the same moment.
            spread = 1 + self.retry_spread * random.random()  # noqa: S311 - not a secret
            seconds = max(1, round(self.retry_after_s * spread))
            headers["retry-after"] = str(seconds)
            # anthropic 2.10.0 and openai 6.49.0 for Node sleep inside a call through any Retry-After, even for hours
            # (findings/clients-disagree-on-retry-after.sh).
            if seconds > MAX_RETRY_WAIT_S:
                headers["x-should-retry"] = "false"
        return headers


# fmt: off
#                                      wire=(code,                      type,    HTTP, gRPC)
# Requests that cannot succeed unchanged.
class InvalidRequest(FulcrumError,     wire=("invalid_request",         INVALID, 400, "INVALID_ARGUMENT")):
    """The request is at fault, and repeating it unchanged cannot succeed."""
class UnsupportedField(InvalidRequest, wire=("unsupported_field",       INVALID, 400, "INVALID_ARGUMENT")):
    """A field of OpenAI's API that is not served, refused rather than ignored."""
class ContextTooLong(InvalidRequest,   wire=("context_length_exceeded", INVALID, 400, "INVALID_ARGUMENT")): ...
class FileTooLarge(InvalidRequest,     wire=("file_too_large",          INVALID, 413, "INVALID_ARGUMENT")): ...
class TopicNotFound(InvalidRequest,    wire=("topic_not_found",         INVALID, 404, "INVALID_ARGUMENT")):
    """The broker has no such topic, or it is not for clients."""
class TopicNotAllowed(InvalidRequest,  wire=("topic_not_allowed",       INVALID, 403, "INVALID_ARGUMENT")):
    """The operator has not allowed clients to name this topic, or it is Kafka's or Fulcrum's own."""
class TopicRefused(InvalidRequest,     wire=("topic_refused",           INVALID, 400, "INVALID_ARGUMENT")):
    """A client's topic that does not accept records."""
class TooLargeForTopic(TopicRefused,   wire=("too_large_for_topic",     INVALID, 400, "INVALID_ARGUMENT")):
    """The topic does not accept this record because of its size, but does accept others."""
class PoisonRequest(FulcrumError,      wire=("poison_request",          INVALID, 422, "FAILED_PRECONDITION")):
    """Two workers died of this request, so no other worker receives it. Neither clients nor proxies retry on this
    status.
    """
    repeatable = False
# Things that do not exist, or not here.
class NotFound(FulcrumError,           wire=("not_found",               INVALID, 404, "NOT_FOUND")): ...
class FileNotFound(NotFound,           wire=("file_not_found",          INVALID, 404, "NOT_FOUND")): ...
class BatchNotFound(FileNotFound,      wire=("batch_not_found",         INVALID, 404, "NOT_FOUND")): ...
class ResponseNotFound(NotFound,       wire=("response_not_found",      INVALID, 404, "NOT_FOUND")):
    """The tenant of this request has no such response."""
class UnknownModel(NotFound,           wire=("model_not_found",         INVALID, 404, "NOT_FOUND")): ...
class UnknownWorker(NotFound,          wire=("worker_not_found",        INVALID, 404, "NOT_FOUND")): ...
class DecisionNotFound(NotFound,       wire=("decision_not_found",      INVALID, 404, "NOT_FOUND")): ...
class RequestNotFound(NotFound,        wire=("request_not_found",       INVALID, 404, "NOT_FOUND")): ...
class SilenceNotFound(NotFound,        wire=("silence_not_found",       INVALID, 404, "NOT_FOUND")):
    """No silence of alerts has this id, or it has ended."""
class KeyNotFound(NotFound,            wire=("key_not_found",           INVALID, 404, "NOT_FOUND")): ...
class NoLongerStored(FulcrumError,       wire=("no_longer_kept",          INVALID, 410, "NOT_FOUND")):
    """The data existed, or may have, and is no longer stored."""
class StoredElsewhere(FulcrumError,      wire=("kept_elsewhere",          INVALID, 421, "FAILED_PRECONDITION")):
    """The data is held by another instance of this service."""
# Callers, quotas and bounds.
class Unauthenticated(FulcrumError,    wire=("unauthenticated",         AUTH,    401, "UNAUTHENTICATED")): ...
class PermissionDenied(FulcrumError,   wire=("permission_denied",       INVALID, 403, "PERMISSION_DENIED")):
    """The caller is known and may not do this."""
    repeatable = False
class Conflict(FulcrumError,           wire=("conflict",                INVALID, 409, "FAILED_PRECONDITION")):
    """The request contradicts the present state of its target."""
    repeatable = False
class QueueFull(FulcrumError,          wire=("queue_full",              RATE,    429, "RESOURCE_EXHAUSTED")):
    """A bounded queue is full. The client may retry after `retry_after_s`."""
class QuotaUsed(FulcrumError,          wire=("insufficient_quota",      RATE,    429, "RESOURCE_EXHAUSTED")):
    """A tenant's storage is full. Only deleting files helps."""
    repeatable = False
class StoreFull(FulcrumError,          wire=("store_full",              SERVER,  507, "RESOURCE_EXHAUSTED")):
    """The file store has no room until files are deleted."""
    repeatable = False
# Failures of the service.
class StoreUnavailable(FulcrumError,   wire=("store_unavailable",       AWAY,    503, "UNAVAILABLE")):
    """The file store does not answer, or answers incorrectly. A retry may succeed."""
class BrokerUnavailable(FulcrumError,  wire=("broker_unavailable",      AWAY,    503, "UNAVAILABLE")):
    """Kafka did not confirm a call in time, so its outcome is unknown."""
class PlannerUnavailable(FulcrumError, wire=("planner_unavailable",     SERVER,  503, "INTERNAL")):
    """The planner does not answer a service that calls it on a client's behalf."""
class NoWorkers(FulcrumError,          wire=("no_workers",              AWAY,    503, "UNAVAILABLE")): ...
class SequenceFailed(FulcrumError,     wire=("sequence_failed",         AWAY,    503, "UNAVAILABLE")):
    """No worker that was tried finished the sequence. A later retry may succeed on others."""
class VersionMismatch(FulcrumError,    wire=("version_mismatch",        SERVER,  503, "FAILED_PRECONDITION")):
    """Gateway and worker are of incompatible releases."""
class StaleRole(FulcrumError,          wire=("stale_role",              SERVER,  409, "FAILED_PRECONDITION")):
    """The call was made for an assignment that the worker no longer has."""
class StaleLead(StaleRole,             wire=("stale_lead",              SERVER,  409, "FAILED_PRECONDITION")):
    """The calling planner has lost the lead: the worker knows a later leader."""
class KvLost(FulcrumError,             wire=("kv_lost",                 SERVER,  500, "DATA_LOSS")):
    """KV blocks are gone: their holder died, evicted them, or its lease ended."""
class KvMismatch(FulcrumError,         wire=("kv_mismatch",             SERVER,  500, "FAILED_PRECONDITION")):
    """The two engines cannot exchange blocks because their layouts differ."""
class AnswerFailed(FulcrumError,       wire=("answer_failed",           SERVER,  500, "INTERNAL")):
    """Generated tokens could not be turned into an answer. The service's log has the reason."""
class SleepFailed(FulcrumError,        wire=("sleep_failed",            SERVER,  500, "INTERNAL")):
    """A model could not be put to sleep, and its engine must be closed."""
class StartupError(FulcrumError,       wire=("startup_failed",          SERVER,  500, "INTERNAL")):
    """A service cannot start. The message is the one line shown to the user."""
# fmt: on


class InvalidApiKey(Unauthenticated, wire=("invalid_api_key", INVALID, 401, "UNAUTHENTICATED")):
    """The API key is missing, unknown, expired or revoked. Code and type are those of OpenAI."""

    repeatable = False

    @property
    def http_headers(self) -> dict[str, str]:
        """The headers with the authentication scheme, which HTTP requires for a 401."""
        return super().http_headers | {"www-authenticate": "Bearer"}


class RateLimited(FulcrumError, wire=("rate_limit_exceeded", RATE, 429, "RESOURCE_EXHAUSTED")):
    """A tenant has used up one of its limits. The message names the limit and the time at which more is available."""

    retry_spread = 0.0  # the time is the tenant's own, and headers state it as well

    def __init__(self, message: str, *, retry_after_s: float, headers: Mapping[str, str]) -> None:
        """Create the error; `headers` state the remainder of the tenant's limits."""
        super().__init__(message, retry_after_s=math.ceil(retry_after_s))
        self._headers = headers

    @property
    def http_headers(self) -> dict[str, str]:
        """The headers with the state of the tenant's limits."""
        return super().http_headers | dict(self._headers)


# fmt: off
#                                        wire=(code,                       type,    HTTP, gRPC)
class UnsupportedMediaType(InvalidRequest,
                                         wire=("unsupported_media_type",   INVALID, 415, "INVALID_ARGUMENT")):
    """The route does not accept the body's type, or the body is compressed."""
class BodyTooLarge(InvalidRequest,       wire=("body_too_large",           INVALID, 413, "INVALID_ARGUMENT")):
    """The body exceeds the bound of the service that reads it."""
class HeadersTooLarge(InvalidRequest,    wire=("headers_too_large",        INVALID, 431, "INVALID_ARGUMENT")):
    """The request's target, one of its headers, or all of them exceed a bound."""
class RepeatedHeader(InvalidRequest,     wire=("repeated_header",          INVALID, 400, "INVALID_ARGUMENT")):
    """A single-valued header was sent twice, and a proxy may have checked the other one."""
class ExpectationFailed(InvalidRequest,  wire=("expectation_failed",       INVALID, 417, "INVALID_ARGUMENT")):
    """The request has an expectation that no service supports."""
class UnsupportedTransferCoding(InvalidRequest,
                                         wire=("unsupported_transfer_encoding", INVALID, 501, "INVALID_ARGUMENT")):
    """The body's transfer coding is not chunked."""
    repeatable = False
class UnsupportedHttpVersion(InvalidRequest,
                                         wire=("unsupported_http_version", INVALID, 505, "INVALID_ARGUMENT")):
    """The request's version is neither HTTP/1.0 nor HTTP/1.1."""
    repeatable = False
class RequestTooSlow(InvalidRequest,     wire=("request_too_slow",         INVALID, 408, "INVALID_ARGUMENT")):
    """The client took too long to send its request."""
class TooManyPipelined(InvalidRequest,   wire=("too_many_pipelined",       INVALID, 429, "RESOURCE_EXHAUSTED")):
    """Too many requests wait on one connection. Unanswered ones can be sent again on another."""
class TooManyConnections(FulcrumError,   wire=("too_many_connections",     AWAY,    503, "RESOURCE_EXHAUSTED")):
    """The server has as many connections as it accepts, in total or from one address."""
class WrongHost(InvalidRequest,          wire=("wrong_host",               INVALID, 403, "INVALID_ARGUMENT")):
    """The request is for, or from a page of, a name that this service does not accept."""
# fmt: on
