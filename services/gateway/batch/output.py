"""The two output files of a job, assembled from the results topic. They contain each line once, in order of arrival.

Answers are first stored in part files of PART_BYTES, together with a file of the lines that they answer. An event names
the parts and the offsets up to which they contain results, so that another keeper can continue from there. Part names
are random: a keeper that has been replaced but does not know it cannot overwrite another keeper's part.
"""

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

import structlog

from libs.bus.port import Record
from libs.bus.work import WorkBus
from libs.contracts.errors import FileNotFound, FileTooLarge, FulcrumError, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import AssembledFile
from libs.contracts.topics import BATCH_RESULTS
from libs.filestore.port import Draft, FileStore
from services.gateway.batch.job import Job

PART_PURPOSE = "batch_part"
PART = re.compile(r"file-(.+)-(?:output|errors|places)-[0-9a-f]{16}")
"""The pattern of a part's file id. Group 1 is the id of its job."""


class Parts:
    def __init__(self, files: FileStore, job_id: str) -> None:
        self._files = files
        self._job_id = job_id
        self._new: list[str] = []
        """The ids of new parts that no published event names yet."""

    def draw(self, kind: str) -> int:
        """Choose the number of a part that is about to be written. `kind` is output, errors or places."""
        part = secrets.randbits(64)
        self._new.append(self.file_id(kind, part))
        return part

    def file_id(self, kind: str, part: int) -> str:
        return f"file-{self._job_id}-{kind}-{part:016x}"

    def published(self) -> None:
        """Forget the new parts, because an event is about to name them. `drop` does not remove them any more."""
        self._new.clear()

    async def drop(self) -> None:
        """Remove the parts that no event names.

        If the store does not answer, they remain until the job has ended.
        """
        for file_id in self._new:
            await self._remove(file_id)
        self._new.clear()

    async def write(self, kind: str, content: bytes) -> int:
        """Write a complete part and return its number. Raise StoreFull."""
        part = self.draw(kind)
        file_id = self.file_id(kind, part)
        async with self._files.draft(file_id, max_bytes=len(content)) as draft:
            await draft.write(content)
            await draft.keep(name=f"{self._job_id}_{kind}.part", purpose=PART_PURPOSE)
        return part

    def read(self, kind: str, part: int) -> AsyncIterator[bytes]:
        """Yield the content of a part. Raise FileNotFound."""
        return self._files.read(self.file_id(kind, part))

    async def size_bytes(self, kind: str, part: int) -> int:
        """Return the size of a part in bytes. Raise FileNotFound."""
        return (await self._files.info(self.file_id(kind, part))).bytes

    async def remove(self, kind: str, part: int) -> None:
        """Remove a part that is no longer needed. Do nothing if the store does not answer."""
        await self._remove(self.file_id(kind, part))

    async def _remove(self, file_id: str) -> None:
        with suppress(FileNotFound, StoreUnavailable):
            await self._files.delete(file_id)


WRITE_BYTES = 256 * 1024
OUTPUT_PURPOSE = "batch_output"


class Output:
    """One output file of a job, as a context manager. On exit, it discards lines that were written but not stored."""

    def __init__(
        self, files: FileStore, parts: Parts, job: Job, kind: str, before: AssembledFile, *, max_bytes: int
    ) -> None:
        """Create the file. `before` names the parts that were stored earlier."""
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
        """The number of bytes that have been written but are not in a part yet."""

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
        """Store the lines since the last part as a new part. Return all parts, which the caller must publish.

        Raise StoreFull.
        """
        if self.open_bytes:
            await self._flush()
            part = self._parts.draw(self._kind)
            part_id = self._parts.file_id(self._kind, part)
            await self._keep_draft(f"{self._job_id}_{self._kind}.part", PART_PURPOSE, part_id)
            self._kept.append(part)
            self.open_bytes = 0
        return AssembledFile(lines=self.lines, parts=self._kept)

    async def kept_bytes(self) -> int:
        """Return the total size of all parts.

        Raise FileNotFound if a part is gone, and FileTooLarge if the file would exceed its size limit.
        """
        found = sum([await self._parts.size_bytes(self._kind, part) for part in self._kept])
        if found > self._max_bytes:
            raise FileTooLarge(f"the file is over {self._max_bytes} bytes", param="file")
        return found

    async def keep(self) -> str:
        """Join the parts into the final file and return its id. Without lines, write no file and return "".

        If there are parts, they must contain all lines. Raise StoreFull, or FileNotFound if a part is gone.
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


log = structlog.get_logger()

PART_BYTES = 16 * 1024 * 1024
"""The size of both files' new lines at which a part is stored.

A keeper that takes over reads at most this much again.
"""

Save = Callable[[pb.Assembled], Awaitable[None]]
"""A function that publishes an event. It raises an error unless the event is certain to be on the broker."""


class WrittenLines:
    """The set of lines that have been written to a job's outputs, one bit per line.

    `before` is an earlier `content`.
    """

    def __init__(self, lines: int, before: bytes = b"") -> None:
        self._lines = lines
        self._bits = bytearray(before.ljust((lines + 7) // 8, b"\0"))

    def add(self, place: int) -> bool:
        """Add a line. Return False if the job has no such line, or if it was added before."""
        byte, bit = divmod(place, 8)
        if place >= self._lines or self._bits[byte] >> bit & 1:
            return False
        self._bits[byte] |= 1 << bit
        return True

    @property
    def content(self) -> bytes:
        return bytes(self._bits)


class Assembly:
    """One attempt to assemble a job's outputs. It needs memory for one bit per line and two write buffers."""

    def __init__(
        self,
        bus: WorkBus,
        files: FileStore,
        job: Job,
        save: Save,
        *,
        max_bytes: int,
        part_bytes: int = PART_BYTES,
    ) -> None:
        assert job.started is not None
        self._bus = bus
        self._files = files
        self._job = job
        self._save = save
        self._part_bytes = part_bytes
        self._published = job.assembled or pb.Assembled(results_next=job.started.results_since)
        self._since = job.started.results_since
        self._next = list(self._published.results_next)
        self._lines = job.started.lines
        self._places = WrittenLines(self._lines)
        self._expired = self._published.expired
        self._cancelled = self._published.cancelled
        self._parts = Parts(files, job.id)
        self._good = Output(files, self._parts, job, "output", self._published.output, max_bytes=max_bytes)
        self._bad = Output(files, self._parts, job, "errors", self._published.errors, max_bytes=max_bytes)

    async def run(self) -> pb.Finished:
        """Assemble the outputs until every line has an answer.

        Raise StoreFull, FileTooLarge or StoreUnavailable. The next attempt continues after the last published part. If
        a part is gone, it starts again with the job's first answer.
        """
        good, bad = self._good, self._bad
        try:
            async with good, bad:
                await self._recall()
                await self._read()
                if self._published.places:
                    # Store a last part, so that a later attempt only joins published parts and writes none again.
                    await self._keep_parts()
                    # Check now. Otherwise each attempt would copy files until the store is full.
                    await self._files.need_room(await good.kept_bytes() + await bad.kept_bytes())
                output_file_id, error_file_id = await good.keep(), await bad.keep()
        except FileNotFound as error:
            await self._save(pb.Assembled(results_next=self._since, attempt=self._published.attempt + 1))
            raise StoreUnavailable(f"the assembled parts are gone and are assembled again: {error.message}") from error
        return pb.Finished(
            outcome=self._outcome(),
            completed=good.lines,
            failed=bad.lines,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
        )

    async def _recall(self) -> None:
        """Load the set of lines in stored parts, because the topic may deliver their answers again."""
        if self._published.places:
            pieces = [piece async for piece in self._parts.read("places", self._published.places)]
            self._places = WrittenLines(self._lines, b"".join(pieces))

    async def _read(self) -> None:
        if self._left <= 0:
            return
        async for record in self._bus.follow(BATCH_RESULTS, tuple(self._next)):
            await self._take(record)
            if self._left <= 0:
                return
            if self._good.open_bytes + self._bad.open_bytes >= self._part_bytes:
                await self._keep_parts()

    async def _take(self, record: Record) -> None:
        result = record.value
        assert isinstance(result, pb.Result)
        # The first answer to a line is used, later ones are dropped.
        if result.job_id == self._job.id and self._places.add(result.place):
            self._expired |= result.expired
            self._cancelled |= result.cancelled
            await (self._good if result.ok else self._bad).write(result.answer)
        self._next += [0] * (record.partition + 1 - len(self._next))
        self._next[record.partition] = record.offset + 1

    async def _keep_parts(self) -> None:
        if not self._good.open_bytes + self._bad.open_bytes:
            return
        try:
            output, errors = await self._good.keep_part(), await self._bad.keep_part()
            places = await self._parts.write("places", self._places.content)
        except FulcrumError:
            await self._parts.drop()
            raise
        before = self._published
        self._published = pb.Assembled(
            results_next=self._next,
            output=output,
            errors=errors,
            expired=self._expired,
            cancelled=self._cancelled,
            places=places,
            attempt=before.attempt,
        )
        self._parts.published()
        await self._save(self._published)
        if before.places:
            await self._parts.remove("places", before.places)

    @property
    def _left(self) -> int:
        return int(self._lines) - self._good.lines - self._bad.lines

    def _outcome(self) -> pb.Outcome:
        if self._cancelled:  # at least one line; a cancellation after the last answer has no effect
            return pb.OUTCOME_CANCELLED
        return pb.OUTCOME_EXPIRED if self._expired else pb.OUTCOME_COMPLETED
