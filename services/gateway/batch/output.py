"""One of a job's output files while it grows: parts that stay, and the one that is written now."""

import re
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from libs.contracts.errors import FileNotFound
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import AssembledFile
from libs.filestore.port import Draft, FileStore

WRITE_BYTES = 256 * 1024
OUTPUT_PURPOSE, PART_PURPOSE = "batch_output", "batch_part"
_PART = re.compile(r"file-(.+)-(?:output|errors)-[0-9a-f]{16}")


class Output:
    """File `file-JOB-KIND`. A context: what is written and not kept when it closes is gone."""

    def __init__(self, files: FileStore, job_id: str, kind: str, before: AssembledFile, *, max_bytes: int) -> None:
        """`before`: what was kept of it."""
        self._files = files
        self._job_id = job_id
        self._kind = kind
        self._max_bytes = max_bytes
        self._parts = list(before.parts)
        self._held = AsyncExitStack()
        self._draft: Draft | None = None
        self._buffer = bytearray()
        self.lines = int(before.lines)
        self.open_bytes = 0
        """Not in a part yet."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    async def write(self, line: bytes) -> None:
        """Add a line; raises StoreFull."""
        self.lines += 1
        self._buffer += line
        self._buffer += b"\n"
        self.open_bytes += len(line) + 1
        if len(self._buffer) >= WRITE_BYTES:
            await self._flush()

    async def keep_part(self) -> AssembledFile:
        """What was written since the last part stays, once what this returns is published. Raises StoreFull."""
        if self.open_bytes:
            await self._flush()
            # A name that no other keeper uses: one that was replaced and does not know yet spoils nothing.
            part = uuid.uuid4().int & (1 << 64) - 1
            await self._keep_draft(f"{self._job_id}_{self._kind}.part", PART_PURPOSE, self._part_id(part))
            self._parts.append(part)
            self.open_bytes = 0
        return AssembledFile(lines=self.lines, parts=self._parts)

    async def keep(self) -> str:
        """Make one file of it, whose id is returned; empty, and no file, when it has no line. Raises StoreFull."""
        if not self.lines:
            return ""
        if self._parts:
            await self.keep_part()
            for part in self._parts:
                async for piece in self._files.read(self._part_id(part)):
                    await (await self._open()).write(piece)
        await self._flush()
        return await self._keep_draft(f"{self._job_id}_{self._kind}.jsonl", OUTPUT_PURPOSE, self._file_id)

    async def _open(self) -> Draft:
        if self._draft is None:
            drafting = self._files.draft(self._file_id, max_bytes=self._max_bytes)
            self._draft = await self._held.enter_async_context(drafting)
        return self._draft

    async def _flush(self) -> None:
        if self._buffer:
            part, self._buffer = bytes(self._buffer), bytearray()
            await (await self._open()).write(part)

    async def _keep_draft(self, name: str, purpose: str, file_id: str) -> str:
        info = await (await self._open()).keep(name=name, purpose=purpose, file_id=file_id)
        self._draft = None
        await self._held.aclose()
        return info.id

    @property
    def _file_id(self) -> str:
        return f"file-{self._job_id}-{self._kind}"

    def _part_id(self, part: int) -> str:
        return f"{self._file_id}-{part:016x}"


async def sweep(files: FileStore, ended: Callable[[str], bool]) -> None:
    """Remove the parts of jobs that have ended, also those that a gateway had written when it died."""
    for info in await files.infos():
        found = _PART.fullmatch(info.id) if info.purpose == PART_PURPOSE else None
        if found is not None and ended(found[1]):
            with suppress(FileNotFound):
                await files.delete(info.id)
