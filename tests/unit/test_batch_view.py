"""What a gateway knows of jobs: nothing is called unknown too soon, none comes twice, and there is a bound."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from libs.contracts.errors import BrokerUnavailable, QueueFull
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_SUBMIT
from libs.runtime.clock import SystemClock
from libs.testing.batch_lanes import created, running, store, told
from libs.testing.wait import until
from libs.testing.work import MemoryWork
from services.gateway.batch import view as view_module
from services.gateway.batch.api import make_batch_router
from services.gateway.batch.submissions import Submissions
from services.gateway.batch.view import MAX_TENANT_UNFINISHED, MAX_UNFINISHED, JobView


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
