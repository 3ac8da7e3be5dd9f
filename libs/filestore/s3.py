"""Files in a bucket of S3 or of a store that speaks its protocol, shared by gateways on any host.

A file is two objects: its content, under a key of its own, and what is known of it, which names that key and is written
last. So it is there whole or not at all, and a reader of one that is replaced reads the old content to its end or an
error. What a process that died was uploading is for the bucket's own rule on incomplete uploads.
"""

import asyncio
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

from libs.contracts.errors import FileNotFound, FileTooLarge, StoreFull, StoreUnavailable, quoted
from libs.filestore.port import FileInfo, youngest_first
from libs.filestore.room import Room

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef

log = structlog.get_logger()

MAX_FILES = 10_000
PART_BYTES = 8 * 1024 * 1024
"""Of an upload; S3 wants 5 MiB at least, and takes 10,000 parts."""
READ_BYTES = 256 * 1024
MAX_READING = 16
"""Descriptions that are fetched at once."""
TIMEOUT_S = 20.0
ATTEMPTS = 3
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_ABSENT = {"NoSuchKey", "404"}
"""Not NoSuchUpload, which says that a file has to be written again: the store has ended its upload, or was asked twice
to complete it because its first reply was lost."""
_ERRORS = (BotoCoreError, HTTPClientError, aiohttp.ClientError, OSError, TimeoutError)


class _Known(msgspec.Struct):
    info: FileInfo
    content_key: str


class _Unreadable(StoreUnavailable):
    """An object that was not written by a store."""


class S3Files:
    """FileStore in `bucket` under `prefix`, which may hold `max_bytes` in all. Made by `open_s3`."""

    def __init__(self, client: "S3Client", bucket: str, prefix: str, *, max_bytes: int) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._room = Room(max_bytes, self._measure)
        self._seen: dict[tuple[str, str], FileInfo | None] = {}
        """By key and ETag: what was read of it once need not be again. None of what tells of no file."""

    @asynccontextmanager
    async def draft(self, file_id: str, *, max_bytes: int) -> AsyncIterator["S3Draft"]:
        """A new file; what has not been kept when the context closes leaves nothing behind."""
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
        """Raises StoreFull where `more_bytes` do not fit now."""
        await self._room.measure()
        self._room.check(more_bytes)

    async def info(self, file_id: str) -> FileInfo:
        """What is known of a file."""
        return (await self.known(file_id)).info

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Its bytes from `first_byte`, in parts of at most READ_BYTES."""
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
        """All of them, the youngest first."""
        keys: list[tuple[str, str]] = []
        with _typed_errors(""):
            pages = self._client.get_paginator("list_objects_v2")
            async for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}info/"):
                keys += [(item["Key"], item["ETag"]) for item in page.get("Contents", ())]
        at_once = asyncio.Semaphore(MAX_READING)

        async def find(key: tuple[str, str]) -> tuple[tuple[str, str], FileInfo | None] | None:
            if key in self._seen:
                return key, self._seen[key]
            async with at_once:
                try:
                    return key, (await self._read_known(key[0])).info
                except FileNotFound:  # deleted since it was listed
                    return None
                except _Unreadable as error:
                    log.warning("an object in the place of a file's description is none", key=key[0], error=str(error))
                    return key, None

        found = [item for item in await asyncio.gather(*map(find, keys)) if item is not None]
        self._seen = dict(found)
        infos = [info for info in self._seen.values() if info is not None]
        return youngest_first(infos)

    async def delete(self, file_id: str) -> None:
        """Forget one."""
        known = await self.known(file_id)
        await self.remove(self.known_key(file_id))
        await self.remove(known.content_key)

    # ------------------------------------------------------------ for drafts

    async def known(self, file_id: str) -> _Known:
        """What is known of a file, and where its content is."""
        return await self._read_known(self.known_key(file_id), file_id)

    async def put(self, key: str, body: bytes) -> None:
        """One object."""
        with _typed_errors(key):
            await self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    async def remove(self, key: str) -> None:
        """One object, whether or not it is there."""
        with _typed_errors(key):
            await self._client.delete_object(Bucket=self._bucket, Key=key)

    async def begin(self, key: str) -> str:
        """An upload in parts; its id."""
        with _typed_errors(key):
            return (await self._client.create_multipart_upload(Bucket=self._bucket, Key=key))["UploadId"]

    async def part(self, key: str, upload_id: str, number: int, body: bytes) -> "CompletedPartTypeDef":
        """One part, numbered from 1."""
        with _typed_errors(key):
            done = await self._client.upload_part(
                Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=body
            )
        return {"ETag": done["ETag"], "PartNumber": number}

    async def complete(self, key: str, upload_id: str, parts: "list[CompletedPartTypeDef]") -> None:
        """The object is whole."""
        with _typed_errors(key):
            await self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )

    async def abandon(self, key: str, upload_id: str) -> None:
        """There will be no such object."""
        with _typed_errors(key):
            await self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)

    async def _measure(self) -> int:
        """What others are uploading is not seen before it is kept."""
        infos = await self.infos()
        if len(infos) >= MAX_FILES:
            raise StoreFull(f"the file store holds {MAX_FILES} files already: delete some")
        return sum(info.bytes for info in infos)

    async def _read_known(self, key: str, file_id: str = "") -> _Known:
        with _typed_errors(file_id or key):
            found = await self._client.get_object(Bucket=self._bucket, Key=key)
            async with found["Body"] as body:
                text = await body.read()
        try:
            return msgspec.json.decode(text, type=_Known)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Unreadable(f"what is known of file {file_id or key!r} cannot be read ({error})") from error

    def known_key(self, file_id: str) -> str:
        """The key of a file's description; raises FileNotFound for a malformed id."""
        if not _ID.fullmatch(file_id):
            raise _not_found(file_id)
        return f"{self._prefix}info/{file_id}.json"


class S3Draft:
    """A file that is being uploaded, PART_BYTES of it in memory."""

    def __init__(self, store: S3Files, file_id: str, content_key: str, room: Room, *, max_bytes: int) -> None:
        self._store = store
        self._file_id = file_id
        self._content_key = content_key
        self._max_bytes = max_bytes
        self._room = room
        self._bytes = 0
        self.held_bytes = 0
        """Of the store's room, beside what has been kept."""
        self._buffer = bytearray()
        self._upload_id = ""
        self._parts: list[CompletedPartTypeDef] = []
        self._written = False
        self._kept = False

    async def write(self, part: bytes) -> None:
        """Append; raises FileTooLarge or StoreFull."""
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
        """It is whole: from now on others see it. Raises StoreFull."""
        file_id = file_id or self._file_id
        known_key = self._store.known_key(file_id)
        await self._room.measure()
        self._room.check()
        if self._upload_id:
            if self._buffer:
                await self._send(bytes(self._buffer))
            self._written = True  # perhaps, whatever is replied
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
            await self._store.put(known_key, msgspec.json.encode(_Known(info, self._content_key)))
            self.held_bytes = 0
        self._kept = True
        if replaced:
            await self._store.remove(replaced)
        return info

    async def discard(self) -> None:
        """Remove what was not kept."""
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
) -> AsyncIterator[S3Files]:
    """A store in a bucket that is there. What is left empty is taken from where AWS's own clients take it."""
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
        yield S3Files(client, bucket, prefix, max_bytes=max_bytes)


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """The store's errors in our words."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _ABSENT:
            raise _not_found(what) from error
        raise StoreUnavailable(f"the file store refused ({code})") from error
    except _ERRORS as error:
        raise StoreUnavailable(f"the file store does not answer ({error!r})") from error


def _not_found(file_id: str) -> FileNotFound:
    return FileNotFound(f"no file {quoted(file_id)} is kept here", param="file_id")
