"""Parts of a job's outputs in the file store.

A name is drawn by chance, so that no two keepers write one: who was replaced and does not know yet spoils nothing.
"""

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress

from libs.contracts.errors import FileNotFound, StoreUnavailable
from libs.filestore.port import FileStore

PART_PURPOSE = "batch_part"
PART = re.compile(r"file-(.+)-(?:output|errors|places)-[0-9a-f]{16}")
"""A part's id, with that of its job."""


class Parts:
    """Those of one job."""

    def __init__(self, files: FileStore, job_id: str) -> None:
        self._files = files
        self._job_id = job_id
        self._new: list[str] = []
        """Their ids, while nobody is told of them."""

    def draw(self, kind: str) -> int:
        """A new one, of `kind` output, errors or places, that is about to be written."""
        part = secrets.randbits(64)
        self._new.append(self.file_id(kind, part))
        return part

    def file_id(self, kind: str, part: int) -> str:
        """Where it is."""
        return f"file-{self._job_id}-{kind}-{part:016x}"

    def told(self) -> None:
        """They may be needed from now on."""
        self._new.clear()

    async def drop(self) -> None:
        """Remove those that nobody was told of, if the store answers; else they stay until the job has ended."""
        for file_id in self._new:
            await self._remove(file_id)
        self._new.clear()

    async def write(self, kind: str, content: bytes) -> int:
        """One whole, in one go; raises StoreFull."""
        part = self.draw(kind)
        file_id = self.file_id(kind, part)
        async with self._files.draft(file_id, max_bytes=len(content)) as draft:
            await draft.write(content)
            await draft.keep(name=f"{self._job_id}_{kind}.part", purpose=PART_PURPOSE)
        return part

    def read(self, kind: str, part: int) -> AsyncIterator[bytes]:
        """Its bytes; raises FileNotFound."""
        return self._files.read(self.file_id(kind, part))

    async def size_bytes(self, kind: str, part: int) -> int:
        """How long it is; raises FileNotFound."""
        return (await self._files.info(self.file_id(kind, part))).bytes

    async def remove(self, kind: str, part: int) -> None:
        """It is not needed any more: remove it as `drop` does."""
        await self._remove(self.file_id(kind, part))

    async def _remove(self, file_id: str) -> None:
        with suppress(FileNotFound, StoreUnavailable):
            await self._files.delete(file_id)
