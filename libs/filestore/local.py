"""A file store in a local folder, which several processes of one host may share.

Each file is a folder named by its id and moved into place by one rename. Content and description therefore appear
together, and both are on disk by then. The drafts folder marks the store as present. It is created once, when a
process opens the store. If the disk disappears later, nothing counts as deleted, and nothing is written to the
mount point below. Files hold prompts and answers, so files and folders are accessible only to the user who runs the
processes.
"""

import asyncio
import errno
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import structlog

from libs.contracts.errors import FileTooLarge, StoreFull, StoreUnavailable
from libs.filestore.port import FileIndex, FileInfo, Room, StoreTotals, not_found, youngest_first
from libs.runtime.paths import PRIVATE_FILE, PRIVATE_FOLDER, create_private, private_folder

log = structlog.get_logger()
T = TypeVar("T")

READ_BYTES = 256 * 1024
STALE_DRAFT_S = 24 * 3600.0
"""The age at which a draft counts as abandoned by its process."""
SCAN_S = 60.0
"""The interval between full scans.

They find changes that are not in the journal: those made by a process that died, by an older version, or by hand.
"""
MAX_JOURNAL_BYTES = 1024 * 1024
NOTE_ATTEMPTS = 3
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_CONTENT, _INFO, _DRAFTS = "content", "info.json", ".drafts"
_JOURNAL = ".changes"
"""A journal of ids that were added or deleted, one per line, to which several processes append."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NONE = (FileNotFoundError, NotADirectoryError)
"""Errors that mean there is no file, as opposed to an unreadable one."""


class LocalFiles:
    """A file store in `folder`, of at most `max_bytes` in total."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._room = Room(max_bytes, self._measure)
        self._own: set[Path] = set()
        """Folders of the drafts that this process is writing."""
        self._index: FileIndex[int] = FileIndex()
        self._looking = threading.Lock()
        self._journal_read: tuple[int, int] | None = None
        """The journal's inode and the offset up to which the index is current; None requires a full scan."""
        self._scanned_s = 0.0
        self._unread: frozenset[str] = frozenset()
        """Names whose description the latest scan could not read."""
        with suppress(OSError):  # each use of the store reports the error
            private_folder(folder, allowed=0o077)  # the root of a volume keeps its owner's permissions
            private_folder(folder / _DRAFTS, allowed=0o077)

    @asynccontextmanager
    async def draft(self, file_id: str, *, max_bytes: int) -> AsyncIterator["LocalDraft"]:
        home, target = self._folder / _DRAFTS / uuid.uuid4().hex, self._home(file_id)
        self._own.add(home)
        try:
            with _store_errors():
                await self._room.measure()
                draft = await asyncio.to_thread(
                    LocalDraft, home, target, self._room, self._home, max_bytes=max_bytes, note=self._note
                )
            try:
                yield draft
            finally:
                await asyncio.shield(asyncio.to_thread(draft.discard))
                self._room.give(draft.held_bytes)
        finally:
            self._own.discard(home)

    async def need_room(self, more_bytes: int) -> None:
        with _store_errors():
            await self._room.measure()
        self._room.check(more_bytes)

    async def info(self, file_id: str) -> FileInfo:
        home = self._home(file_id)
        with self._found(file_id):
            return await asyncio.to_thread(_read_info, home)

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Yield the content from `first_byte` on, in parts of at most READ_BYTES."""
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
        with _store_errors():
            return youngest_first(await asyncio.to_thread(self._look, lambda index: list(index.infos()), whole=True))

    async def of(self, tenant: str) -> list[FileInfo]:
        with _store_errors():
            return await asyncio.to_thread(self._look, lambda index: index.of(tenant))

    async def stored(self) -> StoreTotals:
        with _store_errors():
            return await asyncio.to_thread(self._look, lambda index: index.stored)

    async def delete(self, file_id: str) -> None:
        home = self._home(file_id)
        with self._found(file_id):
            await asyncio.to_thread(_remove, home, self._folder / _DRAFTS / uuid.uuid4().hex)
            await asyncio.to_thread(self._note, file_id)

    def _home(self, file_id: str) -> Path:
        if not _ID.fullmatch(file_id):
            raise not_found(file_id)
        return self._folder / file_id

    @contextmanager
    def _found(self, file_id: str) -> Iterator[None]:
        """Raise FileNotFound for a missing file, provided that the store itself exists."""
        with _store_errors():
            try:
                yield
            except _NONE:
                (self._folder / _DRAFTS).stat()
                raise not_found(file_id) from None

    def _look(self, read: Callable[[FileIndex[int]], T], *, whole: bool = False) -> T:
        """Bring the index up to date and read from it. `whole` forces a full scan instead of reading the journal's
        tail.
        """
        with self._looking:
            (self._folder / _DRAFTS).stat()
            journal = self._folder / _JOURNAL
            inode, size = _extent(journal)
            known = self._journal_read
            is_known = known is not None and known[0] == inode and known[1] <= size
            if whole or known is None or not is_known or time.monotonic() - self._scanned_s > SCAN_S:
                self._scan()
                self._scanned_s = time.monotonic()
                if size > MAX_JOURNAL_BYTES:
                    journal.unlink(missing_ok=True)  # every process then scans all names once
            elif known[1] < size:
                with journal.open("rb") as file:
                    names = os.pread(file.fileno(), size - known[1], known[1]).decode(errors="replace")
                for name in dict.fromkeys(names.split()):
                    self._read_again(name)
            self._journal_read = inode, size
            return read(self._index)

    def _note(self, file_id: str) -> None:
        """Append a file that was added or deleted to the journal, which every process's index follows."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            for _ in range(NOTE_ATTEMPTS):
                with os.fdopen(os.open(self._folder / _JOURNAL, flags, PRIVATE_FILE), "wb", buffering=0) as file:
                    file.write(f"{file_id}\n".encode())
                    if os.fstat(file.fileno()).st_nlink:  # otherwise it was replaced in the meantime
                        return
        except OSError as error:  # for example, a full disk; the file still exists and is found within SCAN_S
            log.warning("a change of the file store could not be noted", file=file_id, error=str(error))
        self._journal_read = None

    def _read_again(self, name: str) -> None:
        self._index.drop(name)
        if _ID.fullmatch(name):
            home = self._folder / name
            with suppress(*_NONE, StoreUnavailable):
                self._index.put(name, home.stat().st_ino, _read_info(home))

    def _scan(self) -> None:
        """Read the new descriptions. An unreadable one does not affect the others."""
        with os.scandir(self._folder) as entries:
            # A file is a folder renamed into place, so that a new one has a new inode.
            inodes = {entry.name: entry.inode() for entry in entries if entry.name[0] != "."}
        unread: set[str] = set()
        for name in self._index.unread(inodes):
            self._index.drop(name)
            try:
                self._index.put(name, inodes[name], _read_info(self._folder / name))
            except _NONE:
                pass
            except (OSError, StoreUnavailable):
                unread.add(name)
        if unread - self._unread:
            log.warning("files of the store cannot be read", count=len(unread), first=min(unread))
        self._unread = frozenset(unread)

    async def _measure(self) -> int:
        return await asyncio.to_thread(self._used_bytes, frozenset(self._own))

    def _used_bytes(self, own: frozenset[Path]) -> int:
        """Return the bytes of files and of other processes' drafts, and remove abandoned drafts."""
        used = self._look(lambda index: index.stored.bytes)
        drafts = self._folder / _DRAFTS
        others = [home for home in drafts.iterdir() if home not in own]
        for home in others:
            if time.time() - _changed_s(home) > STALE_DRAFT_S:
                shutil.rmtree(home, ignore_errors=True)
        return used + sum(_size(home / _CONTENT) for home in others)


class LocalDraft:
    """A file that is being written, in its own folder."""

    def __init__(
        self,
        home: Path,
        target: Path,
        room: Room,
        home_of: Callable[[str], Path],
        *,
        max_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self._home_of = home_of
        self._home = home
        self._target = target
        self._room = room
        self._max_bytes = max_bytes
        self._bytes = 0
        self.held_bytes = 0
        """The bytes of the store's room that this draft occupies; 0 once it has been kept."""
        home.mkdir(mode=PRIVATE_FOLDER)
        self._file: BinaryIO = create_private(home / _CONTENT)

    async def write(self, part: bytes) -> None:
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
        self._note(self._target.name)

    def discard(self) -> None:
        """Remove the draft unless it has been kept."""
        with suppress(OSError):  # buffered bytes that do not fit on a full disk
            self._file.close()
        shutil.rmtree(self._home, ignore_errors=True)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Map errors of the disk to typed ones. A full disk may be reported only when the file is closed."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(f"the file store cannot take files ({error.strerror})") from error
        raise StoreUnavailable(f"the file store does not answer ({error.strerror})") from error


def _read_info(home: Path) -> FileInfo:
    """Read a description. Raise OSError, and StoreUnavailable for a file that no store has written."""
    try:
        return msgspec.json.decode((home / _INFO).read_bytes(), type=FileInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"the description of file {home.name!r} cannot be read ({error})") from error


def _sync(file: BinaryIO) -> None:
    """Flush the file to disk, so that it survives a crash."""
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
    home.rename(aside)  # the file disappears at once, its bytes are freed later
    shutil.rmtree(aside, ignore_errors=True)


def _extent(path: Path) -> tuple[int, int]:
    """Return a file's inode and size, or zeros if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size


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
