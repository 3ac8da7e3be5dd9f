"""Both output files of a job, from the results topic: each line once, in the order in which answers came."""

import asyncio
from contextlib import AsyncExitStack

import structlog

from libs.bus.work import WorkBus
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_RESULTS
from libs.filestore.port import Draft, FileStore
from libs.runtime.tasks import end
from services.gateway.batch.answers import lost
from services.gateway.batch.jobs import Job

log = structlog.get_logger()

WRITE_BYTES = 256 * 1024
LOST_AFTER_S = 10.0
"""Where the broker may forget: how long nothing new may come before what is missing counts as lost."""
OUTPUT_PURPOSE = "batch_output"


class Assembly:
    """Of one job. Memory is one bit a line and two write buffers."""

    def __init__(self, bus: WorkBus, files: FileStore, job: Job, *, max_bytes: int) -> None:
        assert job.started is not None
        self._bus = bus
        self._files = files
        self._job = job
        self._max_bytes = max_bytes
        self._since = list(job.started.results_since)
        self._lines = job.started.lines
        self._seen = bytearray((self._lines + 7) // 8)
        self._expired = False

    async def run(self) -> pb.Finished:
        """Until every line is there; raises StoreFull, and leaves nothing behind then."""
        job_id = self._job.id
        async with AsyncExitStack() as stack:
            good, bad = [
                _Output(await stack.enter_async_context(self._files.draft(file_id, max_bytes=self._max_bytes)))
                for file_id in (f"file-{job_id}-output", f"file-{job_id}-errors")
            ]
            await self._collect(good, bad)
            output_file_id, error_file_id = (
                await good.keep(f"{job_id}_output.jsonl"),
                await bad.keep(f"{job_id}_errors.jsonl"),
            )
        return pb.Finished(
            outcome=self._outcome(),
            completed=good.lines,
            failed=bad.lines,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
        )

    async def _collect(self, good: "_Output", bad: "_Output") -> None:
        reading = asyncio.get_running_loop().create_task(self._read(good, bad), name=f"results of {self._job.id}")
        try:
            left = self._lines + 1
            while not reading.done():
                await asyncio.wait({reading}, timeout=LOST_AFTER_S)
                quiet, left = left == self._left(good, bad), self._left(good, bad)
                if left and quiet and self._job.answered and not self._bus.capabilities.durable:
                    break
        finally:
            await end(reading)
        if not reading.cancelled():
            reading.result()
        if left := self._left(good, bad):
            log.warning("answers were lost by the broker", job=self._job.id, lines=left)
            for place in range(self._lines):
                if self._first(place):
                    await bad.write(lost(self._job.id, place))

    async def _read(self, good: "_Output", bad: "_Output") -> None:
        async for record in self._bus.follow(BATCH_RESULTS, self._since):
            result = record.value
            assert isinstance(result, pb.Result)
            # A repeat can only come from a broker that does not isolate transactions: the first answer counts.
            if result.job_id == self._job.id and self._first(result.place):
                self._expired |= result.expired
                await (good if result.ok else bad).write(result.answer)
                if not self._left(good, bad):
                    return

    def _left(self, good: "_Output", bad: "_Output") -> int:
        return int(self._lines) - good.lines - bad.lines

    def _first(self, place: int) -> bool:
        byte, bit = divmod(place, 8)
        if place >= self._lines or self._seen[byte] >> bit & 1:
            return False
        self._seen[byte] |= 1 << bit
        return True

    def _outcome(self) -> pb.Outcome:
        if self._job.cancel_unix_ns:
            return pb.OUTCOME_CANCELLED
        return pb.OUTCOME_EXPIRED if self._expired else pb.OUTCOME_COMPLETED


class _Output:
    """One of the files, written in larger parts than lines."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._buffer = bytearray()
        self.lines = 0

    async def write(self, line: bytes) -> None:
        """Add a line."""
        self.lines += 1
        self._buffer += line
        self._buffer += b"\n"
        if len(self._buffer) >= WRITE_BYTES:
            await self._flush()

    async def keep(self, name: str) -> str:
        """The file's id; empty, and no file, when it has no line."""
        if not self.lines:
            return ""
        await self._flush()
        return (await self._draft.keep(name=name, purpose=OUTPUT_PURPOSE)).id

    async def _flush(self) -> None:
        part, self._buffer = bytes(self._buffer), bytearray()
        await self._draft.write(part)
