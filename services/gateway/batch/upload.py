"""Uploads of files. A multipart form is parsed and stored as it arrives, so memory does not grow with the file."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from libs.contracts.errors import (
    MAX_QUOTED_CHARS,
    BodyTooLarge,
    FileTooLarge,
    FulcrumError,
    InvalidRequest,
    UnsupportedField,
    UnsupportedMediaType,
)
from libs.filestore.port import Draft, FileInfo, FileStore
from libs.runtime.http.semantics import check_encoding
from services.gateway.request.exchange import ClientGone

PURPOSES = ("batch",)
MAX_FIELD_BYTES = 1024
MAX_HEADER_BYTES = 4096
MAX_PARTS = 8
# The bound on the bytes of the form outside the file.
MAX_OVERHEAD_BYTES = 64 * 1024
MAX_NAME_CHARS = 256
# The bounds in OpenAI's API.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
Room = Callable[[], Awaitable["FileRoom"]]
# The minimum rate of an upload. Slow uploads would occupy the few slots for long.
MIN_BYTES_PER_S = 64 * 1024
# The time by which an upload may fall behind that rate, and thus its longest pause.
MAX_SILENT_S = 10.0
# The bound on the total time spent waiting for the client, whatever the file's size.
MAX_UPLOAD_S = 3600.0


async def chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raise InvalidRequest if it is too slow, and ClientGone if the client disconnects.

    For a file of N bytes, the wait for the client is at most MAX_SILENT_S plus N / MIN_BYTES_PER_S.
    """
    now_s = asyncio.get_running_loop().time
    patience_s, left_s = MAX_SILENT_S, MAX_UPLOAD_S
    while True:
        began_s = now_s()
        try:
            async with asyncio.timeout(min(patience_s, left_s)):
                message = await request.receive()
        except TimeoutError:
            slow = f"stay behind {MIN_BYTES_PER_S} bytes a second by more than {MAX_SILENT_S:g} s"
            raise InvalidRequest(f"the body must not {slow}, or take over {MAX_UPLOAD_S:g} s", param="body") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        # The limits apply to the time spent waiting for the client, not to the time that the store needs.
        waited_s = now_s() - began_s
        patience_s = min(patience_s + len(part) / MIN_BYTES_PER_S - waited_s, MAX_SILENT_S)
        left_s -= waited_s
        yield part
        if not message.get("more_body", False):
            return


async def small_body(request: Request, max_bytes: int) -> bytes:
    """Return a small body as a whole. Raise BodyTooLarge."""
    body = bytearray()
    async for part in chunks(request):
        body += part
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
    return bytes(body)


class FileRoom(NamedTuple):
    """The largest file that may be added, and the error for a larger one."""

    bytes: int
    refusal: FulcrumError


async def receive_file(
    request: Request, files: FileStore, *, tenant: str, max_bytes: int, max_line_bytes: int, room: Room | None = None
) -> FileInfo:
    """Store the file in the form as `tenant`'s and return its description.

    `room` returns the largest size that the tenant's other files allow. It is called before and after the transfer,
    because other files may be uploaded meanwhile. Raise InvalidRequest, FileTooLarge, StoreFull or an error of `room`;
    in that case nothing is stored.
    """
    check_encoding(dict(request.headers.raw))
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes + MAX_OVERHEAD_BYTES:
        raise BodyTooLarge(f"a file may have {max_bytes} bytes", param="file")
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise UnsupportedMediaType("a file is uploaded as multipart/form-data", param="content-type")
    if not options.get(b"boundary"):
        raise InvalidRequest("multipart/form-data needs a boundary", param="content-type")
    too_large: FulcrumError = FileTooLarge(f"a file may have {max_bytes} bytes", param="file")
    found = FileRoom(max_bytes, too_large) if room is None else await room()
    most_bytes = min(found.bytes, max_bytes)
    async with files.draft(f"file-{uuid.uuid4().hex}", max_bytes=most_bytes) as draft:
        form = _Form(options[b"boundary"])
        lines = _LineCheck(max_line_bytes)
        async for part in chunks(request):
            form.write(part)
            for content in form.taken():
                lines.add(content)
                if most_bytes < max_bytes and lines.bytes > most_bytes:
                    raise found.refusal
                await draft.write(content)
        if room is not None and lines.bytes > (now := await room()).bytes:
            raise now.refusal
        return await _keep(draft, form, lines, tenant)


async def _keep(draft: Draft, form: "_Form", lines: "_LineCheck", tenant: str) -> FileInfo:
    form.finish()
    purpose, expires_in_s = form.fields.pop("purpose", ""), _expiry(form.fields)
    if form.fields:
        name = min(form.fields)[:MAX_QUOTED_CHARS]
        raise UnsupportedField(f"{name} is not served", param=name)
    if purpose not in PURPOSES:
        raise InvalidRequest(f"purpose must be {' or '.join(PURPOSES)}", param="purpose")
    if form.file_name is None:
        raise InvalidRequest("the form has no file", param="file")
    if not lines.bytes:
        raise InvalidRequest("the file is empty", param="file")
    return await draft.keep(name=form.file_name, purpose=purpose, tenant=tenant, expires_in_s=expires_in_s)


def _expiry(fields: dict[str, str]) -> int:
    """Return the time after which the file is deleted, from OpenAI's form fields, in s; 0 if the form has none.

    Raise InvalidRequest.
    """
    anchor, text = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if anchor is None and text is None:
        return 0
    seconds = int(text) if text and text.isascii() and text.isdigit() and len(text) < 9 else 0
    if anchor != "created_at" or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        allowed = f"anchor created_at and seconds from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
        raise InvalidRequest(f"expires_after needs {allowed}", param="expires_after")
    return seconds


class _LineCheck:
    """A check that lines are short enough to be read into memory one at a time."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._line_bytes = 0
        self._line = 1
        self.bytes = 0

    def add(self, content: bytes) -> None:
        """Check the next part of the content. Raise InvalidRequest, which names the line that is too long."""
        self.bytes += len(content)
        first, *others = content.split(b"\n")
        self._check(self._line_bytes + len(first))
        for piece in others:
            self._line += 1
            self._check(len(piece))
        self._line_bytes = len(others[-1]) if others else self._line_bytes + len(first)

    def _check(self, line_bytes: int) -> None:
        if line_bytes > self._max_line_bytes:
            raise InvalidRequest(f"line {self._line} is over {self._max_line_bytes} bytes", param="file")


class _Form:
    """A parser of a form with small fields and one file. The file's content is returned as it arrives."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._disposition: bytes = b""
        self._field: str | None = None
        self._content: list[bytes] = []
        self._whole = False
        callbacks = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_part_end": self._part_ends,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def write(self, part: bytes) -> None:
        """Parse the next part of the body. Raise InvalidRequest."""
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise InvalidRequest(f"the form is malformed: {error}", param="body") from None

    def taken(self) -> list[bytes]:
        """Return the file's content that has arrived since the last call."""
        content, self._content = self._content, []
        return content

    def finish(self) -> None:
        """Raise InvalidRequest if the form is incomplete."""
        if not self._whole:
            raise InvalidRequest("the form ends before its last boundary", param="body")

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"a form may have {MAX_PARTS} parts", param="body")
        self._disposition, self._field = b"", None

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._add(self._header, data[start:end], MAX_HEADER_BYTES)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._add(self._value, data[start:end], MAX_HEADER_BYTES)

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file":
            if self.file_name is not None:
                raise InvalidRequest("the form has two files", param="file")
            self.file_name = options.get(b"filename", b"file").decode(errors="replace")[:MAX_NAME_CHARS]
        else:
            self._field = name

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._content.append(data[start:end])
        else:
            self._add(self._value, data[start:end], MAX_FIELD_BYTES)

    def _part_ends(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")
            self._value.clear()

    def _end(self) -> None:
        self._whole = True

    def _add(self, buffer: bytearray, data: bytes, max_bytes: int) -> None:
        buffer += data
        if len(buffer) > max_bytes:
            raise InvalidRequest(f"a part of the form is over {max_bytes} bytes", param=self._field or "body")
