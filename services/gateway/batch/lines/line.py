"""Parsing of one line of a batch file into a request, or the reason why it cannot run. Pure."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from libs.contracts.errors import FileNotFound, FulcrumError, quoted
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Share
from libs.filestore.port import FileStore
from services.gateway.batch.jobs.reasons import InputGone, LineRefused, MalformedLine, RepeatedId, WrongUrl
from services.gateway.batch.lines.repeats import custom_id_of
from services.gateway.batch.lines.shares import LineSplitter

MAX_CUSTOM_ID_CHARS = 512


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


# The field named in a decoder's error.
_NAMED = re.compile(r"(?:\$\.|missing required field `)(\w+)`")
_decoder = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int
    """The line's number in the file, from 1."""
    place: int
    """The line's index among the job's lines, from 0."""
    custom_id: str
    """The client's id of the line; empty if it is missing, unreadable or too long."""
    body: bytes
    refusal: FulcrumError | None
    """The reason why the line is not run."""


def read_line(text: bytes, *, number: int, place: int, endpoint: str, repeated: bool) -> BatchLine:
    # Never raises: a line that cannot run carries the reason and must not delay others.
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
    # A truncated id could equal another line's, so an id that is too long is dropped.
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
    """Return all lines of the share; lines that a deleted file no longer holds are refused. Raise StoreUnavailable."""
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
    """Yield the share's line numbers and lines, with None for the text once the file is gone."""
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
