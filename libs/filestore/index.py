"""Descriptions of a store's files in memory, by id and by tenant, so that a tenant's are found without those of others.

An entry's mark changes with its file: an inode in a folder, an ETag in a bucket. Whoever looks at the store's names and
marks reads only the descriptions that are new. Pure; a store guards it against its threads.
"""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from libs.filestore.port import FileInfo, Stored, youngest_first

Mark = TypeVar("Mark", int, str)


class FileIndex(Generic[Mark]):
    """What was read of each name."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._infos: dict[str, FileInfo] = {}
        self._of: dict[str, dict[str, FileInfo]] = {}
        self._ordered: dict[str, list[FileInfo]] = {}
        """The youngest first, of tenants that were asked for and have not changed since."""
        self._bytes = 0

    def unread(self, marks: Mapping[str, Mark], tenant: str | None = None) -> list[str]:
        """Forget names that are not among `marks`, and return those whose description is to be read. tenant: whose
        `marks` are; None: all names of the store."""
        known = self._marks if tenant is None else self._of.get(tenant, {})
        for name in known.keys() - marks.keys():
            self.drop(name)
        return [name for name, mark in marks.items() if self._marks.get(name) != mark]

    def put(self, name: str, mark: Mark, info: FileInfo | None) -> None:
        """Remember a description; None for a name under which there is none."""
        self.drop(name)
        self._marks[name] = mark
        if info is not None:
            self._infos[name] = info
            self._of.setdefault(info.tenant, {})[name] = info
            self._ordered.pop(info.tenant, None)
            self._bytes += info.bytes

    def drop(self, name: str) -> None:
        """Forget a name."""
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
        """All files."""
        return self._infos.values()

    def of(self, tenant: str) -> list[FileInfo]:
        """The files of one tenant, the youngest first."""
        if tenant not in self._of:
            return []
        if tenant not in self._ordered:
            self._ordered[tenant] = youngest_first(self._of[tenant].values())
        return list(self._ordered[tenant])

    @property
    def stored(self) -> Stored:
        """All files together."""
        return Stored(len(self._infos), self._bytes)
