"""The port to the storage of clients' files, both uploaded and generated ones.

A file appears whole or not at all, and never changes. Object stores with multipart uploads can guarantee this as
well.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class FileInfo:
    id: str
    name: str
    purpose: str
    bytes: int
    created_unix_s: int
    created_unix_ns: int = 0
    """The time of creation with a resolution that orders files made in one second; 0 in descriptions of older
    versions.
    """
    tenant: str = ""
    """The owner of the file; empty in descriptions of older versions."""
    expires_unix_s: int = 0
    """When the file should be deleted; 0 for never."""


def youngest_first(infos: Iterable[FileInfo]) -> list[FileInfo]:
    # One order for all listings, even while others add files.
    return sorted(infos, key=lambda info: (-info.created_unix_s, -info.created_unix_ns, info.id))


class Stored(NamedTuple):
    """The number of files stored, and their total size."""

    files: int = 0
    bytes: int = 0


class Draft(Protocol):
    """A file that is being written and is not visible yet."""

    async def write(self, part: bytes) -> None:
        """Append to the file. Raises FileTooLarge or StoreFull."""
        ...

    async def keep(
        self, *, name: str, purpose: str, file_id: str = "", tenant: str = "", expires_in_s: int = 0
    ) -> FileInfo:
        """Make the complete file visible to everybody, replacing one with the same id. Raises StoreFull.

        `file_id` is the file's id if it differs from the draft's, `tenant` is its owner, and an `expires_in_s` of 0
        means never.
        """
        ...


class FileStore(Protocol):
    """Files by id. Methods raise FileNotFound for an unknown id, and StoreUnavailable while the store does not
    respond.
    """

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

    async def stored(self) -> Stored:
        """Return the totals of the store, at most a few seconds old."""
        ...

    async def delete(self, file_id: str) -> None: ...
