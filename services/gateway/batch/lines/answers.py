"""Answers to lines in the form of OpenAI's output and error files. Pure.

Ids derive from the job and the line, so an answer that is generated again has the same id.
"""

import msgspec

from libs.contracts.errors import FulcrumError, TooLargeForTopic
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result
from services.gateway.batch.jobs.reasons import AnswerTooLarge, Cancelled, Expired, NotRun
from services.gateway.batch.lines.line import BatchLine
from services.gateway.request.exchange import error_reply
from services.gateway.request.formats import ChatChoice, CompletionChoice, Envelope, ErrorReply

# Bound of a record on the broker, less room for its key and headers.
MAX_RESULT_BYTES = 900 * 1024
# An error's message may quote a long field of the line.
MAX_ERROR_TEXT_CHARS = 1_000


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | ErrorReply


class _Error(msgspec.Struct):
    code: str
    message: str
    line: int


class _Answer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_encoder = msgspec.json.Encoder()


def request_id(job_id: str, place: int) -> str:
    """Return the id of the request made for a line."""
    return f"{job_id}-{place}"


def answered(job_id: str, line: BatchLine, reply: Envelope[ChatChoice | CompletionChoice]) -> Result:
    """Return the result of a line that was answered."""
    response = _Response(200, request_id(job_id, line.place), msgspec.Raw(_encoder.encode(reply)))
    answer = _encoder.encode(_Answer(_id(job_id, line.place), line.custom_id, response, None))
    return Result(job_id=job_id, place=line.place, custom_id=line.custom_id, ok=True, answer=answer)


def refused(job_id: str, line: BatchLine, error: FulcrumError) -> Result:
    """Return the result of a line that failed: a response if it was run, else only the reason."""
    asked = line.refusal is None and not isinstance(error, NotRun)
    reply = _shortened(error)
    response = _Response(error.http_status, request_id(job_id, line.place), reply) if asked else None
    reason = _Error(error.code, reply.error.message, line.number)
    answer = _encoder.encode(_Answer(_id(job_id, line.place), line.custom_id or None, response, reason))
    return Result(
        job_id=job_id,
        place=line.place,
        custom_id=line.custom_id,
        ok=False,
        answer=answer,
        expired=isinstance(error, Expired),
        cancelled=isinstance(error, Cancelled),
    )


def fitting(result: Result, line: BatchLine) -> Result:
    """Return the result, or an error for its line if no record can hold it.

    A record that the broker refuses would stop all others that are committed with it.
    """
    if (size := result.ByteSize()) <= MAX_RESULT_BYTES:
        return result
    return refused(result.job_id, line, AnswerTooLarge(f"the answer's {size} bytes are over {MAX_RESULT_BYTES}"))


def stand_in(result: Result, error: TooLargeForTopic) -> bytes:
    """Return the error that a client's topic gets in place of an answer that is too large for it."""
    text = f"{error.message}: what it does not take is in the job's files alone"[:MAX_ERROR_TEXT_CHARS]
    reason = _Error(AnswerTooLarge.code, text, result.place + 1)
    return _encoder.encode(_Answer(_id(result.job_id, result.place), result.custom_id or None, None, reason))


def _shortened(error: FulcrumError) -> ErrorReply:
    """Return the error in OpenAI's shape, with its texts cut to `MAX_ERROR_TEXT_CHARS`."""
    body = error_reply(error).error
    param = body.param and body.param[:MAX_ERROR_TEXT_CHARS]
    return ErrorReply(msgspec.structs.replace(body, message=body.message[:MAX_ERROR_TEXT_CHARS], param=param))


def _id(job_id: str, place: int) -> str:
    return f"batch_req_{job_id.removeprefix('batch_')}_{place}"
