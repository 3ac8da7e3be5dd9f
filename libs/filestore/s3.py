"""A file store in a bucket of S3 or of a compatible service, shared by gateways on any host.

A file consists of two objects: its content, under its own key, and its description, which names that key and is written
last. The file therefore appears whole or not at all. A reader of a file that is being replaced reads the old content to
its end or gets an error. Uploads of a process that died are left to the bucket's rule on incomplete uploads.

A copy of each description is stored under the tenant's name, so that a tenant's files are listed without those of
others. The copy is written before the original. If a process died in between, or an older version wrote the file,
listing all files repairs the copies.
"""

import asyncio
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import structlog
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from libs.contracts.errors import FileNotFound, FileTooLarge, StoreUnavailable
from libs.filestore.port import FileIndex, FileInfo, Room, StoreTotals, not_found, youngest_first

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef, ObjectTypeDef

log = structlog.get_logger()

# S3 requires parts of at least 5 MiB, and allows at most 10,000 of them.
PART_BYTES = 8 * 1024 * 1024
READ_BYTES = 256 * 1024
MAX_READING = 16
"""The maximum number of descriptions that are fetched concurrently."""
MEASURE_S = 5.0
"""The interval between measurements of the store. Files kept by this process count at once."""
ORPHAN_S = 3600.0
"""The age at which a copy without an original is an orphan rather than part of a file being kept."""
TIMEOUT_S = 20.0
ATTEMPTS = 3
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
# Without NoSuchUpload, after which a file must be written again: the store has ended its upload, or a request to
# complete it was repeated because the first reply was lost.
_ABSENT = {"NoSuchKey", "404"}
_ERRORS = (BotoCoreError, HTTPClientError, aiohttp.ClientError, OSError, TimeoutError)


class _StoredFile(msgspec.Struct):
    info: FileInfo
    content_key: str


class _Unreadable(StoreUnavailable):
    """An object in place of a description that no store has written."""


class S3Files:
    """A file store in `bucket` under `prefix`, of at most `max_bytes` in total. Created by `open_s3`."""

    def __init__(
        self, client: "S3Client", bucket: str, prefix: str, *, max_bytes: int, measure_s: float = MEASURE_S
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._room = Room(max_bytes, self._measure)
        self._index: FileIndex[str] = FileIndex()
        """The descriptions read so far, which stay valid while the ETag is the same."""
        self._measure_s = measure_s
        self._measured_s = -math.inf

    @asynccontextmanager
    async def draft(self, file_id: str, *, max_bytes: int) -> AsyncIterator["S3Draft"]:
        self.known_key(file_id)
        await self._room.measure()
        content_key = f"{self._prefix}content/{file_id}/{uuid.uuid4().hex}"
        draft = S3Draft(self, file_id, content_key, self._room, max_bytes=max_bytes)
        try:
            yield draft
        finally:
            await asyncio.shield(draft.discard())
            self._room.give(draft.held_bytes)

    async def need_room(self, more_bytes: int) -> None:
        await self._room.measure()
        self._room.check(more_bytes)

    async def info(self, file_id: str) -> FileInfo:
        return (await self.known(file_id)).info

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Yield the content from `first_byte` on, in parts of at most READ_BYTES."""
        known = await self.known(file_id)
        end = known.info.bytes if length is None else min(first_byte + length, known.info.bytes)
        if first_byte >= end:
            return
        with _typed_errors(file_id):
            span = f"bytes={first_byte}-{end - 1}"
            found = await self._client.get_object(Bucket=self._bucket, Key=known.content_key, Range=span)
            async with found["Body"] as body:
                while part := await body.read(READ_BYTES):
                    yield part

    async def infos(self) -> list[FileInfo]:
        began_s = time.monotonic()
        copies = {item["Key"]: item for item in await self._list("own/")}
        await self._read_new("info/")
        await self._mend_copies(copies)
        self._measured_s = began_s
        return youngest_first(self._index.infos())

    async def of(self, tenant: str) -> list[FileInfo]:
        if self._measured_s == -math.inf:
            await self.infos()  # missing copies must be repaired once
        await self._read_new(self._own(tenant), tenant)
        return self._index.of(tenant)

    async def stored(self) -> StoreTotals:
        """Return the totals of the store, at most `measure_s` old."""
        if time.monotonic() - self._measured_s >= self._measure_s:
            await self.infos()
        return self._index.stored

    async def delete(self, file_id: str) -> None:
        known = await self.known(file_id)
        await self.remove(self.known_key(file_id))
        await self.remove(known.content_key)
        await self.remove(self._own_key(known.info))
        self._index.drop(file_id)

    async def _list(self, folder: str) -> "list[ObjectTypeDef]":
        found: list[ObjectTypeDef] = []
        with _typed_errors(""):
            pages = self._client.get_paginator("list_objects_v2")
            async for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + folder):
                found += page.get("Contents", ())
        return found

    async def _read_new(self, folder: str, tenant: str | None = None) -> None:
        """Read the new descriptions in the folder of one tenant or of all files."""
        start = len(self._prefix + folder)
        etags = {item["Key"][start:].removesuffix(".json"): item["ETag"] for item in await self._list(folder)}
        at_once = asyncio.Semaphore(MAX_READING)

        async def read(name: str) -> None:
            key = f"{self._prefix}{folder}{name}.json"
            async with at_once:
                try:
                    self._index.put(name, etags[name], (await self._read_description(key)).info)
                except FileNotFound:  # deleted after it was listed
                    self._index.drop(name)
                except _Unreadable as error:
                    log.warning("an object where a file's description should be is not one", key=key, error=str(error))
                    self._index.put(name, etags[name], None)

        await asyncio.gather(*map(read, self._index.unread(etags, tenant)))

    async def _mend_copies(self, copies: "dict[str, ObjectTypeDef]") -> None:
        """Write missing tenants' copies, and remove old ones without an original.

        `copies` were listed before the originals.
        """
        at_once = asyncio.Semaphore(MAX_READING)

        async def copy(info: FileInfo) -> None:
            async with at_once:
                with suppress(FileNotFound):  # deleted after it was listed
                    await self.put(self._own_key(info), msgspec.json.encode(await self.known(info.id)))

        there = list(self._index.infos())
        await asyncio.gather(*(copy(info) for info in there if copies.pop(self._own_key(info), None) is None))
        for key, item in copies.items():
            if time.time() - item["LastModified"].timestamp() > ORPHAN_S:
                await self.remove(key)

    def _own(self, tenant: str) -> str:
        return f"own/{tenant or '-'}/"

    def _own_key(self, info: FileInfo) -> str:
        return f"{self._prefix}{self._own(info.tenant)}{info.id}.json"

    # ------------------------------------------------------------ for drafts

    async def known(self, file_id: str) -> _StoredFile:
        return await self._read_description(self.known_key(file_id), file_id)

    async def put(self, key: str, body: bytes) -> str:
        """Write one object and return its ETag."""
        with _typed_errors(key):
            return (await self._client.put_object(Bucket=self._bucket, Key=key, Body=body))["ETag"]

    async def describe(self, known: _StoredFile) -> None:
        """Write the description, which makes the file visible to everybody."""
        body = msgspec.json.encode(known)
        await self.put(self._own_key(known.info), body)
        try:
            etag = await self.put(self.known_key(known.info.id), body)
        except StoreUnavailable:
            with suppress(StoreUnavailable):
                await self.remove(self._own_key(known.info))
            raise
        self._index.put(known.info.id, etag, known.info)

    async def remove(self, key: str) -> None:
        """Delete an object, whether or not it exists."""
        with _typed_errors(key):
            await self._client.delete_object(Bucket=self._bucket, Key=key)

    async def begin(self, key: str) -> str:
        with _typed_errors(key):
            return (await self._client.create_multipart_upload(Bucket=self._bucket, Key=key))["UploadId"]

    async def part(self, key: str, upload_id: str, number: int, body: bytes) -> "CompletedPartTypeDef":
        """Upload one part; parts are numbered from 1."""
        with _typed_errors(key):
            done = await self._client.upload_part(
                Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=body
            )
        return {"ETag": done["ETag"], "PartNumber": number}

    async def complete(self, key: str, upload_id: str, parts: "list[CompletedPartTypeDef]") -> None:
        with _typed_errors(key):
            await self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )

    async def abandon(self, key: str, upload_id: str) -> None:
        with _typed_errors(key):
            await self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)

    async def _measure(self) -> int:
        # Uploads of other processes count only once they have been kept.
        return (await self.stored()).bytes

    async def _read_description(self, key: str, file_id: str = "") -> _StoredFile:
        with _typed_errors(file_id or key):
            found = await self._client.get_object(Bucket=self._bucket, Key=key)
            async with found["Body"] as body:
                text = await body.read()
        try:
            return msgspec.json.decode(text, type=_StoredFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Unreadable(f"the description of file {file_id or key!r} cannot be read ({error})") from error

    def known_key(self, file_id: str) -> str:
        """Return the key of a file's description. Raise FileNotFound for a malformed id."""
        if not _ID.fullmatch(file_id):
            raise not_found(file_id)
        return f"{self._prefix}info/{file_id}.json"


class S3Draft:
    """A file that is being uploaded, with up to PART_BYTES of it in memory."""

    def __init__(self, store: S3Files, file_id: str, content_key: str, room: Room, *, max_bytes: int) -> None:
        self._store = store
        self._file_id = file_id
        self._content_key = content_key
        self._max_bytes = max_bytes
        self._room = room
        self._bytes = 0
        self.held_bytes = 0
        """The bytes of the store's room that this draft occupies; 0 once it has been kept."""
        self._buffer = bytearray()
        self._upload_id = ""
        self._parts: list[CompletedPartTypeDef] = []
        self._written = False
        self._kept = False

    async def write(self, part: bytes) -> None:
        self._bytes += len(part)
        if self._bytes > self._max_bytes:
            raise FileTooLarge(f"the file is over {self._max_bytes} bytes", param="file")
        await self._room.take(len(part))
        self.held_bytes += len(part)
        self._buffer += part
        while len(self._buffer) >= PART_BYTES:
            await self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    async def keep(
        self, *, name: str, purpose: str, file_id: str = "", tenant: str = "", expires_in_s: int = 0
    ) -> FileInfo:
        file_id = file_id or self._file_id
        self._store.known_key(file_id)
        await self._room.measure()
        self._room.check()
        if self._upload_id:
            if self._buffer:
                await self._send(bytes(self._buffer))
            self._written = True  # the object may exist regardless of the reply
            await self._store.complete(self._content_key, self._upload_id, self._parts)
            self._upload_id = ""
        else:
            self._written = True
            await self._store.put(self._content_key, bytes(self._buffer))
        replaced = ""
        with suppress(FileNotFound):
            replaced = (await self._store.known(file_id)).content_key
        now_ns = time.time_ns()
        ends_s = now_ns // 10**9 + expires_in_s if expires_in_s else 0
        info = FileInfo(file_id, name, purpose, self._bytes, now_ns // 10**9, now_ns, tenant, ends_s)
        async with self._room.keeping(self.held_bytes):
            await self._store.describe(_StoredFile(info, self._content_key))
            self.held_bytes = 0
        self._kept = True
        if replaced:
            await self._store.remove(replaced)
        return info

    async def discard(self) -> None:
        """Remove the upload unless it has been kept."""
        if self._kept:
            return
        if self._upload_id:
            with suppress(StoreUnavailable):
                await self._store.abandon(self._content_key, self._upload_id)
        if self._written:
            with suppress(StoreUnavailable):
                await self._store.remove(self._content_key)

    async def _send(self, body: bytes) -> None:
        self._upload_id = self._upload_id or await self._store.begin(self._content_key)
        self._parts.append(await self._store.part(self._content_key, self._upload_id, len(self._parts) + 1, body))


@asynccontextmanager
async def open_s3(
    bucket: str,
    *,
    max_bytes: int,
    prefix: str = "",
    endpoint: str = "",
    region: str = "",
    access_key: str = "",
    secret_key: str = "",
    measure_s: float = MEASURE_S,
) -> AsyncIterator[S3Files]:
    """Open a store in an existing bucket.

    Empty settings are taken from the sources of AWS's own clients. `measure_s` is the maximum delay before files
    kept by other processes count.
    """
    config = AioConfig(
        connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"max_attempts": ATTEMPTS, "mode": "standard"}
    )
    opening = get_session().create_client(
        "s3",
        config=config,
        endpoint_url=endpoint or None,
        region_name=region or None,
        aws_access_key_id=access_key or None,
        aws_secret_access_key=secret_key or None,
    )
    async with opening as client:
        yield S3Files(client, bucket, prefix, max_bytes=max_bytes, measure_s=measure_s)


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """Map the client's errors to FileNotFound and StoreUnavailable."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _ABSENT:
            raise not_found(what) from error
        raise StoreUnavailable(f"the file store refused ({code})") from error
    except _ERRORS as error:
        raise StoreUnavailable(f"the file store does not answer ({error!r})") from error
