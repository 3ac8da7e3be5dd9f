"""Parts of a job's outputs in the file store.

Names are random, so that no two keepers write the same part: a keeper that was replaced and does not know it yet
overwrites nothing.
"""

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress

from libs.contracts.errors import FileNotFound, StoreUnavailable
from libs.filestore.port import FileStore

PART_PURPOSE = "batch_part"
PART = re.compile(r"file-(.+)-(?:output|errors|places)-[0-9a-f]{16}")
"""A part's id; group 1 is the id of its job."""


class Parts:
    """The parts of one job."""

    def __init__(self, files: FileStore, job_id: str) -> None:
        self._files = files
        self._job_id = job_id
        self._new: list[str] = []
        """Ids of parts that no published event names."""

    def draw(self, kind: str) -> int:
        """Draw the number of a part that is about to be written; `kind`: output, errors or places."""
        part = secrets.randbits(64)
        self._new.append(self.file_id(kind, part))
        return part

    def file_id(self, kind: str, part: int) -> str:
        """The id of a part in the file store."""
        return f"file-{self._job_id}-{kind}-{part:016x}"

    def published(self) -> None:
        """An event is about to name the new parts: `drop` must not remove them."""
        self._new.clear()

    async def drop(self) -> None:
        """Remove parts that no event names, if the store answers; otherwise they stay until the job has ended."""
        for file_id in self._new:
            await self._remove(file_id)
        self._new.clear()

    async def write(self, kind: str, content: bytes) -> int:
        """Write a whole part and return its number; raises StoreFull."""
        part = self.draw(kind)
        file_id = self.file_id(kind, part)
        async with self._files.draft(file_id, max_bytes=len(content)) as draft:
            await draft.write(content)
            await draft.keep(name=f"{self._job_id}_{kind}.part", purpose=PART_PURPOSE)
        return part

    def read(self, kind: str, part: int) -> AsyncIterator[bytes]:
        """The bytes of a part; raises FileNotFound."""
        return self._files.read(self.file_id(kind, part))

    async def size_bytes(self, kind: str, part: int) -> int:
        """The size of a part; raises FileNotFound."""
        return (await self._files.info(self.file_id(kind, part))).bytes

    async def remove(self, kind: str, part: int) -> None:
        """Remove a part that is no longer needed, if the store answers."""
        await self._remove(self.file_id(kind, part))

    async def _remove(self, file_id: str) -> None:
        with suppress(FileNotFound, StoreUnavailable):
            await self._files.delete(file_id)
