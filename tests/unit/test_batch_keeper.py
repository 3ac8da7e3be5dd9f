"""Jobs that have not ended: none holds up another, and a gateway that does not know them yet says so."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from libs.bus.port import Record
from libs.contracts.errors import BrokerUnavailable, QueueFull
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES, BATCH_SUBMIT, Topic
from libs.filestore.local import LocalFiles
from libs.runtime.clock import SystemClock
from libs.testing.wait import until
from libs.testing.work import MemoryWork
from services.gateway.batch import view as view_module
from services.gateway.batch.api import make_batch_router
from services.gateway.batch.deal import MAX_OPEN_LINES
from services.gateway.batch.dealer import Dealer
from services.gateway.batch.job import Job
from services.gateway.batch.keeper import MAX_ASSEMBLED, Keeper
from services.gateway.batch.parts import Parts
from services.gateway.batch.shares import SHARE_LINES, Span
from services.gateway.batch.spool import spool
from services.gateway.batch.submissions import Submissions
from services.gateway.batch.view import MAX_TENANT_UNFINISHED, MAX_UNFINISHED, JobView

OPEN_SHARES = MAX_OPEN_LINES // SHARE_LINES
HOUR_NS = 3_600 * 10**9
S = 10**9


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def created(job_id: str, **own: Any) -> pb.JobEvent:
    now_ns = time.time_ns()
    asked = pb.Created(**{"endpoint": "/v1/completions", "expires_unix_ns": now_ns + HOUR_NS, "tenant": "ann", **own})
    return pb.JobEvent(job_id=job_id, at_unix_ns=now_ns, created=asked)


def keeper(work: MemoryWork, files: LocalFiles, view: JobView, **own: int) -> Keeper:
    bounds = {"max_lines": 10_000, "max_file_bytes": 999, "max_output_bytes": 10**6, **own}
    return Keeper(work, files, view, SystemClock(), **bounds)


async def store(tmp_path: Path, *, max_bytes: int = 10**6) -> LocalFiles:
    files = LocalFiles(tmp_path / "files", max_bytes=max_bytes)
    async with files.draft("file-1", max_bytes=999) as draft:
        await draft.write(b'{"custom_id": "a"}\n')
        await draft.keep(name="f", purpose="batch")
    return files


class CountingWork(MemoryWork):
    """Tells what was read of it."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self.read: Counter[str] = Counter()
        self.first: dict[str, int] = {}
        """Offset at which the last reader of a topic began."""

    async def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        self.first[topic.stem] = since[0] if since else 0
        async for record in super().follow(topic, since, on_replayed=on_replayed):
            self.read[topic.stem] += 1
            yield record


def told(work: MemoryWork) -> list[pb.JobEvent]:
    return [event for event in work.values_of(BATCH_JOBS) if isinstance(event, pb.JobEvent)]


async def content(files: LocalFiles, file_id: str) -> bytes:
    return b"".join([part async for part in files.read(file_id)])


def lines_in(assembled: pb.Assembled | None) -> int:
    return int(assembled.output.lines + assembled.errors.lines) if assembled else 0


async def answer(work: MemoryWork, job_id: str, answer: bytes = b"{}") -> None:
    await work.send(BATCH_RESULTS, pb.Result(job_id=job_id, ok=True, answer=answer))
    await work.send(BATCH_JOBS, pb.JobEvent(job_id=job_id, at_unix_ns=1, progress=pb.Progress(completed=1)))


async def test_a_job_ends_while_more_than_are_assembled_at_once_have_not(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    view = JobView(work)
    slow = [f"slow-{number}" for number in range(MAX_ASSEMBLED + 2)]
    async with running(view.follow(), keeper(work, files, view).work(work)):
        for job_id in (*slow, "urgent", "other"):
            await work.send(BATCH_JOBS, created(job_id, input_file_id="file-1"))
        await until(lambda: len(work.values_of(BATCH_SHARES)) == len(slow) + 2, what="a share of each job")
        await answer(work, "urgent")
        await until(lambda: not any(job.id == "urgent" for job in view.unfinished()), what="the urgent job's end")
        assert (await files.info("file-urgent-output")).bytes == len(b"{}\n")
        assert len(view.unfinished()) == len(slow) + 1
        for job_id in (*slow, "other"):
            await answer(work, job_id)
        await until(lambda: not view.unfinished(), what="the end of all")


async def test_tenants_share_what_is_dealt_urgent_jobs_come_first_and_late_ones_are_told_early(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    async with files.draft("file-long", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * SHARE_LINES * 30)
        await draft.keep(name="f", purpose="batch")
    view, answered = JobView(work), 0

    def dealt() -> list[str]:
        return [share.job_id for share in work.values_of(BATCH_SHARES) if isinstance(share, pb.Share)]

    def open_lines() -> int:
        return sum(share.lines for share in work.values_of(BATCH_SHARES)[answered:] if isinstance(share, pb.Share))

    async def answer_next() -> None:
        """The oldest share that is out; until what is dealt in its place is there."""
        nonlocal answered
        share = work.values_of(BATCH_SHARES)[answered]
        assert isinstance(share, pb.Share)
        counts = pb.Progress(share=share.number, completed=share.lines)
        await work.send(BATCH_JOBS, pb.JobEvent(job_id=share.job_id, at_unix_ns=time.time_ns(), progress=counts))
        answered += 1
        await until(lambda: open_lines() >= MAX_OPEN_LINES, what="the next share")

    async with running(view.follow(), keeper(work, files, view).work(work)):
        await work.send(BATCH_JOBS, created("anns", input_file_id="file-long"))
        await until(lambda: len(dealt()) == OPEN_SHARES, what="all that may be out")
        soon_ns = time.time_ns() + 30 * S
        await work.send(BATCH_JOBS, created("bobs", tenant="bob", input_file_id="file-long", expires_unix_ns=soon_ns))
        await until(lambda: len(view.standings()) == 2)
        await answer_next()
        await answer_next()
        await work.send(BATCH_JOBS, created("urgent", tenant="bob", priority=5, input_file_id="file-1"))
        await until(lambda: len(view.standings()) == 3)
        for _ in range(10):
            await answer_next()
        assert dealt()[:OPEN_SHARES] == ["anns"] * OPEN_SHARES
        assert Counter(dealt()[OPEN_SHARES : OPEN_SHARES + 8]) == {"bobs": 7, "urgent": 1}, "bob has less"
        assert "urgent" in dealt()[: OPEN_SHARES + 4], "before what came earlier"
        counts = Counter(dealt()[answered:])
        assert abs(counts["anns"] - counts["bobs"] - counts["urgent"]) <= 1
        bobs = next(job for job in view.jobs() if job.id == "bobs")
        await until(lambda: bobs.foretold and bobs.foretold.late, what="word that it will be late")
        assert time.time_ns() < soon_ns


async def test_who_takes_a_lane_over_reads_neither_events_nor_lines_nor_answers_again(
    tmp_path: Path,
) -> None:
    bounds = {"part_bytes": 2_000, "snapshot_events": 20}
    work, files = CountingWork(BATCH_JOBS), await store(tmp_path)
    shares = 20
    async with files.draft("file-long", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * SHARE_LINES * shares)
        await draft.keep(name="f", purpose="batch")
    view = JobView(work)

    async def answer_share(number: int) -> None:
        await until(lambda: len(work.values_of(BATCH_SHARES)) > number + 1, what="the share")
        for place in range(number * SHARE_LINES, (number + 1) * SHARE_LINES):
            ok = place % 3 > 0
            await work.send(BATCH_RESULTS, pb.Result(job_id="job", place=place, ok=ok, answer=b"%d" % place))
        for completed in (100, SHARE_LINES):
            counts = pb.Progress(share=number, completed=completed, whole=completed == SHARE_LINES)
            await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", at_unix_ns=time.time_ns(), progress=counts))

    async with running(view.follow(), keeper(work, files, view, **bounds).work(work)):
        await work.send(BATCH_JOBS, created("done", input_file_id="file-1"))
        await until(lambda: work.values_of(BATCH_SHARES))
        await answer(work, "done")
        await work.send(BATCH_JOBS, created("job", input_file_id="file-long"))
        for number in range(shares - 4):
            await answer_share(number)
        assembled_lines = (shares - 4) * SHARE_LINES
        job = next(job for job in view.jobs() if job.id == "job")
        await until(lambda: assembled_lines - lines_in(job.assembled) < 2 * SHARE_LINES, what="parts of files")
        await until(lambda: len(work.values_of(BATCH_JOBS)) - work.next_offset < 60, what="a later place to begin")

    view = JobView(work)
    before = list(work.values_of(BATCH_JOBS))
    work.read.clear()
    async with running(view.follow(), keeper(work, files, view, **bounds).work(work)):
        await until(view.replayed.is_set)
        assert {job.id for job in view.jobs()} == {"done", "job"}
        for number in range(shares - 4, shares):
            await answer_share(number)
        await until(lambda: not view.unfinished(), what="the end")
        await until(lambda: not list((tmp_path / "files").glob("file-job-*-*")), what="the end of the files' parts")
        assert work.read[BATCH_RESULTS.stem] < 6 * SHARE_LINES
        assert work.first[BATCH_JOBS.stem] > len(before) - 60
    dealt = [share for share in work.values_of(BATCH_SHARES) if isinstance(share, pb.Share) and share.job_id == "job"]
    assert [share.number for share in dealt] == list(range(shares))
    found = [b"".join([part async for part in files.read(f"file-job-{kind}")]) for kind in ("output", "errors")]
    places = [int(text) for text in b"".join(found).split()]
    assert sorted(places) == list(range(shares * SHARE_LINES))


async def test_a_job_that_cannot_be_counted_can_be_cancelled(tmp_path: Path) -> None:
    class Away(LocalFiles):
        def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
            raise BrokerUnavailable("away")

    work = MemoryWork(BATCH_JOBS)
    view = JobView(work)
    async with running(view.follow(), keeper(work, Away(tmp_path, max_bytes=1), view).work(work)):
        await work.send(BATCH_JOBS, created("one", input_file_id="file-1"))
        await work.send(BATCH_JOBS, created("two", input_file_id="file-1", expires_unix_ns=time.time_ns()))
        await work.send(BATCH_JOBS, pb.JobEvent(job_id="one", at_unix_ns=1, cancel_asked=pb.CancelAsked()))
        await until(lambda: view.jobs() and not view.unfinished(), what="the end of both")
    assert {job.id: job.status for job in view.jobs()} == {"one": "cancelled", "two": "expired"}


async def test_a_full_store_delays_a_jobs_end_and_loses_none_of_its_answers(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path, max_bytes=1_000)
    async with files.draft("file-2", max_bytes=999) as draft:
        await draft.write(b"x" * 900)
        await draft.keep(name="f", purpose="batch")
    view = JobView(work)
    async with running(view.follow(), keeper(work, files, view).work(work)):
        await work.send(BATCH_JOBS, created("job", input_file_id="file-1"))
        await until(lambda: work.values_of(BATCH_SHARES), what="a share")
        await answer(work, "job", b"y" * 500)
        await until(lambda: view.unfinished()[0].status == "finalizing")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await until(lambda: not view.unfinished())
        await files.delete("file-2")
        await until(lambda: not view.unfinished(), what="the job's end")
    assert b"".join([part async for part in files.read("file-job-output")]) == b"y" * 500 + b"\n"


async def test_what_a_gateway_has_not_read_yet_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "READY_TIMEOUT_S", 0.05)
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    view, job_id = JobView(work), f"batch_{'0' * 32}"
    await work.send(BATCH_JOBS, created(job_id, input_file_id="file-1"))
    app = FastAPI()
    app.include_router(
        make_batch_router(bus=work, files=files, view=view, clock=SystemClock(), max_file_bytes=999, max_line_bytes=999)
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        for ask in (http.get(f"/v1/batches/{job_id}"), http.get("/v1/batches"), http.delete("/v1/files/file-1")):
            with pytest.raises(BrokerUnavailable) as unknown:
                await ask
            assert unknown.value.retry_after_s
        assert (await files.info("file-1")).bytes
        async with running(view.follow()):
            await until(view.replayed.is_set)
            assert (await http.get(f"/v1/batches/{job_id}")).json()["id"] == job_id


def test_unfinished_jobs_have_a_bound_for_all_and_for_each_tenant() -> None:
    view = JobView(MemoryWork(BATCH_JOBS))
    for number in range(MAX_UNFINISHED):
        tenant = f"tenant-{number // MAX_TENANT_UNFINISHED}"
        if not number % MAX_TENANT_UNFINISHED:
            view.check_room(tenant)
        view.apply(created(f"job-{number}", tenant=tenant))
    with pytest.raises(QueueFull, match=f"{MAX_UNFINISHED} batches"):
        view.check_room("another")
    view.apply(pb.JobEvent(job_id="job-0", finished=pb.Finished()))
    view.check_room("another")
    view.check_room("tenant-0")
    with pytest.raises(QueueFull, match=r"tenant tenant-1 ") as full:
        view.check_room("tenant-1")
    assert full.value.retry_after_s
    with view.room("tenant-0"), pytest.raises(QueueFull):
        view.check_room("tenant-2")
    view.check_room("tenant-0")


async def test_a_record_that_asks_for_one_job_too_many_becomes_one_that_has_failed() -> None:
    records = MemoryWork(BATCH_SUBMIT)
    view = JobView(records)
    for number in range(MAX_TENANT_UNFINISHED):
        view.apply(created(f"job-{number}"))
    body = b'{"input_topic": "lines", "endpoint": "/v1/completions", "metadata": {"tenant": "ann"}}'
    submissions = Submissions(view, SystemClock(), "cluster")
    await records.send(BATCH_SUBMIT, pb.Submission(body=body))
    async with running(view.follow(), submissions.work(records)):
        await until(lambda: records.next_offset == 1)
    events = [event for event in told(records) if not event.HasField("look_back")]
    assert (events[0].created.tenant, events[1].finished.error_code) == ("ann", "queue_full")


async def test_a_record_that_a_broker_hands_out_again_makes_no_second_job() -> None:
    class Behind(JobView):
        """Has read all that was there, and not yet what was told since."""

        async def follow(self) -> None:
            self.replayed.set()
            await until(lambda: any(event.HasField("look_back") for event in told(records)) or records.next_offset > 0)
            await super().follow()

    records = MemoryWork(BATCH_SUBMIT)
    body = b'{"input_topic": "lines", "endpoint": "/v1/completions"}'
    await records.send(BATCH_SUBMIT, pb.Submission(body=body))
    view = JobView(records)
    async with running(view.follow(), Submissions(view, SystemClock(), "cluster").work(records)):
        await until(lambda: records.next_offset == 1)
    records.next_offset = 0
    view = Behind(records)
    async with running(view.follow(), Submissions(view, SystemClock(), "cluster").work(records)):
        await until(lambda: records.next_offset == 1)
    assert [event.WhichOneof("event") for event in told(records)].count("created") == 1


async def test_a_job_whose_answers_are_there_is_not_failed_by_what_befalls_its_files(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    async with files.draft("file-long", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * 100)
        await draft.keep(name="f", purpose="batch")
    view = JobView(work)

    async def answer_to(first: int, last: int) -> None:
        for place in range(first, last):
            await work.send(BATCH_RESULTS, pb.Result(job_id="job", place=place, ok=True, answer=b"%04d" % place))
        counts = pb.Progress(completed=last, whole=last == 100)
        await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", at_unix_ns=1, progress=counts))

    async with running(view.follow(), keeper(work, files, view, part_bytes=50, max_output_bytes=200).work(work)):
        await work.send(BATCH_JOBS, created("job", input_file_id="file-long"))
        await until(lambda: work.values_of(BATCH_SHARES), what="the share")
        await answer_to(0, 35)
        await until(lambda: lines_in(view.jobs()[0].assembled) == 30, what="parts")
        for part in view.jobs()[0].assembled.output.parts[1:]:  # type: ignore[union-attr]
            await files.delete(f"file-job-output-{part:016x}")
        await answer_to(35, 100)
        await until(lambda: view.jobs()[0].assembled.attempt == 1, what="another attempt")  # type: ignore[union-attr]
        await until(lambda: lines_in(view.jobs()[0].assembled) == 100, what="parts of all")
        assert view.unfinished(), "the file is too large"
    view = JobView(work)
    async with running(view.follow(), keeper(work, files, view).work(work)):
        await until(lambda: view.jobs() and not view.unfinished(), what="the end, with room for the file")
    assert (view.jobs()[0].status, view.jobs()[0].completed) == ("completed", 100)
    assert sorted((await content(files, "file-job-output")).split()) == [b"%04d" % place for place in range(100)]


async def test_parts_that_nobody_was_told_of_are_removed_when_their_job_has_ended(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    view = JobView(work)
    async with running(view.follow(), keeper(work, files, view).work(work)):
        await work.send(BATCH_JOBS, created("job", input_file_id="file-1"))
        await until(lambda: work.values_of(BATCH_SHARES), what="the share")
        for job_id in ("job", "other"):
            await Parts(files, job_id).write("output", b"a dead keeper's")
        await answer(work, "job")
        parts = tmp_path / "files"
        await until(lambda: not list(parts.glob("file-job-output-*")), what="the end of the part")
        assert list(parts.glob("file-other-output-*"))


async def test_an_input_that_ends_too_soon_is_dealt_as_one_that_is_gone(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files", max_bytes=10**6)
    async with files.draft("file-1", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * SHARE_LINES)
        await draft.keep(name="f", purpose="batch")
    job = Job("job", pb.Created(input_file_id="file-1"), 1, started=pb.Started(lines=2 * SHARE_LINES + 7))
    spans: list[Span] = []
    async with asyncio.timeout(5):
        while job.dealt.lines < job.lines:
            dealer = Dealer(job, files, ())  # each time another keeper's
            spans += await dealer.next(1)
            job.dealt = dealer.dealt(spans[-1:])
    assert [(span.first_place, span.lines) for span in spans] == [(0, 256), (256, 256), (512, 7)]
    assert [span.bytes for span in spans] == [3 * SHARE_LINES, 0, 0]


async def test_a_topic_that_was_copied_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    class Slow(MemoryWork):
        async def values(self, name: str) -> AsyncIterator[bytes]:
            yield b"older"
            async with files.draft("file-in", max_bytes=99) as draft:
                await draft.write(b"older\nyounger\n")
                await draft.keep(name="f", purpose="batch")

    files = LocalFiles(tmp_path / "files", max_bytes=10**6)
    await spool(Slow(BATCH_JOBS), files, "lines", "file-in", max_bytes=99)
    assert await content(files, "file-in") == b"older\nyounger\n"
