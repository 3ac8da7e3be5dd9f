"""Tests of a gateway's view of jobs: none is reported unknown too soon or twice, and the view is bounded."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from google.protobuf.message import Message

from libs.bus.port import Record
from libs.contracts.errors import (
    BrokerUnavailable,
    Conflict,
    FulcrumError,
    InvalidRequest,
    QueueFull,
    TopicNotAllowed,
    UnsupportedField,
    UnsupportedMediaType,
)
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_SUBMIT, Topic
from libs.runtime.clock import SystemClock
from libs.testing.batch.work import MemoryWork, created, job_events, running, store
from libs.testing.wait import until
from services.gateway.batch import view as view_module
from services.gateway.batch.begin import AllowedTopics, Submissions
from services.gateway.batch.job import Job
from services.gateway.batch.routes import make_batch_router, show_batch, show_page
from services.gateway.batch.view import MAX_TENANT_UNFINISHED, MAX_UNFINISHED, JobTable, JobView

BATCH_BODY = {"endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h"}

TOPICS = AllowedTopics("batch.*")


class HandleBlocks(MemoryWork):
    """A bus whose records are unreadable until released, as behind an open transaction of a killed producer."""

    def __init__(self) -> None:
        super().__init__(BATCH_JOBS)
        self.let_go = asyncio.Event()

    async def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        assert on_replayed is not None
        on_replayed()
        await self.let_go.wait()
        async for record in super().follow(topic, since):
            yield record


@asynccontextmanager
async def gateway(work: MemoryWork, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, JobView]]:
    """Run a gateway that has read all existing records."""
    view = JobView(work)
    app = FastAPI()
    app.include_router(
        make_batch_router(
            bus=work,
            files=await store(tmp_path),
            view=view,
            clock=SystemClock(),
            topics=TOPICS,
            max_file_bytes=999,
            max_line_bytes=999,
        )
    )
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http,
        running(view.follow()),
    ):
        await until(view.replayed.is_set)
        yield http, view


def test_a_tenants_finished_jobs_evict_only_its_own() -> None:
    book = JobTable(max_jobs=10)
    for number in range(40):
        tenant = "modest" if number < 2 else "flood"
        book.apply(pb.JobEvent(job_id=f"batch_{number}", at_unix_ns=number, created=pb.Created(tenant=tenant)))
        book.apply(pb.JobEvent(job_id=f"batch_{number}", at_unix_ns=number, finished=pb.Finished()))
    assert [job.id for job in book] == [f"batch_{number}" for number in (0, 1, *range(32, 40))]


async def test_a_created_job_is_listed_at_once_even_if_the_broker_is_slow_to_return_it(tmp_path: Path) -> None:
    async with gateway(HandleBlocks(), tmp_path) as (http, _):
        job = (await http.post("/v1/batches", json=BATCH_BODY)).json()
        assert job["status"] == "validating"
        assert (await http.get(f"/v1/batches/{job['id']}")).json() == job
        assert [each["id"] for each in (await http.get("/v1/batches")).json()["data"]] == [job["id"]]
        assert (await http.post(f"/v1/batches/{job['id']}/cancel")).json()["status"] == "cancelling"


def test_only_the_jobs_on_the_page_are_rendered() -> None:
    view, rendered = JobView(MemoryWork(BATCH_JOBS)), list[str]()
    for number in range(10):
        view.apply(created(f"job-{number}"))

    def show(job: Job) -> dict[str, Any]:
        rendered.append(job.id)
        return {"id": job.id}

    page = show_page(view.jobs(), show, after=view.jobs()[1].id, limit=3)
    assert rendered == [job.id for job in view.jobs()[2:5]] == [item["id"] for item in page["data"]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (rendered[0], rendered[-1], True)


async def test_a_job_requested_again_with_its_key_is_the_same_job(tmp_path: Path) -> None:
    work = HandleBlocks()

    async def post(http: httpx.AsyncClient, key: str = "mine", **change: Any) -> str:
        headers = {"Idempotency-Key": key}
        return str((await http.post("/v1/batches", json={**BATCH_BODY, **change}, headers=headers)).json()["id"])

    async with gateway(work, tmp_path) as (http, view), gateway(work, tmp_path) as (another, other_view):
        job_id = await post(http)
        assert await post(http) == job_id
        assert len(job_events(work)) == 1, "it is not even published again"
        assert await post(another) == job_id, "by a gateway that does not know it yet, too"
        assert await post(http, "other") != job_id
        assert await post(http, metadata={"tenant": "ann"}) != job_id, "each tenant has its own"
        with pytest.raises(Conflict, match=job_id):
            await post(http, completion_window="1h")
        with pytest.raises(InvalidRequest) as refused:
            await post(http, "")
        assert refused.value.param == "idempotency-key"
        work.let_go.set()
        await until(lambda: len(other_view.jobs()) == 3)
        await until(lambda: show_batch(view.jobs()[-1]) == show_batch(other_view.jobs()[-1]))
        first = next(event for event in job_events(work) if event.job_id == job_id)
        assert all(found.jobs()[-1].created_unix_ns == first.at_unix_ns for found in (view, other_view))


async def test_a_job_is_created_only_from_a_json_body(tmp_path: Path) -> None:
    work = HandleBlocks()
    async with gateway(work, tmp_path) as (http, _):
        for headers in ({}, {"content-type": "text/plain"}, {"content-encoding": "gzip"}):
            with pytest.raises(UnsupportedMediaType):
                await http.post("/v1/batches", content=json.dumps(BATCH_BODY), headers=headers)
        with pytest.raises(UnsupportedMediaType):
            await http.post("/v1/files", content=b"{}", headers={"content-type": "application/jsonl"})
        form = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
        with pytest.raises(UnsupportedMediaType):
            await http.post("/v1/files", headers={"content-encoding": "gzip"}, **form)
        assert (await http.post("/v1/files", **form)).status_code == 200
    assert not job_events(work)


async def test_an_error_of_files_and_batches_is_short_whatever_it_names(tmp_path: Path) -> None:
    long = "x" * 10_000
    form = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch", long[:3000]: "1"}}
    async with gateway(HandleBlocks(), tmp_path) as (http, _):
        for method, path, more in (
            ("GET", f"/v1/files/{long}", {}),
            ("DELETE", f"/v1/files/{long}", {}),
            ("GET", f"/v1/files?after={long}", {}),
            ("GET", f"/v1/batches/{long}", {}),
            ("GET", f"/v1/batches?after={long}", {}),
            ("POST", "/v1/files", form),
            ("POST", "/v1/batches", {"json": {**BATCH_BODY, long: 1}}),
            ("POST", "/v1/batches", {"json": {**BATCH_BODY, "input_file_id": long}}),
        ):
            with pytest.raises(FulcrumError) as refused:
                await http.request(method, path, **more)  # type: ignore[arg-type]
            assert refused.value.http_status in (400, 404)
            assert len(refused.value.message) + len(str(refused.value.param)) < 500, path


@pytest.mark.parametrize("change", [{"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, {"any": 1}])
async def test_an_unsupported_field_of_batches_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    async with gateway(HandleBlocks(), tmp_path) as (http, _):
        with pytest.raises(UnsupportedField) as refused:
            await http.post("/v1/batches", json={**BATCH_BODY, **change})
        (name,) = change
        assert (refused.value.code, refused.value.param) == ("unsupported_field", name)
        requests_nothing = {**BATCH_BODY, **dict.fromkeys(change)}
        assert (await http.post("/v1/batches", json=requests_nothing)).status_code == 200


@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_files_of_one_second_are_listed_and_paged_in_the_order_of_creation(tmp_path: Path, order: str) -> None:
    async with gateway(HandleBlocks(), tmp_path) as (http, _):

        async def upload(name: str) -> str:
            answer = await http.post("/v1/files", files={"file": (name, b"{}")}, data={"purpose": "batch"})
            return str(answer.json()["id"])

        made = [await upload(str(number)) for number in range(6)]
        listed: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = (await http.get("/v1/files", params={"order": order, "limit": 2, **after})).json()
            listed += [each["id"] for each in page["data"] if each["id"] in made]
            assert all(isinstance(each["created_at"], int) and each["created_at"] < 10**11 for each in page["data"])
            if len(listed) == 2:
                await upload("one that comes between two pages")
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert listed == (made if order == "asc" else made[::-1])


async def test_a_job_that_does_not_fit_is_refused_by_field_name(tmp_path: Path) -> None:
    async with gateway(HandleBlocks(), tmp_path) as (http, _):
        for change, param in (({"priority": "high"}, "priority"), ({"metadata": {"a": 1}}, "metadata")):
            with pytest.raises(InvalidRequest) as refused:
                await http.post("/v1/batches", json={**BATCH_BODY, **change})
            assert refused.value.param == param


async def test_clients_do_not_retry_a_request_that_may_have_created_a_job(tmp_path: Path) -> None:
    class Unsure(HandleBlocks):
        async def send(self, topic: Topic, value: Message) -> None:
            raise BrokerUnavailable("the broker did not reply in time")

    async with gateway(Unsure(), tmp_path) as (http, _):
        for headers, repeatable in (({}, False), ({"Idempotency-Key": "mine"}, True)):
            with pytest.raises(FulcrumError) as unsure:
                await http.post("/v1/batches", json=BATCH_BODY, headers=headers)
            assert (unsure.value.code, unsure.value.repeatable) == ("broker_unavailable", repeatable)


async def test_a_job_is_not_called_unknown_before_the_gateway_has_read_all_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "READY_TIMEOUT_S", 0.05)
    work, files = MemoryWork(BATCH_JOBS), await store(tmp_path)
    view, job_id = JobView(work), f"batch_{'0' * 32}"
    await work.send(BATCH_JOBS, created(job_id, input_file_id="file-1"))
    app = FastAPI()
    app.include_router(
        make_batch_router(
            bus=work, files=files, view=view, clock=SystemClock(), topics=TOPICS, max_file_bytes=999, max_line_bytes=999
        )
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


def test_unfinished_jobs_are_bounded_in_total_and_per_tenant() -> None:
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


async def test_a_record_that_submits_one_job_too_many_becomes_a_failed_job() -> None:
    records = MemoryWork(BATCH_SUBMIT)
    view = JobView(records)
    for number in range(MAX_TENANT_UNFINISHED):
        view.apply(created(f"job-{number}"))
    body = b'{"input_topic": "batch.lines", "endpoint": "/v1/completions", "metadata": {"tenant": "ann"}}'
    submissions = Submissions(view, SystemClock(), "cluster", TOPICS)
    await records.send(BATCH_SUBMIT, pb.Submission(body=body))
    async with running(view.follow(), submissions.work(records)):
        await until(lambda: records.next_offset == 1)
    events = [event for event in job_events(records) if not event.HasField("look_back")]
    assert (events[0].created.tenant, events[1].finished.error_code) == ("ann", "queue_full")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"%s": 1, "endpoint": "/v1/completions"}' % (b"x" * 60_000), "unsupported_field"),
        (b'{"%s": 1, "endpoint": "/v1/completions"}' % (b"x" * 990_000), "body_too_large"),
        (
            b'{"endpoint": "/v1/completions", "input_topic": "batch.a", "metadata": {"%s": ""}}' % (b"k" * 65),
            "invalid_request",
        ),
    ],
)
async def test_a_record_with_too_much_metadata_becomes_a_job_that_fits_its_record(body: bytes, code: str) -> None:
    records = MemoryWork(BATCH_SUBMIT)
    view = JobView(records)
    await records.send(BATCH_SUBMIT, pb.Submission(body=body))
    async with running(view.follow(), Submissions(view, SystemClock(), "cluster", TOPICS).work(records)):
        await until(lambda: records.next_offset == 1)
    events = [event for event in job_events(records) if not event.HasField("look_back")]
    assert events[1].finished.error_code == code
    assert sum(event.ByteSize() for event in events) < 2_000


async def test_a_record_that_is_delivered_again_creates_no_second_job() -> None:
    class Behind(JobView):
        """A view that has read the existing records, and none sent since."""

        async def follow(self) -> None:
            self.replayed.set()
            await until(
                lambda: any(event.HasField("look_back") for event in job_events(records)) or records.next_offset > 0
            )
            await super().follow()

    records = MemoryWork(BATCH_SUBMIT)
    body = b'{"input_topic": "batch.lines", "endpoint": "/v1/completions"}'
    await records.send(BATCH_SUBMIT, pb.Submission(body=body))
    view = JobView(records)
    async with running(view.follow(), Submissions(view, SystemClock(), "cluster", TOPICS).work(records)):
        await until(lambda: records.next_offset == 1)
    records.next_offset = 0
    view = Behind(records)
    async with running(view.follow(), Submissions(view, SystemClock(), "cluster", TOPICS).work(records)):
        await until(lambda: records.next_offset == 1)
    assert [event.WhichOneof("event") for event in job_events(records)].count("created") == 1


async def test_a_record_is_checked_against_the_list_of_topics_as_a_request_is(tmp_path: Path) -> None:
    records = MemoryWork(BATCH_SUBMIT)
    view = JobView(records)
    body = {"endpoint": "/v1/completions", "input_file_id": "file-1", "output_topic": "payments"}
    await records.send(BATCH_SUBMIT, pb.Submission(body=json.dumps(body).encode()))
    async with running(view.follow(), Submissions(view, SystemClock(), "cluster", TOPICS).work(records)):
        await until(lambda: records.next_offset == 1)
    finished = [event for event in job_events(records) if not event.HasField("look_back")][1].finished
    assert (finished.error_code, finished.error_param) == ("topic_not_allowed", "output_topic")
    assert "FULCRUM_GATEWAY_BATCH_TOPICS" in finished.error_message
    async with gateway(HandleBlocks(), tmp_path) as (http, view):
        with pytest.raises(TopicNotAllowed, match="FULCRUM_GATEWAY_BATCH_TOPICS") as refused:
            await http.post("/v1/batches", json=body)
        assert (refused.value.param, refused.value.http_status) == ("output_topic", 403)
        assert not view.jobs()
