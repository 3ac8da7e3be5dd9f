"""The errors of batch lines and jobs, besides those of any request."""

from libs.contracts.errors import BrokerUnavailable, FulcrumError, InvalidRequest, NoWorkers, TopicRefused


class LineRefused(InvalidRequest):
    code = "invalid_line"


class MalformedLine(LineRefused):
    code = "invalid_json_line"


class RepeatedId(LineRefused):
    """An earlier line has the same custom_id."""

    code = "duplicate_custom_id"


class WrongUrl(LineRefused):
    """The line names another route than its job."""

    code = "mismatched_url"


class NotRun(FulcrumError):
    """The line never ran; the subclass's `code` is the reason."""

    code = "not_run"
    error_type = "invalid_request_error"
    http_status = 409


class Cancelled(NotRun):
    """The job was cancelled before the line ran."""

    code = "batch_cancelled"


class Expired(NotRun):
    """The job's window ended before the line ran."""

    code = "batch_expired"


def stopped(expires_unix_ns: int, now_ns: int, *, cancelled: bool) -> NotRun | None:
    """Return the reason why no more lines of a job run, or None while they do."""
    if cancelled:
        return Cancelled("the batch was cancelled first")
    return Expired("the batch's window ended first") if now_ns >= expires_unix_ns else None


class OutputRefused(NotRun):
    """The job's output topic does not take its answers."""

    code = TopicRefused.code


class InputGone(NotRun):
    """The input file was deleted while its job ran."""

    code = "input_file_gone"


class NoWorkersForLong(NoWorkers):
    """The line's model had no workers for longer than other lines can wait."""


class AnswerTooLarge(FulcrumError):
    """The answer does not fit into a record."""

    code = "answer_too_large"


class PerhapsCreated(BrokerUnavailable):
    """The broker may have taken the job. Without an idempotency key, a second request would create a second job."""

    repeatable = False
