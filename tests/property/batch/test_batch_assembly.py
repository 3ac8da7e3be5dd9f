"""Properties of a job's output files while keepers are killed or frozen and their store fails at any call."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.errors import FulcrumError, StoreFull, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.local import LocalDraft, LocalFiles
from libs.filestore.port import FileInfo
from libs.testing.batch.work import MemoryWork
from libs.testing.examples import examples
from services.gateway.batch.job import Job
from services.gateway.batch.keeper import sweep
from services.gateway.batch.output import PART_PURPOSE, Assembly
from services.gateway.batch.view import JobTable

PART_BYTES = 12
"""The bytes of a few lines."""
MAX_ATTEMPTS = 40
Fault = Literal["away", "kill", "freeze"]


class Fenced(Exception):
    """The error of a keeper whose lane another one has taken."""


class Fate:
    """The outcome of each call of the store and of the lane, by its number."""

    def __init__(
        self, faults: dict[int, Fault] | None = None, gone: frozenset[int] = frozenset(), full_from: int | None = None
    ) -> None:
        """`gone`: numbers of reads whose file no longer exists."""
        self.faults = faults or {}
        self.gone = gone
        self.full_from = full_from
        self.calls = 0
        self.reads = 0
        self.killed = asyncio.Event()
        self.thawed = asyncio.Event()

    async def at(self, *, takes_room: bool = False, of_lane: bool = False) -> None:
        """Fail before or after a call; a failing lane ends its keeper like a kill."""
        number = self.calls
        self.calls += 1
        if takes_room and self.full_from is not None and number >= self.full_from:
            raise StoreFull("full")
        match self.faults.get(number):
            case "away" if not of_lane:
                raise StoreUnavailable("away")
            case "kill":
                self.killed.set()
                await asyncio.Event().wait()
            case "freeze":
                self.killed.set()
                await self.thawed.wait()


class FaultyDraft:
    def __init__(self, draft: LocalDraft, fate: Fate) -> None:
        self._draft = draft
        self._fate = fate

    async def write(self, part: bytes) -> None:
        await self._fate.at(takes_room=True)
        await self._draft.write(part)

    async def keep(self, *, name: str, purpose: str, file_id: str = "", tenant: str = "") -> FileInfo:
        await self._fate.at(takes_room=True)
        info = await self._draft.keep(name=name, purpose=purpose, file_id=file_id, tenant=tenant)
        await self._fate.at()  # it is there, whatever is replied
        return info


class FaultyFiles(LocalFiles):
    """A store with a fate."""

    def __init__(self, folder: Path, fate: Fate) -> None:
        super().__init__(folder, max_bytes=10**6)
        self.fate = fate

    @asynccontextmanager
    async def draft(self, file_id: str, *, max_bytes: int) -> AsyncIterator[FaultyDraft]:  # type: ignore[override]
        await self.fate.at(takes_room=True)
        async with super().draft(file_id, max_bytes=max_bytes) as draft:
            yield FaultyDraft(draft, self.fate)

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        await self.fate.at()
        self.fate.reads += 1
        if self.fate.reads - 1 in self.fate.gone:
            await super().delete(file_id)
        async for part in super().read(file_id, first_byte, length):
            yield part

    async def delete(self, file_id: str) -> None:
        await self.fate.at()
        await super().delete(file_id)
        await self.fate.at()


class Story:
    """One job with its published records and its keepers."""

    def __init__(self, folder: Path, lines: int, places: Sequence[int], fate: Fate, *, stopped: bool = False) -> None:
        """Cancel it; `stopped`: before its last answer."""
        self.stopped = stopped
        self.lines = lines
        self.fate = fate
        self.files = FaultyFiles(folder, fate)
        self.work = MemoryWork(BATCH_JOBS)
        self.places = places
        self.attempts = 0
        self._events = [
            pb.JobEvent(job_id="job", created=pb.Created()),
            pb.JobEvent(job_id="job", started=pb.Started(lines=lines, results_since=[1])),
            pb.JobEvent(job_id="job", at_unix_ns=1, cancel_asked=pb.CancelAsked()),
        ]
        self._keepers = 0

    async def answer(self) -> None:
        """Publish all results, and one from before the job began."""
        await self.work.send(BATCH_RESULTS, result(0))
        for place in self.places:
            await self.work.send(BATCH_RESULTS, result(place, cancelled=self.stopped and not ok(place)))
            await self.work.send(BATCH_RESULTS, pb.Result(job_id="another", place=place, answer=b"no"))

    async def keep(self) -> None:
        """A new keeper, until the job has finished."""
        self._keepers += 1
        me, book = self._keepers, JobTable()
        job = self._job(book)

        async def publish(event: pb.JobEvent) -> None:
            await self.fate.at(of_lane=True)
            if me != self._keepers:
                raise Fenced
            self._events.append(event)
            await self.fate.at(of_lane=True)
            book.apply(event)

        async def save(reported: pb.Assembled) -> None:
            await publish(pb.JobEvent(job_id="job", assembled=pb.Assembled.FromString(reported.SerializeToString())))

        while not job.finished:
            self.attempts += 1
            assert self.attempts < MAX_ATTEMPTS
            assembly = Assembly(self.work, self.files, job, save, max_bytes=10**6, part_bytes=PART_BYTES)
            try:
                finished = await assembly.run()
            except FulcrumError:
                if self.fate.full_from is not None:
                    return
                continue
            await publish(pb.JobEvent(job_id="job", finished=finished))

    async def ends(self) -> None:
        """Run the job to its end, whatever happens to its keepers."""
        keepers: list[asyncio.Task[None]] = []
        killed = True
        while killed:
            keepers.append(asyncio.get_running_loop().create_task(self.keep()))
            dying = asyncio.get_running_loop().create_task(self.fate.killed.wait())
            await asyncio.wait({keepers[-1], dying}, return_when=asyncio.FIRST_COMPLETED)
            killed = not keepers[-1].done()
            self.fate.killed.clear()
            dying.cancel()
        keepers[-1].result()
        await self.check()
        self.fate.thawed.set()
        await asyncio.wait(keepers, timeout=0.05)
        await self.check()
        for keeper in keepers:
            keeper.cancel()
        for end in await asyncio.gather(*keepers, return_exceptions=True):
            assert end is None or isinstance(end, Fenced | asyncio.CancelledError), end
        self.fate.faults = {}
        ended = Job("job", pb.Created(), 1, finished=pb.Finished())
        await sweep(self.files, lambda _: ended)
        assert not await self.parts()

    @property
    def finished(self) -> pb.Finished | None:
        return self._job().finished

    def expected_parts(self) -> set[str]:
        """Return the ids of the parts that are needed."""
        reported = self._job().assembled or pb.Assembled()
        parts = {
            "output": reported.output.parts,
            "errors": reported.errors.parts,
            "places": [reported.places] if reported.places else [],
        }
        return {f"file-job-{kind}-{part:016x}" for kind, those in parts.items() for part in those}

    async def check(self) -> None:
        """Check that each line is in the right file once, in the order of answers, and that the job was cancelled
        only if a line was."""
        finished = self.finished
        assert finished is not None
        ids = {"output": finished.output_file_id, "errors": finished.error_file_id}
        found = {kind: await self._read(file_id) for kind, file_id in ids.items()}
        order = list(dict.fromkeys(self.places))
        assert sorted(order) == list(range(self.lines))
        assert found["output"] == [place for place in order if ok(place)]
        assert found["errors"] == [place for place in order if not ok(place)]
        assert finished.outcome == (pb.OUTCOME_CANCELLED if self.stopped else pb.OUTCOME_COMPLETED)
        assert (finished.completed, finished.failed) == (len(found["output"]), len(found["errors"]))

    async def parts(self) -> set[str]:
        return {info.id for info in await self.files.infos() if info.purpose == PART_PURPOSE}

    def _job(self, book: JobTable | None = None) -> Job:
        book = JobTable() if book is None else book
        for event in self._events:
            book.apply(event)
        job = book.get("job")
        assert job is not None
        return job

    async def _read(self, file_id: str) -> list[int]:
        if not file_id:
            return []
        parts = [part async for part in LocalFiles.read(self.files, file_id)]
        return [int(text) for text in b"".join(parts).split()]


def ok(place: int) -> bool:
    return place % 3 > 0


def result(place: int, *, cancelled: bool = False) -> pb.Result:
    return pb.Result(job_id="job", place=place, ok=ok(place), answer=b"%03d" % place, cancelled=cancelled)


@st.composite
def orders(draw: st.DrawFn) -> list[int]:
    """Return places of results in order of arrival, with repeats."""
    places = list(draw(st.permutations(range(draw(st.integers(1, 16))))))
    for again in draw(st.lists(st.sampled_from(places), max_size=6)):
        places.insert(draw(st.integers(places.index(again) + 1, len(places))), again)
    return places


FAULTS = st.dictionaries(st.integers(0, 60), st.sampled_from(("away", "kill", "freeze")), max_size=6)
GONE = st.frozensets(st.integers(0, 8), max_size=2)


@settings(max_examples=examples(40), deadline=None)
@given(orders(), FAULTS, GONE, st.booleans())
def test_every_line_is_in_the_files_exactly_once_whatever_happens_to_the_keepers(
    places: list[int], faults: dict[int, Fault], gone: frozenset[int], stopped: bool
) -> None:
    async def case(folder: str) -> None:
        story = Story(Path(folder), max(places) + 1, places, Fate(faults, gone), stopped=stopped)
        await story.answer()
        await story.ends()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(case(folder))


def test_retries_do_not_fill_a_store_further_that_is_full_at_any_moment() -> None:
    """Each attempt succeeds for a number of calls, so that what is written first is small, and what follows is not."""

    async def case(folder: str, full_from: int) -> bool:
        fate = Fate(full_from=full_from)
        story = Story(Path(folder), 13, range(13), fate)
        await story.answer()
        for _ in range(4):
            fate.calls = 0
            await story.keep()
            assert story.finished or await story.parts() == story.expected_parts(), full_from
        was_full = not story.finished
        fate.full_from = None
        await story.ends()
        return was_full

    full_from, was_full = 0, True
    while was_full:
        with tempfile.TemporaryDirectory() as folder:
            was_full = asyncio.run(case(folder, full_from))
        full_from += 1
    assert full_from > 10
