"""Lines of shares that a broker hands out again though they were answered."""

import asyncio
import time
from collections import Counter
from pathlib import Path

from prometheus_client import CollectorRegistry

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES
from libs.filestore.local import LocalFiles
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import end
from libs.testing.wait import until
from libs.testing.work import MemoryWork
from services.gateway.batch.line import Line
from services.gateway.batch.metrics import BatchMetrics
from services.gateway.batch.runner import Runner
from services.gateway.batch.slots import Load, Slots
from services.gateway.batch.view import JobView

LINES = 200
SHARES = 3
HOUR_NS = 3_600 * 10**9


class FewAnswers:
    """Has an answer for so many lines, and none for what is asked after them."""

    def __init__(self, count: int) -> None:
        self.left = count

    async def ask(self, share: pb.Share, line: Line) -> object:
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        raise InvalidRequest("an answer like any other")


async def run(work: MemoryWork, files: LocalFiles, answers: int, results: int) -> None:
    """A gateway that answers so many lines, until there are so many results; then it dies."""
    view = JobView(work)
    slots = Slots(lambda: Load(free=1000, bound=0, people_waiting=0, lines_waiting=0), share=1, max_in_flight=1000)
    runner = Runner(
        files=files,
        asker=FewAnswers(answers),  # type: ignore[arg-type]
        slots=slots,
        clock=SystemClock(),
        view=view,
        metrics=BatchMetrics(CollectorRegistry()),
        by_prefix=False,
    )
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(view.follow()), loop.create_task(runner.work(work))]
    await until(lambda: len(work.values_of(BATCH_RESULTS)) >= results, what=f"{results} results")
    if results == SHARES * LINES:
        await until(lambda: work.next_offset == SHARES, what="the last share's end")
    await end(*tasks)


async def test_a_broker_that_forgets_how_far_shares_are_makes_no_line_be_answered_twice(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
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
    await run(work, files, LINES + 50, LINES + 50)
    work.next_offset, work.note, work.end = 0, "", SHARES
    await run(work, files, LINES, 2 * LINES + 50)
    work.next_offset, work.note = 0, "1/0"
    await run(work, files, LINES, SHARES * LINES)
    work.next_offset, work.note = 1, ""
    await run(work, files, LINES, SHARES * LINES)
    found = Counter(result.place for result in work.values_of(BATCH_RESULTS) if isinstance(result, pb.Result))
    assert found == Counter(range(SHARES * LINES))
