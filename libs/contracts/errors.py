"""One tree of errors. Each is mapped once to HTTP (OpenAI's shape) and once to gRPC.

Over gRPC the class and message survive (in the status details as "code: message"); `param` and the traceback do not.
"""

import math
import random
from collections.abc import Mapping
from typing import ClassVar, Literal

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
"""By name: importing grpc takes a command line a fifth of its time."""
MAX_QUOTED_CHARS = 80
"""Of what a client sent, in the message that refuses it."""


def quoted(text: str) -> str:
    """`text` as a message names it: in quotes, and cut where it is long."""
    return repr(text) if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]!r}..."


class FulcrumError(Exception):
    """An error that a caller gets as one line. `message` says what to do where there is something to do."""

    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[GrpcStatus] = "INTERNAL"
    retry_spread: ClassVar[float] = 0.25
    """Retry-After is longer by up to this share of it, at random."""
    repeatable: ClassVar[bool] = True
    """Whether clients that repeat requests by themselves, by what their status says, may do so."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def http_body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's shape."""
        shown = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": shown}

    @property
    def http_headers(self) -> dict[str, str]:
        """Retry-After where the error says when, in whole seconds; and for OpenAI's clients, which repeat requests by
        their status, where that would be in vain or worse."""
        headers = {} if self.repeatable else {"x-should-retry": "false"}
        if self.retry_after_s is not None:
            # Those who were refused in one moment are not to come back in one.
            spread = 1 + self.retry_spread * random.random()  # noqa: S311 - not a secret
            headers["retry-after"] = str(max(1, round(self.retry_after_s * spread)))
        return headers


class VersionMismatch(FulcrumError):
    """Gateway and worker are of releases that do not understand each other."""

    code = "version_mismatch"
    http_status = 503
    grpc_status: ClassVar[GrpcStatus] = "FAILED_PRECONDITION"


class InvalidRequest(FulcrumError):
    """The client's fault; repeating it unchanged cannot succeed."""

    code = "invalid_request"
    error_type = "invalid_request_error"
    http_status = 400
    grpc_status: ClassVar[GrpcStatus] = "INVALID_ARGUMENT"


class UnsupportedField(InvalidRequest):
    """A field of OpenAI's API that is not served, refused rather than ignored."""

    code = "unsupported_field"


class ContextTooLong(InvalidRequest):
    """Prompt and output would not fit the model's context."""

    code = "context_length_exceeded"


class FileTooLarge(InvalidRequest):
    """A file is over the bound for one."""

    code = "file_too_large"
    http_status = 413


class NotFound(FulcrumError):
    """What a caller names is not kept here."""

    code = "not_found"
    error_type = "invalid_request_error"
    http_status = 404
    grpc_status: ClassVar[GrpcStatus] = "NOT_FOUND"


class FileNotFound(NotFound):
    """No such file is kept."""

    code = "file_not_found"


class BatchNotFound(FileNotFound):
    """No such batch is known."""

    code = "batch_not_found"


class ResponseNotFound(NotFound):
    """No such response is kept for this tenant."""

    code = "response_not_found"


class TopicNotFound(InvalidRequest):
    """The broker has no such topic, or it is not for clients."""

    code = "topic_not_found"
    http_status = 404


class TopicNotAllowed(InvalidRequest):
    """Clients may not name this topic: the operator has not allowed it, or it is Kafka's or ours."""

    code = "topic_not_allowed"
    http_status = 403


class TopicRefused(InvalidRequest):
    """A client's topic does not take what is written to it."""

    code = "topic_refused"


class TooLargeForTopic(TopicRefused):
    """One of the records is: others it takes."""

    code = "too_large_for_topic"


class Conflict(FulcrumError):
    """What is asked for does not go with how things stand."""

    code = "conflict"
    error_type = "invalid_request_error"
    http_status = 409
    grpc_status: ClassVar[GrpcStatus] = "FAILED_PRECONDITION"
    repeatable = False


class StoreFull(FulcrumError):
    """The file store has no room: deleting files makes some."""

    code = "store_full"
    http_status = 507
    grpc_status: ClassVar[GrpcStatus] = "RESOURCE_EXHAUSTED"
    repeatable = False


class StoreUnavailable(FulcrumError):
    """The file store does not answer, or not as it should: later it may."""

    code = "store_unavailable"
    error_type = "service_unavailable_error"
    http_status = 503
    grpc_status: ClassVar[GrpcStatus] = "UNAVAILABLE"


class UnknownModel(NotFound):
    """No such model here."""

    code = "model_not_found"


class UnknownWorker(NotFound):
    """No such worker has been heard of."""

    code = "worker_not_found"


class DecisionNotFound(NotFound):
    """No such decision of the planner is kept."""

    code = "decision_not_found"


class SilenceNotFound(NotFound):
    """No silence of alerts has this id, or it is over."""

    code = "silence_not_found"


class NoLongerKept(FulcrumError):
    """What is asked for was known, or might have been, and is not kept any more."""

    code = "no_longer_kept"
    error_type = "invalid_request_error"
    http_status = 410
    grpc_status: ClassVar[GrpcStatus] = "NOT_FOUND"


class KeptElsewhere(FulcrumError):
    """Another instance of this service holds what is asked for."""

    code = "kept_elsewhere"
    error_type = "invalid_request_error"
    http_status = 421
    grpc_status: ClassVar[GrpcStatus] = "FAILED_PRECONDITION"


class Unauthenticated(FulcrumError):
    """The token is missing or wrong."""

    code = "unauthenticated"
    error_type = "authentication_error"
    http_status = 401
    grpc_status: ClassVar[GrpcStatus] = "UNAUTHENTICATED"


class InvalidApiKey(Unauthenticated):
    """The API key is missing, unknown, expired or revoked; in the words of OpenAI's API, whose clients know them."""

    code = "invalid_api_key"
    error_type = "invalid_request_error"
    repeatable = False

    @property
    def http_headers(self) -> dict[str, str]:
        """How to authenticate, as HTTP wants it said."""
        return super().http_headers | {"www-authenticate": "Bearer"}


class PermissionDenied(FulcrumError):
    """The caller is known, and may not do this."""

    code = "permission_denied"
    error_type = "invalid_request_error"
    http_status = 403
    grpc_status: ClassVar[GrpcStatus] = "PERMISSION_DENIED"
    repeatable = False


class KeyNotFound(NotFound):
    """No such API key is kept."""

    code = "key_not_found"


class QueueFull(FulcrumError):
    """A bounded queue is full: come back after `retry_after_s`."""

    code = "queue_full"
    error_type = "rate_limit_error"
    http_status = 429
    grpc_status: ClassVar[GrpcStatus] = "RESOURCE_EXHAUSTED"


class QuotaUsed(FulcrumError):
    """A tenant has as much stored as it may have: only deleting something helps."""

    code = "insufficient_quota"
    error_type = "rate_limit_error"
    http_status = 429
    grpc_status: ClassVar[GrpcStatus] = "RESOURCE_EXHAUSTED"
    repeatable = False


class RateLimited(FulcrumError):
    """A tenant has used one of its limits; the message names it and says when there is more."""

    code = "rate_limit_exceeded"
    retry_spread = 0.0  # the moment is the tenant's own, and its headers say it too
    error_type = "rate_limit_error"
    http_status = 429
    grpc_status: ClassVar[GrpcStatus] = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float, headers: Mapping[str, str]) -> None:
        """headers: how the tenant's limits stand."""
        super().__init__(message, retry_after_s=math.ceil(retry_after_s))
        self._headers = headers

    @property
    def http_headers(self) -> dict[str, str]:
        """With how the limits stand."""
        return super().http_headers | dict(self._headers)


class NoWorkers(FulcrumError):
    """No worker can take the request now."""

    code = "no_workers"
    error_type = "service_unavailable_error"
    http_status = 503
    grpc_status: ClassVar[GrpcStatus] = "UNAVAILABLE"


class BrokerUnavailable(FulcrumError):
    """Kafka did not take or tell something in time: whether it has happened is not known."""

    code = "broker_unavailable"
    error_type = "service_unavailable_error"
    http_status = 503
    grpc_status: ClassVar[GrpcStatus] = "UNAVAILABLE"


class PlannerUnavailable(FulcrumError):
    """The planner does not answer whoever asks in another's name."""

    code = "planner_unavailable"
    http_status = 503


class StaleRole(FulcrumError):
    """The call was made for an assignment that is no longer the worker's."""

    code = "stale_role"
    http_status = 409
    grpc_status: ClassVar[GrpcStatus] = "FAILED_PRECONDITION"


class KvLost(FulcrumError):
    """KV blocks are gone: their holder died, evicted them, or its lease ended."""

    code = "kv_lost"
    grpc_status: ClassVar[GrpcStatus] = "DATA_LOSS"


class KvMismatch(FulcrumError):
    """Two engines whose blocks cannot be exchanged."""

    code = "kv_mismatch"
    grpc_status: ClassVar[GrpcStatus] = "FAILED_PRECONDITION"


class SequenceFailed(FulcrumError):
    """A sequence could not be finished on any of the workers it was given to: on others, later, it may."""

    code = "sequence_failed"
    error_type = "service_unavailable_error"
    http_status = 503
    grpc_status: ClassVar[GrpcStatus] = "UNAVAILABLE"


class PoisonRequest(FulcrumError):
    """A request that workers die of: two have, and no other is to.

    A status that nobody repeats by themselves, neither clients nor what stands before a gateway.
    """

    code = "poison_request"
    error_type = "invalid_request_error"
    http_status = 422
    grpc_status: ClassVar[GrpcStatus] = "FAILED_PRECONDITION"
    repeatable = False


class AnswerFailed(FulcrumError):
    """What workers generated could not be made an answer: a fault of this service, whose log tells more."""

    code = "answer_failed"


class SleepFailed(FulcrumError):
    """A model could not be put to sleep: its engine is to be closed."""

    code = "sleep_failed"


class StartupError(FulcrumError):
    """A service cannot start; the message is the one line that its user sees."""

    code = "startup_failed"
