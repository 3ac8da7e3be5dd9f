"""Why a line has an error for an answer, or a job is none, beside what any request may be told."""

from libs.contracts.errors import BrokerUnavailable, FulcrumError, InvalidRequest, NoWorkers, TopicRefused


class LineRefused(InvalidRequest):
    """A line that is no request."""

    code = "invalid_line"


class MalformedLine(LineRefused):
    """It is no JSON."""

    code = "invalid_json_line"


class RepeatedId(LineRefused):
    """Its custom_id is an earlier line's."""

    code = "duplicate_custom_id"


class WrongUrl(LineRefused):
    """It names another route than its job."""

    code = "mismatched_url"


class NotRun(FulcrumError):
    """A line that was not asked at all; a subclass's `code` is the reason."""

    code = "not_run"
    error_type = "invalid_request_error"
    http_status = 409


class Cancelled(NotRun):
    """The job was cancelled first."""

    code = "batch_cancelled"


class Expired(NotRun):
    """The job's window ended first."""

    code = "batch_expired"


def stopped(expires_unix_ns: int, now_ns: int, *, cancelled: bool) -> NotRun | None:
    """Why no more lines of a job are run, if so."""
    if cancelled:
        return Cancelled("the batch was cancelled first")
    return Expired("the batch's window ended first") if now_ns >= expires_unix_ns else None


class OutputRefused(NotRun):
    """A topic that answers are to go to does not take them."""

    code = TopicRefused.code


class InputGone(NotRun):
    """The input file was deleted while its job ran."""

    code = "input_file_gone"


class NoWorkersForLong(NoWorkers):
    """The line's model has had no workers for as long as other lines can wait."""


class AnswerTooLarge(FulcrumError):
    """The answer does not fit into a record."""

    code = "answer_too_large"


class PerhapsCreated(BrokerUnavailable):
    """A job that the broker may have taken, without a key by which asking again would give the same one."""

    repeatable = False
