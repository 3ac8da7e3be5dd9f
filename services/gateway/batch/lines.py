"""The lines of a batch file: counting them, parsing one into a request, and formatting its answer.

A first pass over a file stores a 64-bit hash of each line's custom_id. Different ids can have the same hash. If hashes
repeat, a second pass compares 128-bit digests of those ids.

The id of an answer derives from its job and line, so that an answer that is generated twice has the same id.
"""

import asyncio
import hashlib
import re
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from libs.bus.work import Raw, WorkBus
from libs.contracts.errors import FileNotFound, FulcrumError, TooLargeForTopic, TopicRefused, quoted
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created, Result, Share
from libs.filestore.port import FileStore
from services.gateway.batch.job import (
    AnswerTooLarge,
    Cancelled,
    Expired,
    InputGone,
    LineRefused,
    MalformedLine,
    NotRun,
    OutputRefused,
    RepeatedId,
    WrongUrl,
)
from services.gateway.batch.shares import Cutter, LineSplitter
from services.gateway.request.exchange import error_reply
from services.gateway.request.formats import ErrorReply


class _Named(msgspec.Struct):
    custom_id: str | None = None


_id_decoder = msgspec.json.Decoder(_Named)


def custom_id_of(line: bytes) -> str | None:
    """Return the line's custom_id, or None if the line has none or is not a JSON object."""
    try:
        return _id_decoder.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class IdHashes:
    """The first pass over a file, which stores one hash per line."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, line: bytes) -> None:
        """Add the next line. Blank lines must be left out."""
        custom_id = custom_id_of(line)
        # A line without a custom_id repeats no other line.
        text = f"{len(self._hashes)}\n" if custom_id is None else custom_id
        self._hashes.append(xxhash.xxh3_64_intdigest(text.encode()))

    def suspects(self) -> frozenset[int]:
        """Return the hashes that occur more than once."""
        values = np.frombuffer(self._hashes, dtype=np.uint64).copy()
        values.sort()
        return frozenset(values[1:][values[1:] == values[:-1]].tolist())

    def finder(self) -> "Repeats":
        return Repeats(self._hashes, self.suspects())


class Repeats:
    """The second pass over a file, which compares the ids of lines whose hashes repeat."""

    def __init__(self, hashes: Sequence[int], suspects: frozenset[int]) -> None:
        self._hashes = hashes
        self._suspects = suspects
        self._seen: set[bytes] = set()
        self._place = 0
        self.places = array("Q")
        """The indices of lines that repeat an earlier custom_id, in order."""

    @property
    def needed(self) -> bool:
        return bool(self._suspects)

    def add(self, line: bytes) -> None:
        """Add the next line. Blank lines must be left out."""
        if self._hashes[self._place] in self._suspects and (custom_id := custom_id_of(line)) is not None:
            digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                self.places.append(self._place)
            self._seen.add(digest)
        self._place += 1


@dataclass(frozen=True, slots=True)
class Counted:
    lines: int
    repeats: "array[int]"
    """The indices of lines that repeat an earlier custom_id, in order."""


async def count(files: FileStore, file_id: str) -> Counted:
    """Count a file's lines. The file is read twice if hashes repeat. Raise FileNotFound."""
    hashes = IdHashes()
    cutter = Cutter(on_line=hashes.add)
    await _read(files, file_id, cutter)
    finder = await asyncio.to_thread(hashes.finder)
    if finder.needed:
        await _read(files, file_id, Cutter(on_line=finder.add))
    return Counted(cutter.lines, finder.places)


async def _read(files: FileStore, file_id: str, cutter: Cutter) -> None:
    async for part in files.read(file_id):
        await asyncio.to_thread(cutter.push, part)
    cutter.flush()


MAX_CUSTOM_ID_CHARS = 512


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


# The field that is named in an error of the decoder.
_NAMED = re.compile(r"(?:\$\.|missing required field `)(\w+)`")
_decoder = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int
    """The number of the line in the file, from 1."""
    place: int
    """The index of the line among the job's lines, from 0."""
    custom_id: str
    """The client's id of the line; empty if it is missing, unreadable or too long."""
    body: bytes
    refusal: FulcrumError | None


def read_line(text: bytes, *, number: int, place: int, endpoint: str, repeated: bool) -> BatchLine:
    # An invalid line is no error here. It must not delay other lines, so the reason becomes part of the result.
    try:
        line = _decoder.decode(text)
    except msgspec.ValidationError as error:
        named = _NAMED.search(str(error))
        refusal: LineRefused = LineRefused(f"line {number} is no request: {error}", param=named and named[1])
        return BatchLine(number, place, _kept(custom_id_of(text) or ""), b"", refusal)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refusal = MalformedLine(f"line {number} is not JSON: {error}")
        return BatchLine(number, place, _kept(custom_id_of(text) or ""), b"", refusal)
    return BatchLine(number, place, _kept(line.custom_id), bytes(line.body), _refusal(line, number, endpoint, repeated))


def _kept(custom_id: str) -> str:
    # A truncated id could equal the id of another line, so an id that is too long is dropped.
    return custom_id if len(custom_id) <= MAX_CUSTOM_ID_CHARS else ""


def _refusal(line: _Line, number: int, endpoint: str, repeated: bool) -> FulcrumError | None:
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        text = f"line {number}: custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        return LineRefused(text, param="custom_id")
    if repeated:
        text = f"line {number}: custom_id {quoted(line.custom_id)} is an earlier line's"
        return RepeatedId(text, param="custom_id")
    if line.method != "POST":
        return LineRefused(f"line {number}: method must be POST", param="method")
    if line.url != endpoint:
        return WrongUrl(f"line {number}: url is {quoted(line.url)}, the batch is for {endpoint}", param="url")
    return None


async def read_lines(files: FileStore, share: Share) -> list[BatchLine]:
    """Return all lines of a share. If the input file is gone, its lines are refused. Raise StoreUnavailable."""
    repeats = frozenset(share.repeats)
    async with aclosing(_texts(files, share)) as texts:
        found = [await anext(texts) for _ in range(share.lines)]
    return [_line(share, index, number, text, repeated=index in repeats) for index, (number, text) in enumerate(found)]


def _line(share: Share, index: int, number: int, text: bytes | None, *, repeated: bool) -> BatchLine:
    place = share.first_place + index
    if text is None:
        return BatchLine(number, place, "", b"", InputGone("the input file was deleted"))
    return read_line(text, number=number, place=place, endpoint=share.endpoint, repeated=repeated)


async def _texts(files: FileStore, share: Share) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Yield the numbers and texts of the share's lines. Once the file is gone, the texts are None."""
    number, splitter = share.first_line, LineSplitter()
    try:
        async for part in files.read(share.input_file_id, share.first_byte, share.bytes):
            for text in splitter.push(part):
                if text.strip():
                    yield number, text
                number += 1
        for text in splitter.flush():
            yield number, text
    except FileNotFound:
        pass
    while True:
        yield number, None
        number += 1


# The bound on a record on the broker, with a margin for its key and headers.
MAX_RESULT_BYTES = 900 * 1024
# A bound is needed because an error message may quote a long field of the line.
MAX_ERROR_TEXT_CHARS = 1_000


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | ErrorReply


class _LineError(msgspec.Struct):
    code: str
    message: str
    line: int


class _Answer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _LineError | None


_encoder = msgspec.json.Encoder()


def request_id(job_id: str, place: int) -> str:
    return f"{job_id}-{place}"


def answered(job_id: str, line: BatchLine, reply: object) -> Result:
    response = _Response(200, request_id(job_id, line.place), msgspec.Raw(_encoder.encode(reply)))
    answer = _encoder.encode(_Answer(_id(job_id, line.place), line.custom_id, response, None))
    return Result(job_id=job_id, place=line.place, custom_id=line.custom_id, ok=True, answer=answer)


def refused(job_id: str, line: BatchLine, error: FulcrumError) -> Result:
    """Return the result of a failed line. It contains a response only if the line ran."""
    ran = line.refusal is None and not isinstance(error, NotRun)
    reply = _shortened(error)
    response = _Response(error.http_status, request_id(job_id, line.place), reply) if ran else None
    reason = _LineError(error.code, reply.error.message, line.number)
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
    """Return the result, or an error if it is too large for a record.

    The broker would refuse a record that is too large, and with it all others in the same transaction.
    """
    if (size := result.ByteSize()) <= MAX_RESULT_BYTES:
        return result
    return refused(result.job_id, line, AnswerTooLarge(f"the answer's {size} bytes are over {MAX_RESULT_BYTES}"))


def stand_in(result: Result, error: TooLargeForTopic) -> bytes:
    """Return the error to send to a client's topic instead of an answer that is too large for the topic."""
    text = f"{error.message}: what it does not take is in the job's files alone"[:MAX_ERROR_TEXT_CHARS]
    reason = _LineError(AnswerTooLarge.code, text, result.place + 1)
    return _encoder.encode(_Answer(_id(result.job_id, result.place), result.custom_id or None, None, reason))


def _shortened(error: FulcrumError) -> ErrorReply:
    """Return the error in OpenAI's format, with its texts cut to `MAX_ERROR_TEXT_CHARS`."""
    body = error_reply(error).error
    param = body.param and body.param[:MAX_ERROR_TEXT_CHARS]
    return ErrorReply(msgspec.structs.replace(body, message=body.message[:MAX_ERROR_TEXT_CHARS], param=param))


def _id(job_id: str, place: int) -> str:
    return f"batch_req_{job_id.removeprefix('batch_')}_{place}"


# The bound on remembered jobs. A forgotten one is detected again.
MAX_REFUSED = 1_000
# After this many consecutive answers that are too large, a topic is treated as refusing all answers. Each refused
# answer costs its lane a new producer.
MAX_TOO_LARGE = 20


async def check_topics(bus: WorkBus, created: Created) -> None:
    """Raise TopicNotFound, which names the field, if a topic of the job does not exist. Raise BrokerUnavailable."""
    for field in ("output_topic", "error_topic"):
        if name := getattr(created, field):
            await bus.check_topic(name, param=field)


class AnswerCopies:
    """The copies of answers that one gateway sends to the topics of its jobs."""

    def __init__(self) -> None:
        self._refused: dict[str, OutputRefused] = {}
        self._too_large: Counter[str] = Counter()
        """The number of consecutive answers, by job, that were too large for their topic."""

    def of(self, share: Share, results: Iterable[Result]) -> list[Raw]:
        """Return the copies to commit together with the results."""
        if share.job_id in self._refused:
            return []
        found = [(share.output_topic if result.ok else share.error_topic, result) for result in results]
        return [Raw(topic, result.custom_id.encode(), result.answer) for topic, result in found if topic]

    def stand_ins(self, share: Share, results: Iterable[Result], error: TooLargeForTopic) -> list[Raw]:
        """Return an error record for each result whose copy is too large, if the job has an error topic."""
        if share.job_id in self._refused or not share.error_topic:
            return []
        return [Raw(share.error_topic, result.custom_id.encode(), stand_in(result, error)) for result in results]

    def taken(self, job_id: str) -> None:
        """Record that the topics of a job accepted its answers."""
        self._too_large.pop(job_id, None)

    def too_large(self, job_id: str) -> bool:
        """Count an answer that is too large for its topic.

        Return whether the topic is now treated as refusing all answers.
        """
        self._too_large[job_id] += 1
        if len(self._too_large) > MAX_REFUSED:
            del self._too_large[next(iter(self._too_large))]
        return self._too_large[job_id] > MAX_TOO_LARGE

    def refuse(self, job_id: str, error: TopicRefused) -> None:
        """Send no more copies of the job's answers, and stop running its lines."""
        self._refused[job_id] = OutputRefused(error.message)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refused(self, job_id: str) -> OutputRefused | None:
        """Return the reason for which no more of the job's lines run, or None while they do."""
        return self._refused.get(job_id)
