"""The runners of shares. They read lines as there is capacity, and commit answers together with the share's progress.

A share's offset is committed only once all its lines are answered. Earlier commits carry a note of the answered lines,
so that the share's next owner continues with the others.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec
import structlog

from libs.bus.port import Record
from libs.bus.work import Lane, Produced, Raw
from libs.contracts.errors import FulcrumError, StoreUnavailable, TooLargeForTopic, TopicRefused
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent, Progress, Result, Share
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.port import FileStore
from libs.policy.newest import put_newest
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from services.gateway.batch.job import Cancelled, NotRun, ShareNote, stopped
from services.gateway.batch.line_request import LineRequester, Slots
from services.gateway.batch.lines import AnswerCopies, BatchLine, answered, fitting, read_lines, refused
from services.gateway.batch.view import JobView, look_back
from services.gateway.metrics import BatchMetrics


class _Prompt(msgspec.Struct):
    model: str = ""
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Prompt)


def by_prefix(lines: Sequence[BatchLine]) -> list[int]:
    """Return the indices of `lines` in the order in which to run them. Refused lines come first."""
    return sorted(range(len(lines)), key=lambda place: _key(lines[place]))


def _key(line: BatchLine) -> tuple[str, bytes]:
    if line.refusal is not None:
        return "", b""
    try:
        found = _decoder.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", b""
    return found.model, bytes(found.messages) + bytes(found.prompt)


log = structlog.get_logger()

# The bound on the jobs of a lane for which `look_back` has been called.
MAX_LOOKED = 10_000
# The interval between commits of a lane. Answers that arrive in between share one transaction.
COMMIT_PAUSE_S = 0.1
# The size of uncommitted answers above which a lane starts no further lines.
MAX_WAITING_BYTES = 4 * 1024 * 1024
# The bounds of the back-off while the file store does not answer.
STORE_FIRST_S, STORE_MAX_S = 0.2, 10.0
# The interval between checks of a share's job. Running lines are cancelled at the first check after the job has
# stopped.
WATCH_S = 0.25


class LaneRunner:
    def __init__(
        self,
        *,
        files: FileStore,
        requester: LineRequester,
        slots: Slots,
        clock: Clock,
        view: JobView,
        metrics: BatchMetrics,
        by_prefix: bool,
    ) -> None:
        """Create the runner. With `by_prefix`, lines whose prompts share a prefix run one after another."""
        self.files = files
        self.metrics = metrics
        self.by_prefix = by_prefix
        self.slots = slots
        self.copies = AnswerCopies()
        self._requester = requester
        self._clock = clock
        self._view = view

    async def work(self, lane: Lane) -> None:
        """Answer the lines of all shares of a lane until cancelled."""
        text = lane.note
        looked: OrderedDict[str, None] = OrderedDict()
        async for batch in lane.batches():
            for record in batch:
                share = record.value
                assert isinstance(share, Share)
                # A job's shares are published after its events, but in another topic, so the events may be read
                # slightly later.
                unsure = record.offset < lane.end or not self._view.knows(share.job_id)
                if unsure and share.job_id not in looked:
                    await look_back(self._view, self._clock, lane, share.job_id, next_offset=record.offset, note=text)
                    put_newest(looked, share.job_id, None, MAX_LOOKED)
                notes = (ShareNote.read(text, share.lines), self._view.note(share.job_id, share.number, share.lines))
                note = max(notes, key=lambda note: note.answered.bit_count())
                forgotten = share.job_id in looked and not self._view.knows(share.job_id)
                if note.whole or forgotten:  # a job that ended long ago, or that was never created
                    await lane.commit([], next_offset=record.offset + 1)
                else:
                    await _ShareRun(self, lane, record, share, note).run()
                text = ""  # `text` applies to the first share only

    def not_run(self, share: Share) -> NotRun | None:
        """Return the reason for which no more lines of the share run, or None while they do."""
        cancelled = self._view.cancelled(share.job_id)
        reason = stopped(share.expires_unix_ns, self.now_ns(), cancelled=cancelled)
        return reason or self.copies.refused(share.job_id)

    def now_ns(self) -> int:
        return self._clock.now_ns()

    async def ask(self, share: Share, line: BatchLine) -> Result:
        """Return the result of one line. Whatever happens to the line, other lines go on."""
        try:
            return answered(share.job_id, line, await self._requester.ask(share, line))
        except FulcrumError as error:
            return refused(share.job_id, line, error)
        except TimeoutError:
            raise
        except Exception as error:
            log.exception("batch line failed", job=share.job_id, line=line.number)
            return refused(share.job_id, line, FulcrumError(f"internal error ({type(error).__name__})"))


class _ShareRun:
    """The run of one share, until the answer of its last line is committed."""

    def __init__(self, runner: LaneRunner, lane: Lane, record: Record, share: Share, note: ShareNote) -> None:
        self._runner = runner
        self._lane = lane
        self._offset = record.offset
        self._share = share
        self._note = note
        self._left = share.lines - note.answered.bit_count()
        self._ready: list[tuple[int, Result]] = []
        self._ready_bytes = 0
        self._some = asyncio.Event()
        self._all = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._running: set[asyncio.Timeout] = set()

    async def run(self) -> None:
        """Run the share. Only errors that end the lane are raised."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                saving = group.create_task(self._save())
                saving.add_done_callback(lambda _: watch.cancel())
                await self._start_lines(group)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _start_lines(self, group: asyncio.TaskGroup) -> None:
        # Take a slot before the lines are read, so that the first line can run at once.
        has_slot: bool | None = await self._take_slot()
        try:
            lines = await self._read_lines()
            for index in by_prefix(lines) if self._runner.by_prefix else range(len(lines)):
                if self._note.has(index):
                    continue
                if has_slot is None:
                    has_slot = await self._take_slot()
                group.create_task(self._answer(index, lines[index], has_slot=has_slot))
                has_slot = None
        finally:
            if has_slot:
                self._runner.slots.give()

    async def _take_slot(self) -> bool:
        await self._room.wait()
        return await self._runner.slots.take(lambda: self._runner.not_run(self._share))

    async def _read_lines(self) -> list[BatchLine]:
        backoff = Backoff(first_s=STORE_FIRST_S, max_s=STORE_MAX_S)
        while True:
            try:
                return await read_lines(self._runner.files, self._share)
            except StoreUnavailable as error:
                log.warning("lines cannot be read", job=self._share.job_id, error=error.message)
                await asyncio.sleep(backoff.next_s())

    async def _answer(self, index: int, line: BatchLine, *, has_slot: bool) -> None:
        share, runner = self._share, self._runner
        try:
            reason = line.refusal or runner.not_run(share)
            if reason is not None or not has_slot:
                result = refused(share.job_id, line, reason or Cancelled("the batch was cancelled first"))
            else:
                try:
                    async with asyncio.timeout(None) as patience:
                        self._running.add(patience)
                        result = await runner.ask(share, line)
                except TimeoutError:
                    result = refused(share.job_id, line, runner.not_run(share) or Cancelled("the batch was cancelled"))
                finally:
                    self._running.discard(patience)
        finally:
            if has_slot:
                runner.slots.give()
        self._take(index, fitting(result, line))

    def _take(self, index: int, result: Result) -> None:
        self._ready.append((index, result))
        self._ready_bytes += len(result.answer)
        self._left -= 1
        if self._ready_bytes >= MAX_WAITING_BYTES:
            self._room.clear()
        self._some.set()
        if not self._left:
            self._all.set()

    async def _save(self) -> None:
        """Commit answers as they arrive, until every line of the share has one."""
        while True:
            await self._some.wait()
            self._some.clear()
            ready, self._ready, self._ready_bytes = self._ready, [], 0
            self._room.set()
            await self._commit(ready)
            if self._note.whole:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_PAUSE_S):
                    await self._all.wait()

    async def _commit(self, ready: list[tuple[int, Result]]) -> None:
        share, copies = self._share, self._runner.copies
        results = [result for _, result in ready]
        try:
            await self._publish(ready, copies.of(share, results))
        except TooLargeForTopic as error:
            if len(ready) > 1:
                for one in ready:  # the broker does not report which answer is too large
                    await self._commit([one])
            elif copies.too_large(share.job_id):
                await self._publish_refused(ready, error)
            else:
                await self._publish_or_refuse(ready, copies.stand_ins(share, results, error))
        except TopicRefused as error:
            await self._publish_refused(ready, error)
        else:
            copies.taken(share.job_id)

    async def _publish_or_refuse(self, ready: list[tuple[int, Result]], also: Sequence[Raw]) -> None:
        try:
            await self._publish(ready, also)
        except TopicRefused as error:
            await self._publish_refused(ready, error)

    async def _publish_refused(self, ready: list[tuple[int, Result]], error: TopicRefused) -> None:
        log.warning("a batch's topic refuses answers", job=self._share.job_id, error=error.message)
        self._runner.copies.refuse(self._share.job_id, error)
        await self._publish(ready, ())

    async def _publish(self, ready: list[tuple[int, Result]], also: Sequence[Raw]) -> None:
        """Commit results, their progress event and `also` in one transaction. Raise TopicRefused."""
        share, note = self._share, replace(self._note)
        for index, result in ready:
            note.add(index, ok=result.ok)
        completed, failed = note.counts
        next_offset, text = (self._offset + 1, "") if note.whole else (self._offset, note.text())
        progress = Progress(share=share.number, completed=completed, failed=failed, whole=note.whole, note=text)
        event = JobEvent(job_id=share.job_id, at_unix_ns=self._runner.now_ns(), progress=progress)
        produced: list[Produced] = [(BATCH_RESULTS, result) for _, result in ready]
        await self._lane.commit([*produced, (BATCH_JOBS, event), *also], next_offset=next_offset, note=text)
        self._note = note
        self._runner.metrics.committed([result.ok for _, result in ready])

    async def _watch(self) -> None:
        """Cancel running lines once their job has stopped."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_S)
            if self._runner.not_run(self._share) is not None:
                for patience in list(self._running):
                    if not patience.expired():
                        patience.reschedule(loop.time())
