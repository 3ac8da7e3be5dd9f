"""One output file of a job while it grows: its stored parts and the part being written."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from libs.contracts.errors import FileTooLarge
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import AssembledFile
from libs.filestore.port import Draft, FileStore
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.lines.parts import PART_PURPOSE, Parts

WRITE_BYTES = 256 * 1024
OUTPUT_PURPOSE = "batch_output"


class Output:
    """The file `file-JOB-KIND`, as a context manager whose exit discards lines that were written but not kept."""

    def __init__(
        self, files: FileStore, parts: Parts, job: Job, kind: str, before: AssembledFile, *, max_bytes: int
    ) -> None:
        """`before` holds the parts that are kept already."""
        self._files = files
        self._parts = parts
        self._job_id = job.id
        self._tenant = job.created.tenant
        self._kind = kind
        self._max_bytes = max_bytes
        self._kept = list(before.parts)
        self._held = AsyncExitStack()
        self._draft: Draft | None = None
        self._buffer = bytearray()
        self.lines = int(before.lines)
        self.open_bytes = 0
        """The number of bytes that are not in a part yet."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    async def write(self, line: bytes) -> None:
        self.lines += 1
        self._buffer += line
        self._buffer += b"\n"
        self.open_bytes += len(line) + 1
        if len(self._buffer) >= WRITE_BYTES:
            await self._flush()

    async def keep_part(self) -> AssembledFile:
        """Store the lines since the last part as a new one; it stays once the result is published. Raises StoreFull."""
        if self.open_bytes:
            await self._flush()
            part = self._parts.draw(self._kind)
            part_id = self._parts.file_id(self._kind, part)
            await self._keep_draft(f"{self._job_id}_{self._kind}.part", PART_PURPOSE, part_id)
            self._kept.append(part)
            self.open_bytes = 0
        return AssembledFile(lines=self.lines, parts=self._kept)

    async def kept_bytes(self) -> int:
        """Bytes of all parts; raises FileNotFound when one is gone, FileTooLarge above the bound of a file."""
        found = sum([await self._parts.size_bytes(self._kind, part) for part in self._kept])
        if found > self._max_bytes:
            raise FileTooLarge(f"the file is over {self._max_bytes} bytes", param="file")
        return found

    async def keep(self) -> str:
        """Join the parts into one file and return its id; returns "" and writes no file when there is no line.

        Where there are parts, every line must be in them. Raises StoreFull, and FileNotFound when a part is gone.
        """
        if not self.lines:
            return ""
        for part in self._kept:
            async for piece in self._parts.read(self._kind, part):
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
        info = await (await self._open()).keep(name=name, purpose=purpose, file_id=file_id, tenant=self._tenant)
        self._draft = None
        await self._held.aclose()
        return info.id

    @property
    def _file_id(self) -> str:
        return f"file-{self._job_id}-{self._kind}"
