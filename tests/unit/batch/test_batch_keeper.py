"""Tests of unfinished jobs: none delays another, and a gateway that does not know them yet reports so."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.errors import BrokerUnavailable, TopicNotFound
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES, Topic
from libs.filestore.local import LocalFiles
from libs.policy.batch import LEAST_OPEN_LINES, SHARE_LINES
from libs.runtime.clock import Clock, SystemClock
from libs.testing.batch.work import MemoryWork, created, running, store
from libs.testing.wait import ManualClock, until
from services.gateway.batch.begin import Begun, begin
from services.gateway.batch.job import Job
from services.gateway.batch.keeper import MAX_ASSEMBLED, JobKeeper, sweep
from services.gateway.batch.output import Parts
from services.gateway.batch.routes import show_batch
from services.gateway.batch.view import JobView
from services.gateway.metrics import BatchMetrics

OPEN_SHARES = LEAST_OPEN_LINES // SHARE_LINES


HOUR_NS = 3_600 * 10**9


S = 10**9


def keeper(work: MemoryWork, files: LocalFiles, view: JobView, *, clock: Clock | None = None, **own: int) -> JobKeeper:
    bounds = {"max_lines": 10_000, "max_file_bytes": 999, "max_output_bytes": 10**6, **own}
    return JobKeeper(work, files, view, clock or SystemClock(), metrics=BatchMetrics(CollectorRegistry()), **bounds)


class CountingWork(MemoryWork):
    """A work bus that records what is read from it."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self.read: Counter[str] = Counter()
        self.first: dict[str, int] = {}
        """The offset at which the last reader of a topic began."""

    async def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        self.first[topic.stem] = since[0] if since else 0
        async for record in super().follow(topic, since, on_replayed=on_replayed):
            self.read[topic.stem] += 1
            yield record


async def content(files: LocalFiles, file_id: str) -> bytes:
    return b"".join([part async for part in files.read(file_id)])


def lines_in(assembled: pb.Assembled | None) -> int:
    return int(assembled.output.lines + assembled.errors.lines) if assembled else 0


async def answer(work: MemoryWork, job_id: str, answer: bytes = b"{}") -> None:
    await work.send(BATCH_RESULTS, pb.Result(job_id=job_id, ok=True, answer=answer))
    await work.send(BATCH_JOBS, pb.JobEvent(job_id=job_id, at_unix_ns=1, progress=pb.Progress(completed=1)))


async def test_a_job_ends_while_more_jobs_than_are_assembled_at_once_run(tmp_path: Path) -> None:
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


async def test_tenants_share_lines_urgent_jobs_run_first_and_late_jobs_are_reported_early(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    async with files.draft("file-long", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * SHARE_LINES * 30)
        await draft.keep(name="f", purpose="batch")
    view, answered = JobView(work), 0
    clock = ManualClock(time.time_ns())  # as long as it stands the pace is not known, and the least is out

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
        await work.send(BATCH_JOBS, pb.JobEvent(job_id=share.job_id, at_unix_ns=clock.now_ns(), progress=counts))
        answered += 1
        await until(lambda: open_lines() >= LEAST_OPEN_LINES, what="the next share")

    async with running(view.follow(), keeper(work, files, view, clock=clock).work(work)):
        await work.send(BATCH_JOBS, created("anns", input_file_id="file-long"))
        await until(lambda: len(dealt()) == OPEN_SHARES, what="all that may be out")
        soon_ns = clock.now_ns() + 30 * S
        await work.send(BATCH_JOBS, created("bobs", tenant="bob", input_file_id="file-long", expires_unix_ns=soon_ns))
        await until(lambda: len(view.standings(1)) == 2)
        await answer_next()
        await answer_next()
        await work.send(BATCH_JOBS, created("urgent", tenant="bob", priority=5, input_file_id="file-1"))
        await until(lambda: len(view.standings(1)) == 3)
        for _ in range(10):
            await answer_next()
        assert dealt()[:OPEN_SHARES] == ["anns"] * OPEN_SHARES
        later = dealt()[OPEN_SHARES:]
        assert later[:2] == ["bobs", "bobs"], "bob has less"
        assert "urgent" in later[:6], "before what came earlier"
        counts = Counter(dealt()[answered:])
        assert abs(counts["anns"] - counts["bobs"] - counts["urgent"]) <= 1
        clock.advance_ms(20_000)  # 150 lines a second, and 10 s are left for 7,000
        bobs = next(job for job in view.jobs() if job.id == "bobs")
        await until(lambda: bobs.expected_end and bobs.expected_end.late, what="word that it will be late")
        assert clock.now_ns() < soon_ns


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_stopped_jobs_lines_are_answered_while_other_tenants_fill_all_lanes(
    tmp_path: Path, status: str
) -> None:
    work, files, clock = MemoryWork(BATCH_JOBS), await store(tmp_path, max_bytes=10**7), ManualClock()
    line = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n'
    well = b"".join(line % number for number in range(SHARE_LINES * 5))
    for file_id, lines in (("file-long", b"{}\n" * SHARE_LINES * OPEN_SHARES), ("file-own", b"no json\n" + well)):
        async with files.draft(file_id, max_bytes=10**6) as draft:
            await draft.write(lines)
            await draft.keep(name="f", purpose="batch")
    view, soon_ns = JobView(work), clock.now_ns() + S
    later_ns = soon_ns + HOUR_NS
    async with running(view.follow(), keeper(work, files, view, clock=clock, max_output_bytes=10**7).work(work)):
        await work.send(BATCH_JOBS, created("other", input_file_id="file-long", expires_unix_ns=later_ns))
        await until(lambda: len(work.values_of(BATCH_SHARES)) == OPEN_SHARES, what="all that may be out")
        ends_ns = soon_ns if status == "expired" else later_ns
        own = {"input_file_id": "file-own", "expires_unix_ns": ends_ns, "priority": -9}
        await work.send(BATCH_JOBS, created("job", **own))
        await until(lambda: "job" in view.standings(1), what="the job is counted")
        if status == "expired":
            clock.advance_ms(2_000)
        else:
            await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", at_unix_ns=1, cancel_asked=pb.CancelAsked()))
        await until(lambda: len(view.unfinished()) == 1, what="its end", timeout_s=30)
    job = next(job for job in view.jobs() if job.id == "job")
    assert (job.status, job.failed) == (status, 1 + SHARE_LINES * 5)
    errors = [json.loads(line) for line in (await content(files, "file-job-errors")).splitlines()]
    assert sorted(error["error"]["line"] for error in errors) == list(range(1, 2 + SHARE_LINES * 5))
    codes = Counter(error["error"]["code"] for error in errors)
    assert codes == {f"batch_{status}": SHARE_LINES * 5, "invalid_json_line": 1}
    assert {share.job_id for share in work.values_of(BATCH_SHARES) if isinstance(share, pb.Share)} == {"other"}


async def test_a_member_that_takes_over_a_lane_rereads_no_events_lines_or_answers(
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


async def test_a_job_that_cannot_start_names_the_field_at_fault(tmp_path: Path) -> None:
    class Topics(MemoryWork):
        async def check_topic(self, name: str, *, param: str) -> None:
            raise TopicNotFound("no such topic", param=param)

    work, files = Topics(BATCH_JOBS), await store(tmp_path)
    view = JobView(work)
    async with running(view.follow(), keeper(work, files, view).work(work)):
        await work.send(BATCH_JOBS, created("gone", input_file_id="file-none"))
        await work.send(BATCH_JOBS, created("topic", input_file_id="file-1", output_topic="typo"))
        await work.send(BATCH_JOBS, created("empty", input_topic="lines"))
        await until(lambda: len(view.jobs()) == 3 and not view.unfinished(), what="the end of all")
    found = {job.id: show_batch(job)["errors"]["data"][0] for job in view.jobs()}
    assert {job_id: (error["code"], error["param"]) for job_id, error in found.items()} == {
        "gone": ("file_not_found", "input_file_id"),
        "topic": ("topic_not_found", "output_topic"),
        "empty": ("empty_file", "input_topic"),
    }


async def test_a_job_whose_lines_cannot_be_counted_can_be_cancelled(tmp_path: Path) -> None:
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
    assert {show_batch(job)["errors"]["data"][0]["code"] for job in view.jobs()} == {"broker_unavailable"}


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


async def test_a_job_with_all_its_answers_does_not_fail_if_its_files_are_lost(tmp_path: Path) -> None:
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


async def test_parts_without_a_record_are_removed_once_their_job_has_ended(tmp_path: Path) -> None:
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


async def test_each_lane_copies_a_topic_for_itself_and_copies_without_a_record_are_removed(
    tmp_path: Path,
) -> None:
    class MemoryTopic(MemoryWork):
        async def values(self, name: str) -> AsyncIterator[bytes]:
            yield b"one"
            if self is frozen:
                copies.append(await begin(MemoryTopic(BATCH_JOBS), files, job, max_lines=9, max_file_bytes=99))
                yield b"two"

    copies: list[Begun | pb.Finished] = []
    frozen, files = MemoryTopic(BATCH_JOBS), LocalFiles(tmp_path / "files", max_bytes=10**6)
    job = Job("job", pb.Created(input_topic="lines"), 1)
    slow = await begin(frozen, files, job, max_lines=9, max_file_bytes=99)
    (quick,) = copies
    assert isinstance(slow, Begun) and isinstance(quick, Begun)
    assert (slow.started.lines, quick.started.lines) == (2, 1)
    assert await content(files, quick.started.input_file_id) == b"one\n"

    await sweep(files, {job.id: job}.get)
    assert len(await files.infos()) == 2
    job.started = quick.started
    await sweep(files, {job.id: job}.get)
    assert [info.id for info in await files.infos()] == [quick.started.input_file_id]
