"""Tests of jobs that wait for room in the file store: they report it, cost little and can be cancelled."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from libs.cli.batch.jobs import print_batch
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES
from libs.filestore.local import LocalFiles
from libs.runtime.clock import Clock, SystemClock
from libs.testing.batch.work import HOUR_NS, MemoryWork, created, running
from libs.testing.wait import ManualClock, until
from services.gateway.batch import keeper as keeper_module
from services.gateway.batch.keeper import CANCELLED_WAITS_S, JobKeeper
from services.gateway.batch.output import PART_PURPOSE
from services.gateway.batch.routes import show_batch
from services.gateway.batch.view import JobView
from services.gateway.metrics import BatchMetrics

LINES = 100
STORE_BYTES = 2_000


class CountingFiles(LocalFiles):
    """A file store that counts the reads of each part of an output."""

    parts_read = 0

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        self.parts_read += "-output-" in file_id
        async for part in super().read(file_id, first_byte, length):
            yield part


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(keeper_module, "RETRY_MAX_S", 0.1)


async def files_with_room_for_parts_alone(tmp_path: Path) -> CountingFiles:
    files = CountingFiles(tmp_path / "files", max_bytes=STORE_BYTES)
    for file_id, content in (("file-1", b"{}\n" * LINES), ("file-2", b"x" * 900)):
        async with files.draft(file_id, max_bytes=STORE_BYTES) as draft:
            await draft.write(content)
            await draft.keep(name="f", purpose="batch")
    return files


def keeper(work: MemoryWork, files: LocalFiles, view: JobView, clock: Clock) -> JobKeeper:
    metrics = BatchMetrics(CollectorRegistry())
    bounds = {"max_lines": LINES, "max_file_bytes": STORE_BYTES, "max_output_bytes": STORE_BYTES, "part_bytes": 100}
    return JobKeeper(work, files, view, clock, metrics=metrics, **bounds)


async def answer_all(work: MemoryWork) -> None:
    await until(lambda: work.values_of(BATCH_SHARES), what="the share")
    for place in range(LINES):
        await work.send(BATCH_RESULTS, pb.Result(job_id="job", place=place, ok=True, answer=b"%04d" % place))
    counts = pb.Progress(completed=LINES, whole=True)
    await work.send(BATCH_JOBS, pb.JobEvent(job_id="job", at_unix_ns=1, progress=counts))


async def test_a_job_without_room_reports_it_and_copies_nothing_until_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, files = MemoryWork(BATCH_JOBS), await files_with_room_for_parts_alone(tmp_path)
    view = JobView(work)

    def shown() -> dict[str, Any]:
        return show_batch(view.jobs()[0])

    async with running(view.follow(), keeper(work, files, view, SystemClock()).work(work)):
        await work.send(BATCH_JOBS, created("job", input_file_id="file-1"))
        await answer_all(work)
        await until(lambda: shown()["fulcrum"]["waits_for"], what="word of the wait")
        assert (shown()["status"], files.parts_read) == ("finalizing", 0)
        print_batch(shown(), as_json=False)
        assert "room" in capsys.readouterr().err
        reported = len(work.values_of(BATCH_JOBS))
        assert reported < 40, "the wait is logged once"
        await files.delete("file-2")
        await until(lambda: not view.unfinished(), what="the end")
        assert (shown()["status"], shown()["fulcrum"]["waits_for"]) == ("completed", None)
    assert (await files.info("file-job-output")).bytes == 5 * LINES


async def test_a_cancelled_job_that_finds_no_room_ends_without_its_answers_and_gives_the_reason(tmp_path: Path) -> None:
    work, files, clock = MemoryWork(BATCH_JOBS), await files_with_room_for_parts_alone(tmp_path), ManualClock()
    view = JobView(work)
    async with running(view.follow(), keeper(work, files, view, clock).work(work)):
        ends_ns = clock.now_ns() + HOUR_NS
        await work.send(BATCH_JOBS, created("job", input_file_id="file-1", expires_unix_ns=ends_ns))
        await answer_all(work)
        requested = pb.JobEvent(job_id="job", at_unix_ns=clock.now_ns(), cancel_asked=pb.CancelAsked())
        await work.send(BATCH_JOBS, requested)
        await until(lambda: view.jobs()[0].waits_for, what="word of the wait")
        assert view.unfinished(), "room may be made yet"
        clock.advance_ms(CANCELLED_WAITS_S * 1000 + 1)
        await until(lambda: not view.unfinished(), what="the end")
        shown = show_batch(view.jobs()[0])
        assert (shown["status"], shown["output_file_id"]) == ("cancelled", None)
        assert shown["errors"]["data"][0]["code"] == "store_full"
        assert shown["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        await until(lambda: not list((tmp_path / "files").glob("file-job-*")), what="the end of the parts")
    assert PART_PURPOSE not in {info.purpose for info in await files.infos()}
