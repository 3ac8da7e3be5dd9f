"""The port to the storage of clients' files, both uploaded and generated ones, and the code that its adapters share.

A file appears completely or not at all, and never changes. Object stores with multipart uploads can guarantee this as
well.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from libs.contracts.errors import FileNotFound, StoreFull, quoted


@dataclass(frozen=True, slots=True)
class FileInfo:
    id: str
    name: str
    purpose: str
    bytes: int
    created_unix_s: int
    created_unix_ns: int = 0
    """The time of creation, which orders files made in one second; 0 in descriptions of older versions."""
    tenant: str = ""
    """The owner of the file; empty in descriptions of older versions."""
    expires_unix_s: int = 0
    """The time from which the file may be deleted; 0 if it never may."""


def youngest_first(infos: Iterable[FileInfo]) -> list[FileInfo]:
    # One order for all listings, even while others add files.
    return sorted(infos, key=lambda info: (-info.created_unix_s, -info.created_unix_ns, info.id))


def not_found(file_id: str) -> FileNotFound:
    return FileNotFound(f"no file {quoted(file_id)} is kept here", param="file_id")


class StoreTotals(NamedTuple):
    """The number of files stored, and their total size."""

    files: int = 0
    bytes: int = 0


class Draft(Protocol):
    """A file that is being written and is not visible yet."""

    async def write(self, part: bytes) -> None:
        """Append to the file. Raise FileTooLarge or StoreFull."""
        ...

    async def keep(
        self, *, name: str, purpose: str, file_id: str = "", tenant: str = "", expires_in_s: int = 0
    ) -> FileInfo:
        """Make the complete file visible to everybody, replacing one with the same id. Raise StoreFull.

        `file_id` is the file's id if it differs from the draft's, `tenant` is its owner, and an `expires_in_s` of 0
        means never.
        """
        ...


class FileStore(Protocol):
    """Files by id. Methods raise FileNotFound, or StoreUnavailable while the store does not respond."""

    def draft(self, file_id: str, *, max_bytes: int) -> AbstractAsyncContextManager[Draft]:
        """Create a file. A draft that has not been kept when the context closes leaves nothing behind."""
        ...

    async def need_room(self, more_bytes: int) -> None:
        """Raise StoreFull if `more_bytes` do not fit now."""
        ...

    async def info(self, file_id: str) -> FileInfo: ...

    def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Yield the content from `first_byte` on, in parts of at most a megabyte."""
        ...

    async def infos(self) -> list[FileInfo]:
        """Return the descriptions of all files, youngest first."""
        ...

    async def of(self, tenant: str) -> list[FileInfo]:
        """Return the descriptions of one tenant's files, youngest first. The cost depends only on their number."""
        ...

    async def stored(self) -> StoreTotals:
        """Return the totals of the store, at most a few seconds old."""
        ...

    async def delete(self, file_id: str) -> None: ...


Mark = TypeVar("Mark", int, str)


class FileIndex(Generic[Mark]):
    """The marks and descriptions read so far, by name, and by tenant for cheap listing. Pure.

    The mark of an entry changes with its file: an inode in a folder, an ETag in a bucket. A store that lists names
    and marks reads only the descriptions that are new. The store protects the index from concurrent threads.
    """

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._infos: dict[str, FileInfo] = {}
        self._of: dict[str, dict[str, FileInfo]] = {}
        self._ordered: dict[str, list[FileInfo]] = {}
        """Files of each tenant, youngest first, cached until one of them changes."""
        self._bytes = 0

    def unread(self, marks: Mapping[str, Mark], tenant: str | None = None) -> list[str]:
        """Drop names that are not in `marks`, and return those whose descriptions must be read.

        `marks` covers all names of the store, or those of one tenant if given.
        """
        known = self._marks if tenant is None else self._of.get(tenant, {})
        for name in known.keys() - marks.keys():
            self.drop(name)
        return [name for name, mark in marks.items() if self._marks.get(name) != mark]

    def put(self, name: str, mark: Mark, info: FileInfo | None) -> None:
        """Store the description behind a name; None if it has none."""
        self.drop(name)
        self._marks[name] = mark
        if info is not None:
            self._infos[name] = info
            self._of.setdefault(info.tenant, {})[name] = info
            self._ordered.pop(info.tenant, None)
            self._bytes += info.bytes

    def drop(self, name: str) -> None:
        self._marks.pop(name, None)
        info = self._infos.pop(name, None)
        if info is not None:
            self._bytes -= info.bytes
            self._ordered.pop(info.tenant, None)
            own = self._of[info.tenant]
            del own[name]
            if not own:
                del self._of[info.tenant]

    def infos(self) -> Iterable[FileInfo]:
        return self._infos.values()

    def of(self, tenant: str) -> list[FileInfo]:
        if tenant not in self._of:
            return []
        if tenant not in self._ordered:
            self._ordered[tenant] = youngest_first(self._of[tenant].values())
        return list(self._ordered[tenant])

    @property
    def stored(self) -> StoreTotals:
        return StoreTotals(len(self._infos), self._bytes)


REMEASURE_BYTES = 64 * 1024 * 1024
"""The bytes that this process writes before it measures other processes' writes again."""


class Room:
    """The room of one store in one process, shared by the drafts that are written at the same time."""

    def __init__(self, max_bytes: int, measure: Callable[[], Awaitable[int]]) -> None:
        """Create the room; `measure` returns the bytes of everything in the store, without the drafts of this
        process.
        """
        self._max_bytes = max_bytes
        self._measure = measure
        self._measuring = asyncio.Lock()
        self._there_bytes = 0
        self._draft_bytes = 0
        self._unmeasured_bytes = 0

    async def measure(self) -> None:
        """Measure the store again; raise the errors of `measure`."""
        async with self._measuring:
            self._unmeasured_bytes = 0
            self._there_bytes = await self._measure()

    async def take(self, more_bytes: int) -> None:
        """Reserve bytes for a draft, which returns them at its end. Raise StoreFull."""
        self._unmeasured_bytes += more_bytes
        if self._unmeasured_bytes >= REMEASURE_BYTES:
            await self.measure()
        self.check(more_bytes)
        self._draft_bytes += more_bytes

    def check(self, more_bytes: int = 0) -> None:
        """Raise StoreFull if the store exceeds its limit, or would with these bytes."""
        if self._there_bytes + self._draft_bytes + more_bytes > self._max_bytes:
            raise StoreFull("the file store has no room for the file: delete some")

    def give(self, draft_bytes: int) -> None:
        """Return the bytes of a draft that has ended."""
        self._draft_bytes -= draft_bytes

    @asynccontextmanager
    async def keeping(self, draft_bytes: int) -> AsyncIterator[None]:
        """Turn a draft's bytes into those of a file. No measurement runs during it, so that they count once.

        Afterwards the draft has returned its bytes and must not call `give` for them.
        """
        async with self._measuring:
            yield
            self._there_bytes += draft_bytes
            self._draft_bytes -= draft_bytes
