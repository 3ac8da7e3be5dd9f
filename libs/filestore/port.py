"""The port to where files of clients are kept: what they upload, and what is made for them.

A file is there whole or not at all, and never changes: what object stores with multipart uploads can do as well.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file."""

    id: str
    name: str
    """As its maker called it."""
    purpose: str
    bytes: int
    created_unix_s: int
    created_unix_ns: int = 0
    """The same moment, finely enough to order what was made in one second; 0 in descriptions of older versions."""
    tenant: str = ""
    """Whose it is; empty in descriptions of older versions."""
    expires_unix_s: int = 0
    """When its maker wants it deleted; 0: never."""


def youngest_first(infos: Iterable[FileInfo]) -> list[FileInfo]:
    """One order for all who list, whoever else keeps files meanwhile."""
    return sorted(infos, key=lambda info: (-info.created_unix_s, -info.created_unix_ns, info.id))


class Stored(NamedTuple):
    """How much is stored."""

    files: int = 0
    bytes: int = 0


class Draft(Protocol):
    """A file that is being written."""

    async def write(self, part: bytes) -> None:
        """Append; raises FileTooLarge or StoreFull."""
        ...

    async def keep(
        self, *, name: str, purpose: str, file_id: str = "", tenant: str = "", expires_in_s: int = 0
    ) -> FileInfo:
        """It is whole: from now on others see it; raises StoreFull. One of the same id is replaced.

        `file_id`: its id, where that is another than the draft's. `tenant`: whose it is. `expires_in_s`: 0: never.
        """
        ...


class FileStore(Protocol):
    """Files by id. Raises FileNotFound for an id that it does not hold, StoreUnavailable while it does not answer."""

    def draft(self, file_id: str, *, max_bytes: int) -> AbstractAsyncContextManager[Draft]:
        """A new file; what has not been kept when the context closes leaves nothing behind."""
        ...

    async def need_room(self, more_bytes: int) -> None:
        """Raises StoreFull where `more_bytes` do not fit now."""
        ...

    async def info(self, file_id: str) -> FileInfo:
        """What is known of a file."""
        ...

    def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Its bytes from `first_byte`, in parts of at most a megabyte."""
        ...

    async def infos(self) -> list[FileInfo]:
        """All of them, the youngest first."""
        ...

    async def of(self, tenant: str) -> list[FileInfo]:
        """Those of one tenant, the youngest first. Their number alone decides what it costs."""
        ...

    async def stored(self) -> Stored:
        """How much all of them are, a few seconds late at most."""
        ...

    async def delete(self, file_id: str) -> None:
        """Forget one."""
        ...
