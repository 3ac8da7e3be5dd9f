"""An in-memory index of a store's file descriptions by id and by tenant, which makes listing one tenant cheap.

The mark of an entry changes with its file: an inode in a folder, an ETag in a bucket. A store that lists names and
marks reads only the descriptions that are new. The index is pure; the store protects it from concurrent threads.
"""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from libs.filestore.port import FileInfo, Stored, youngest_first

Mark = TypeVar("Mark", int, str)


class FileIndex(Generic[Mark]):
    """The marks and descriptions read so far, by name."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._infos: dict[str, FileInfo] = {}
        self._of: dict[str, dict[str, FileInfo]] = {}
        self._ordered: dict[str, list[FileInfo]] = {}
        """Files of each tenant, youngest first, cached until one of them changes."""
        self._bytes = 0

    def unread(self, marks: Mapping[str, Mark], tenant: str | None = None) -> list[str]:
        """Drop names that are not in `marks`, and return those whose descriptions have to be read.

        `marks` covers all names of the store, or those of one tenant if given.
        """
        known = self._marks if tenant is None else self._of.get(tenant, {})
        for name in known.keys() - marks.keys():
            self.drop(name)
        return [name for name, mark in marks.items() if self._marks.get(name) != mark]

    def put(self, name: str, mark: Mark, info: FileInfo | None) -> None:
        """Store a description, or None for a name that has none."""
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
        """Return the files of one tenant, youngest first."""
        if tenant not in self._of:
            return []
        if tenant not in self._ordered:
            self._ordered[tenant] = youngest_first(self._of[tenant].values())
        return list(self._ordered[tenant])

    @property
    def stored(self) -> Stored:
        return Stored(len(self._infos), self._bytes)
