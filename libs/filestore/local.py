"""Files in a local folder, which several processes of one host may share.

One folder a file, named by its id, moved to its place by one rename: content and what is known of it appear together,
and both are on the disk by then. The folder of drafts says that the store is there. It is made once, when a process
opens the store: where its disk has gone meanwhile, nothing counts as deleted, and nothing is written to what is below.
Files are prompts and answers: they and their folders are for the user alone whose processes these are.
"""

import asyncio
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog

from libs.contracts.errors import FileNotFound, FileTooLarge, StoreFull, StoreUnavailable, quoted
from libs.filestore.port import FileInfo, youngest_first
from libs.filestore.room import Room
from libs.runtime.paths import PRIVATE_FOLDER, create_private, private_folder

log = structlog.get_logger()

MAX_FILES = 10_000
READ_BYTES = 256 * 1024
STALE_DRAFT_S = 24 * 3600.0
"""A draft this old has lost its process."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_CONTENT, _INFO, _DRAFTS = "content", "info.json", ".drafts"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NONE = (FileNotFoundError, NotADirectoryError)
"""What is no file, rather than one that cannot be read."""


class LocalFiles:
    """FileStore in `folder`, which may hold `max_bytes` in all."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._room = Room(max_bytes, self._measure)
        self._own: set[Path] = set()
        """Drafts of this process."""
        self._unread: frozenset[str] = frozenset()
        """Names whose description could not be read when that was looked at last."""
        with suppress(OSError):  # each use of the store reports it
            private_folder(folder, allowed=0o077)  # a volume's root is as its owner made it
            private_folder(folder / _DRAFTS, allowed=0o077)

    @asynccontextmanager
    async def draft(self, file_id: str, *, max_bytes: int) -> AsyncIterator["LocalDraft"]:
        """A new file; what has not been kept when the context closes leaves nothing behind."""
        home, target = self._folder / _DRAFTS / uuid.uuid4().hex, self._home(file_id)
        self._own.add(home)
        try:
            with _store_errors():
                await self._room.measure()
                draft = await asyncio.to_thread(LocalDraft, home, target, self._room, self._home, max_bytes=max_bytes)
            try:
                yield draft
            finally:
                await asyncio.shield(asyncio.to_thread(draft.discard))
                self._room.give(draft.held_bytes)
        finally:
            self._own.discard(home)

    async def need_room(self, more_bytes: int) -> None:
        """Raises StoreFull where `more_bytes` do not fit now."""
        with _store_errors():
            await self._room.measure()
        self._room.check(more_bytes)

    async def info(self, file_id: str) -> FileInfo:
        """What is known of a file."""
        home = self._home(file_id)
        with self._found(file_id):
            return await asyncio.to_thread(_read_info, home)

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Its bytes from `first_byte`, in parts of at most READ_BYTES."""
        left, path = length, self._home(file_id) / _CONTENT
        with self._found(file_id):
            file = await asyncio.to_thread(_open, path, first_byte)
        try:
            while True:
                with _store_errors():
                    part = await asyncio.to_thread(file.read, READ_BYTES if left is None else min(left, READ_BYTES))
                if not part:
                    return
                left = None if left is None else left - len(part)
                yield part
        finally:
            file.close()

    async def infos(self) -> list[FileInfo]:
        """All of them, the youngest first."""
        with _store_errors():
            found = await asyncio.to_thread(self._scan)
        return youngest_first(found)

    async def delete(self, file_id: str) -> None:
        """Forget one."""
        home = self._home(file_id)
        with self._found(file_id):
            await asyncio.to_thread(_remove, home, self._folder / _DRAFTS / uuid.uuid4().hex)

    def _home(self, file_id: str) -> Path:
        if not _ID.fullmatch(file_id):
            raise _not_found(file_id)
        return self._folder / file_id

    @contextmanager
    def _found(self, file_id: str) -> Iterator[None]:
        """Raises FileNotFound for a file that is not there, as long as the store is."""
        with _store_errors():
            try:
                yield
            except _NONE:
                (self._folder / _DRAFTS).stat()
                raise _not_found(file_id) from None

    def _scan(self) -> list[FileInfo]:
        """One that cannot be read takes no other with it."""
        found: list[FileInfo] = []
        unread: set[str] = set()
        (self._folder / _DRAFTS).stat()
        for home in self._folder.iterdir():
            try:
                found.append(_read_info(home))
            except _NONE:
                pass
            except (OSError, StoreUnavailable):
                unread.add(home.name)
        if unread - self._unread:
            log.warning("files of the store cannot be read", count=len(unread), first=min(unread))
        self._unread = frozenset(unread)
        return found

    async def _measure(self) -> int:
        return await asyncio.to_thread(self._used_bytes, frozenset(self._own))

    def _used_bytes(self, own: frozenset[Path]) -> int:
        """By files, and by drafts that are not `own`; those that nobody writes any more are removed."""
        sizes = [info.bytes for info in self._scan()]
        if len(sizes) >= MAX_FILES:
            raise StoreFull(f"the file store holds {MAX_FILES} files already: delete some")
        drafts = self._folder / _DRAFTS
        others = [home for home in drafts.iterdir() if home not in own]
        for home in others:
            if time.time() - _changed_s(home) > STALE_DRAFT_S:
                shutil.rmtree(home, ignore_errors=True)
        return sum(sizes) + sum(_size(home / _CONTENT) for home in others)


class LocalDraft:
    """A file that is being written, in a folder of its own."""

    def __init__(self, home: Path, target: Path, room: Room, home_of: Callable[[str], Path], *, max_bytes: int) -> None:
        self._home_of = home_of
        self._home = home
        self._target = target
        self._room = room
        self._max_bytes = max_bytes
        self._bytes = 0
        self.held_bytes = 0
        """Of the store's room, beside what has been kept."""
        home.mkdir(mode=PRIVATE_FOLDER)
        self._file: BinaryIO = create_private(home / _CONTENT)

    async def write(self, part: bytes) -> None:
        """Append; raises FileTooLarge or StoreFull."""
        self._bytes += len(part)
        if self._bytes > self._max_bytes:
            raise FileTooLarge(f"the file is over {self._max_bytes} bytes", param="file")
        with _store_errors():
            await self._room.take(len(part))
            self.held_bytes += len(part)
            await asyncio.to_thread(self._file.write, part)

    async def keep(
        self, *, name: str, purpose: str, file_id: str = "", tenant: str = "", expires_in_s: int = 0
    ) -> FileInfo:
        """It is whole: from now on others see it. Raises StoreFull."""
        self._target = self._home_of(file_id) if file_id else self._target
        now_ns = time.time_ns()
        ends_s = now_ns // 10**9 + expires_in_s if expires_in_s else 0
        info = FileInfo(self._target.name, name, purpose, self._bytes, now_ns // 10**9, now_ns, tenant, ends_s)
        with _store_errors():
            await self._room.measure()
            self._room.check()
            async with self._room.keeping(self.held_bytes):
                await asyncio.to_thread(self._keep, info)
                self.held_bytes = 0
        return info

    def _keep(self, info: FileInfo) -> None:
        with self._file:
            _sync(self._file)
        with create_private(self._home / _INFO) as description:
            description.write(msgspec.json.encode(info))
            _sync(description)
        _sync_names(self._home)
        with suppress(FileNotFoundError):
            _remove(self._target, self._home.with_suffix(".old"))
        self._home.rename(self._target)
        _sync_names(self._target.parent)

    def discard(self) -> None:
        """Remove what was not kept."""
        with suppress(OSError):  # what a full disk did not take
            self._file.close()
        shutil.rmtree(self._home, ignore_errors=True)


@contextmanager
def _store_errors() -> Iterator[None]:
    """The disk's errors in our words. A part may only reach it when the file is closed."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(f"the file store cannot take files ({error.strerror})") from error
        raise StoreUnavailable(f"the file store does not answer ({error.strerror})") from error


def _read_info(home: Path) -> FileInfo:
    """Raises OSError, and StoreUnavailable for what was not written by a store."""
    try:
        return msgspec.json.decode((home / _INFO).read_bytes(), type=FileInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"what is known of file {home.name!r} cannot be read ({error})") from error


def _sync(file: BinaryIO) -> None:
    """Write the file through to the disk, so that it survives a crash."""
    file.flush()
    os.fsync(file.fileno())


def _sync_names(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _open(path: Path, first_byte: int) -> BinaryIO:
    file = path.open("rb")
    file.seek(first_byte)
    return file


def _remove(home: Path, aside: Path) -> None:
    home.rename(aside)  # gone at once for all; its bytes follow
    shutil.rmtree(aside, ignore_errors=True)


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _not_found(file_id: str) -> FileNotFound:
    return FileNotFound(f"no file {quoted(file_id)} is kept here", param="file_id")
