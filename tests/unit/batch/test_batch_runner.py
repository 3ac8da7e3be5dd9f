"""Tests of shares that a broker delivers again after their lines were answered."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES, Topic
from libs.filestore.local import LocalFiles
from libs.policy.batch import GatewayLoad
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import end
from libs.testing.batch.work import MemoryWork
from libs.testing.wait import until
from services.gateway.batch import view as look_back_module
from services.gateway.batch.job import Job
from services.gateway.batch.line_request import Slots
from services.gateway.batch.lines import BatchLine
from services.gateway.batch.runner import LaneRunner
from services.gateway.batch.view import JobTable, JobView, snapshot
from services.gateway.metrics import BatchMetrics

LINES = 200
SHARES = 3
HOUR_NS = 3_600 * 10**9


class FewAnswers:
    """Answers for that many lines, and none after them."""

    def __init__(self, count: int) -> None:
        self.left = count

    async def ask(self, share: pb.Share, line: BatchLine) -> object:
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        raise InvalidRequest("an answer like any other")


def a_runner(files: LocalFiles, view: JobView, count: int) -> LaneRunner:
    """Create a runner with that many answers."""
    slots = Slots(
        lambda: GatewayLoad(free=1000, bound=0, people_waiting=0, lines_waiting=0), share=1, max_in_flight=1000
    )
    return LaneRunner(
        files=files,
        requester=FewAnswers(count),  # type: ignore[arg-type]
        slots=slots,
        clock=SystemClock(),
        view=view,
        metrics=BatchMetrics(CollectorRegistry()),
        by_prefix=False,
    )


async def run(work: MemoryWork, files: LocalFiles, count: int, results: int, view: JobView | None = None) -> None:
    """A gateway that answers so many lines, until there are so many results; then it dies."""
    view = view or JobView(work)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(view.follow()), loop.create_task(a_runner(files, view, count).work(work))]
    await until(lambda: len(work.values_of(BATCH_RESULTS)) >= results, what=f"{results} results")
    if results == SHARES * LINES:
        await until(lambda: work.next_offset == SHARES, what="the last share's end")
    await end(*tasks)


async def put_out(work: MemoryWork, files: LocalFiles) -> None:
    """A job and its shares."""
    async with files.draft("file-1", max_bytes=10**6) as draft:
        await draft.write(b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}\n' * LINES * SHARES)
        bytes_a_line = (await draft.keep(name="f", purpose="batch")).bytes // (LINES * SHARES)
    expires_ns = time.time_ns() + HOUR_NS
    await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", created=pb.Created(expires_unix_ns=expires_ns)))
    await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", started=pb.Started(lines=LINES * SHARES)))
    for number in range(SHARES):
        share = pb.Share(
            job_id="job",
            number=number,
            input_file_id="file-1",
            endpoint="/v1/completions",
            lines=LINES,
            first_place=number * LINES,
            first_byte=number * LINES * bytes_a_line,
            bytes=LINES * bytes_a_line,
            expires_unix_ns=expires_ns,
        )
        await work.send(BATCH_SHARES, share)


def answers(work: MemoryWork) -> Counter[int]:
    """Return how often each line has been answered."""
    return Counter(result.place for result in work.values_of(BATCH_RESULTS) if isinstance(result, pb.Result))


async def test_no_line_is_answered_twice_if_the_broker_loses_the_offsets_of_shares(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
    await put_out(work, files)
    await run(work, files, LINES + 50, LINES + 50)
    work.next_offset, work.note = 0, ""
    await run(work, files, LINES, 2 * LINES + 50)
    work.next_offset, work.note = 0, "1/0"
    await run(work, files, LINES, SHARES * LINES)
    work.next_offset, work.note = 1, ""
    await run(work, files, LINES, SHARES * LINES)
    assert answers(work) == Counter(range(SHARES * LINES))


async def test_an_old_offset_is_not_trusted_while_the_gateway_does_not_know_all_jobs(tmp_path: Path) -> None:
    """A job's snapshot is published after the runner has its lane: a token before that would be read too early."""

    class SlowToTell(MemoryWork):
        tells = asyncio.Event()
        begins = 0

        async def committed(self, topic: Topic, group: str) -> list[int]:
            await self.tells.wait()
            return [self.begins]

        async def follow(
            self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
        ) -> AsyncIterator[Record]:
            async for record in super().follow(topic, since, on_replayed=on_replayed):
                yield record
                for _ in range(20):  # others do what they do then
                    await asyncio.sleep(0)

    async def tell_anew(job: Job) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", at_unix_ns=1, snapshot=snapshot(job)))
        work.tells.set()

    work, files = SlowToTell(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
    await put_out(work, files)
    work.tells.set()
    await run(work, files, LINES + 50, LINES + 50)
    book = JobTable()
    for event in work.values_of(BATCH_JOBS):
        assert isinstance(event, pb.JobEvent)
        book.apply(event)
    job = book.get("job")
    assert job is not None
    work.tells.clear()
    work.next_offset, work.note, work.begins = 1, "", len(work.values_of(BATCH_JOBS))
    await asyncio.gather(run(work, files, SHARES * LINES, SHARES * LINES), tell_anew(job))
    assert answers(work) == Counter(range(SHARES * LINES))


async def test_shares_of_a_forgotten_job_do_not_run(tmp_path: Path) -> None:
    class Forgetful(JobView):
        def apply(self, event: pb.JobEvent) -> None:
            if event.HasField("look_back"):
                super().apply(event)

    work, files = MemoryWork(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
    await put_out(work, files)
    view = Forgetful(work)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(view.follow()), loop.create_task(a_runner(files, view, 9).work(work))]
    await until(lambda: work.next_offset == SHARES, what="the shares' end")
    await end(*tasks)
    assert not answers(work)


async def test_a_lost_look_back_token_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(JobView):
        tokens = 0

        def apply(self, event: pb.JobEvent) -> None:
            self.tokens += event.HasField("look_back")
            if not event.HasField("look_back") or self.tokens > 1:
                super().apply(event)

    monkeypatch.setattr(look_back_module, "LOOK_BACK_S", 0.05)
    work, files = MemoryWork(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
    await put_out(work, files)
    await run(work, files, SHARES * LINES, SHARES * LINES, Deaf(work))
    assert answers(work) == Counter(range(SHARES * LINES))
