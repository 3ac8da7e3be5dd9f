"""Tests of a tenant's bounds on batch files, bytes and lines, and of the removal of old files and answers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.local import LocalFiles
from libs.filestore.port import StoreTotals
from libs.keys.book import KeySet, Role, TenantLimits, draw_key
from libs.keys.gate import KeyGate
from libs.keys.table import KeyTable
from libs.runtime.clock import SystemClock
from libs.runtime.web import error_response
from libs.testing.batch.work import MemoryWork
from libs.testing.wait import ManualClock, until
from services.gateway.batch.begin import AllowedTopics, Submissions, begin
from services.gateway.batch.bounds import LOOK_S, SETTLED_S, Retention, TenantBounds, unneeded
from services.gateway.batch.routes import make_batch_router
from services.gateway.batch.view import JobView

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}\n'


class World:
    """The routes of one gateway over a clock of its own; tenant a has limits."""

    def __init__(self, folder: Path, limits: TenantLimits, **bounds: Any) -> None:
        self.files, self.work = LocalFiles(folder, max_bytes=10**7), MemoryWork(BATCH_JOBS)
        self.clock, self.view = ManualClock(time.time_ns()), JobView(self.work)
        self.view.replayed.set()
        self.table, book, self.keys = KeyTable(open_without_keys=True), KeySet().with_limits("a", limits), {}
        roles: dict[str, Role] = {"a": "user", "b": "user", "admin": "admin"}
        for tenant, role in roles.items():
            self.keys[tenant], key = draw_key(tenant, now_s=0, role=role)
            book = book.with_key(key, 0)
        self.book = book
        self.table.replace(book, 0)
        self.bounds = TenantBounds(self.table, **bounds)
        self.retention = Retention(self.work, self.files, self.view, self.clock, self.bounds)
        app = FastAPI()
        app.include_router(
            make_batch_router(
                bus=self.work, files=self.files, view=self.view, clock=self.clock, topics=AllowedTopics(""),
                max_file_bytes=10**6, max_line_bytes=10**5, bounds=self.bounds,
            )
        )  # fmt: skip
        app.exception_handler(FulcrumError)(lambda _request, error: error_response(error))
        self.gate = KeyGate(app, self.table, SystemClock(), need=lambda *_: "user")

    def client(self, tenant: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.gate), base_url="http://gateway", headers=headers)

    async def upload(self, tenant: str, content: bytes, **fields: str) -> httpx.Response:
        async with self.client(tenant) as http:
            return await http.post("/v1/files", data={"purpose": "batch", **fields}, files={"file": content})

    async def listed(self, tenant: str) -> list[dict[str, Any]]:
        async with self.client(tenant) as http:
            return (await http.get("/v1/files")).json()["data"]

    def job(self, name: str, file_id: str, *, lines: int = 0, since: int = 0, tenant: str = "a") -> str:
        """An unfinished job; counted where it has lines."""
        job_id = f"batch_{name}"
        created = pb.Created(input_file_id=file_id, tenant=tenant, expires_unix_ns=2**62)
        self.view.apply(pb.JobEvent(job_id=job_id, at_unix_ns=1, created=created))
        if lines:
            started = pb.Started(lines=lines, results_since=[since], input_file_id=file_id)
            self.view.apply(pb.JobEvent(job_id=job_id, at_unix_ns=2, started=started))
        return job_id

    def delete(self, tenant: str) -> None:
        self.book = self.book.without_tenant(tenant, time.time_ns())
        self.table.replace(self.book, time.time())

    def finish(self, job_id: str, output_file_id: str = "") -> None:
        finished = pb.Finished(outcome=pb.OUTCOME_COMPLETED, output_file_id=output_file_id)
        self.view.apply(pb.JobEvent(job_id=job_id, at_unix_ns=3, finished=finished))


async def test_a_tenants_storage_is_bounded_without_affecting_another_tenant(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits(stored_bytes=3 * len(LINE)))
    first = await world.upload("a", LINE * 2)
    assert first.status_code == 200
    too_large = await world.upload("a", LINE * 2)
    assert too_large.status_code == 413, too_large.text
    assert (await world.upload("a", LINE)).status_code == 200
    full = await world.upload("a", LINE)
    assert full.status_code == 429 and full.json()["error"]["code"] == "insufficient_quota"
    assert f"{3 * len(LINE)} bytes" in full.json()["error"]["message"]
    assert full.headers["x-should-retry"] == "false"
    assert (await world.upload("b", LINE * 10)).status_code == 200
    async with world.client("a") as http:
        await http.delete(f"/v1/files/{first.json()['id']}")
    assert (await world.upload("a", LINE * 2)).status_code == 200


async def test_a_tenants_number_of_files_is_bounded_and_others_have_room(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits(), store=StoreTotals(40, 10**6), tenant_files=8)
    made = [await world.upload("a", LINE) for _ in range(8)]
    assert {answer.status_code for answer in made} == {200}
    full = await world.upload("a", LINE)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "8 files" in full.json()["error"]["message"] and full.headers["x-should-retry"] == "false"
    assert (await world.upload("b", LINE)).status_code == 200
    async with world.client("a") as http:
        await http.delete(f"/v1/files/{made[0].json()['id']}")
    assert (await world.upload("a", LINE)).status_code == 200
    world.book = world.book.with_limits("a", TenantLimits(files=9))
    world.table.replace(world.book, 0)
    assert (await world.upload("a", LINE)).status_code == 200
    assert (await world.upload("a", LINE)).status_code == 429


async def test_a_tenant_that_fills_its_part_of_the_store_leaves_room_for_the_next_one(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits(), store=StoreTotals(20, 10**6))
    answers = [(await world.upload("a", LINE)).status_code for _ in range(11)]
    assert answers == [200] * 10 + [507], "half of what the store takes"
    assert [(await world.upload("b", LINE)).status_code for _ in range(6)] == [200] * 5 + [507]
    world = World(tmp_path / "bytes", TenantLimits(), store=StoreTotals(100, 40 * len(LINE)))
    answers = [(await world.upload("a", LINE * 5)).status_code for _ in range(4)]
    assert answers == [200, 200, 200, 507], "half of three quarters: answers of batches have the rest"
    assert (await world.upload("b", LINE * 5)).status_code == 200


async def test_room_for_its_answers_is_reserved_when_a_batch_is_accepted(tmp_path: Path) -> None:
    """Two files of each unfinished batch count as written."""
    world = World(tmp_path, TenantLimits(), store=StoreTotals(100, 10**6), tenant_files=8)
    file = (await world.upload("a", LINE)).json()["id"]
    async with world.client("a") as http:
        made = [await http.post("/v1/batches", json=asks(file), headers={"idempotency-key": str(n)}) for n in range(4)]
    assert [answer.status_code for answer in made] == [200, 200, 200, 429]
    assert made[3].json()["error"]["code"] == "insufficient_quota"
    assert (await world.upload("a", LINE)).status_code == 200
    assert (await world.upload("a", LINE)).status_code == 429, "the rest is its batches'"
    for number, answer in enumerate(made[:3]):
        for kind in ("output", "errors"):
            async with world.files.draft(f"file-{number}-{kind}", max_bytes=9) as draft:
                await draft.write(b"answers")
                await draft.keep(name="f", purpose="batch_output", tenant="a")
        world.finish(answer.json()["id"])
    assert len(await world.files.of("a")) == 8


async def test_a_batch_by_topic_without_room_for_its_answers_fails_with_the_reason(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits(), store=StoreTotals(2, 10**6))
    check = partial(world.bounds.check_answer_room, world.files, world.view)
    submissions = Submissions(world.view, world.clock, "cluster", AllowedTopics("lines"), check)
    body = {"input_topic": "lines", "endpoint": "/v1/completions", "completion_window": "24h"}
    _, ended = await submissions._events("batch_1", json.dumps(body).encode())
    assert ended.finished.error_code == "store_full"


async def test_slow_uploads_of_one_tenant_do_not_block_another(tmp_path: Path) -> None:
    world, begun = World(tmp_path, TenantLimits()), asyncio.Event()

    async def drips() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await begun.wait()

    async with world.client("a") as http, asyncio.TaskGroup() as group:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        slow = [group.create_task(http.post("/v1/files", content=drips(), headers=headers)) for _ in range(16)]
        await until(lambda: world.bounds.uploads.held == 4 and len(world.bounds.uploads) == 12)
        assert (await world.upload("b", LINE)).status_code == 200
        assert world.bounds.uploads.held == 4
        begun.set()
    assert {each.result().status_code for each in slow} == {400}
    assert (await world.upload("a", LINE)).status_code == 200
    assert (world.bounds.uploads.held, len(world.bounds.uploads)) == (0, 0)


async def test_a_file_expires_at_the_time_set_by_its_owner(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits())
    made = await world.upload("b", LINE, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    file = made.json()
    assert file["expires_at"] == file["created_at"] + 3600
    await world.retention.expire()
    assert [each["id"] for each in await world.listed("b")] == [file["id"]]
    world.clock.advance_ms(3_900_000)
    async with world.client("b") as http:
        assert (await http.get(f"/v1/files/{file['id']}/content")).status_code == 404
        assert (await http.post("/v1/batches", json=asks(file["id"]))).status_code == 404
    assert await world.listed("b") == [] and len(await world.files.infos()) == 1
    await world.retention.expire()
    assert await world.files.infos() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_after[seconds]": "3600"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "99999999"},
        {"expires_after[anchor]": "last_used", "expires_after[seconds]": "3600"},
    ],
)
async def test_an_invalid_expiry_stores_nothing(tmp_path: Path, fields: dict[str, str]) -> None:
    world = World(tmp_path, TenantLimits())
    answer = await world.upload("b", LINE, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "expires_after"
    assert await world.files.infos() == []


async def test_a_tenants_files_expire_unless_a_batch_still_reads_them(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits(file_days=7))
    read, idle = (await world.upload("a", LINE)).json(), (await world.upload("a", LINE)).json()
    other = (await world.upload("b", LINE)).json()
    assert read["expires_at"] == read["created_at"] + 7 * 86_400 and other["expires_at"] is None
    job = world.job("one", read["id"], lines=1)
    world.clock.advance_ms(7 * 86_400_000 + 300_000)
    await world.retention.expire()
    assert {each.id for each in await world.files.infos()} == {read["id"], other["id"]} and idle["id"]
    world.finish(job)
    await world.retention.expire()
    assert {each.id for each in await world.files.infos()} == {other["id"]}


async def test_a_batch_with_more_lines_than_its_tenant_has_left_fails_with_the_name_of_the_limit(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, TenantLimits(batch_lines=10))
    file = (await world.upload("a", LINE * 4)).json()["id"]
    first = world.job("one", file, lines=8)
    world.job("other", file, lines=1_000, tenant="b")
    world.job("two", file)
    job = world.view.get("batch_two")
    assert job is not None

    async def begun() -> Any:
        most, bound = world.bounds.line_room(world.view, "a", job.id, 1_000)
        return await begin(world.work, world.files, job, max_lines=most, bound=bound, max_file_bytes=10**6)

    refused = await begun()
    assert isinstance(refused, pb.Finished) and refused.error_code == "too_many_lines"
    assert "more lines than 2" in refused.error_message and "tenant a" in refused.error_message
    world.finish(first)
    assert (await begun()).started.lines == 4


async def test_answers_in_kafka_are_trimmed_once_no_job_needs_them(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits())
    for place in range(5):
        await world.work.send(BATCH_RESULTS, pb.Result(job_id="batch_one", place=place))
    job = world.job("one", "file-x", lines=5, since=2)
    for _ in range(round(SETTLED_S / LOOK_S) + 1):
        assert BATCH_RESULTS.stem not in world.work.trimmed
        await world.retention.trim()
        world.clock.advance_ms(LOOK_S * 1000)
    assert world.work.trimmed[BATCH_RESULTS.stem] == [2]  # what the job begins with stays
    world.finish(job)
    await world.retention.trim()
    assert world.work.trimmed[BATCH_RESULTS.stem] == [5]


async def test_recent_answers_stay_even_if_no_job_is_known(tmp_path: Path) -> None:
    """Another gateway may have begun a job that is not known here yet."""
    world = World(tmp_path, TenantLimits())
    for _ in range(round(SETTLED_S / LOOK_S)):
        await world.retention.trim()
        world.clock.advance_ms(LOOK_S * 1000)
    await world.work.send(BATCH_RESULTS, pb.Result(job_id="batch_new", place=0))
    await world.retention.trim()
    assert world.work.trimmed.get(BATCH_RESULTS.stem, [0]) == [0]


def test_the_earliest_start_among_unfinished_jobs_bounds_the_trim_of_each_partition(tmp_path: Path) -> None:
    view = JobView(MemoryWork(BATCH_JOBS))
    for name, since in (("a", [3, 9]), ("b", [5, 1])):
        view.apply(pb.JobEvent(job_id=name, at_unix_ns=1, created=pb.Created(tenant="a")))
        view.apply(pb.JobEvent(job_id=name, at_unix_ns=2, started=pb.Started(lines=1, results_since=since)))
    assert unneeded([4, 20], view.unfinished()) == [3, 1]
    assert unneeded([4, 20], []) == [4, 20]


def asks(file_id: str) -> dict[str, str]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}


async def test_files_of_a_deleted_tenant_are_inaccessible_at_once_and_deleted_later(tmp_path: Path) -> None:
    world = World(tmp_path, TenantLimits())
    files = {tenant: (await world.upload(tenant, LINE)).json()["id"] for tenant in ("a", "b")}
    running, ended = world.job("running", files["a"], lines=1), world.job("ended", files["a"])
    world.job("other", files["b"], tenant="b")
    world.delete("a")
    async with world.client("a") as http:
        assert (await http.get("/v1/files")).status_code == 401
    async with world.client("admin") as http:
        assert [each["id"] for each in (await http.get("/v1/files")).json()["data"]] == [files["b"]]
        assert [each["id"] for each in (await http.get("/v1/batches")).json()["data"]] == ["batch_other"]
        assert (await http.get(f"/v1/files/{files['a']}")).status_code == 404
        assert (await http.get(f"/v1/batches/{running}")).status_code == 404
    await world.retention.forget()
    await world.retention.expire()
    sent = [event for event in world.work.values_of(BATCH_JOBS) if isinstance(event, pb.JobEvent)]
    cancelled = [event.job_id for event in sent if event.HasField("cancel_asked")]
    assert sorted(cancelled) == sorted([running, ended])
    assert files["a"] in {info.id for info in await world.files.infos()}, "a batch that is being cancelled reads it"

    output = (await world.upload("admin", LINE)).json()["id"]  # made after the tenant was deleted, by its batch
    for job_id in (running, ended):
        world.finish(job_id, output)
    await world.retention.forget()
    await world.retention.expire()
    assert {info.id for info in await world.files.infos()} == {files["b"]}


async def test_a_tenant_that_reuses_a_deleted_name_begins_empty_and_keeps_its_new_files(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, TenantLimits())
    await world.upload("a", LINE)
    world.delete("a")
    world.keys["a"], key = draw_key("a", now_s=0)
    world.book = world.book.with_key(key, 0)
    world.table.replace(world.book, 0)
    assert await world.listed("a") == []
    world.clock.advance_ms(1)
    made = (await world.upload("a", LINE)).json()["id"]
    await world.retention.forget()
    await world.retention.expire()
    assert [each["id"] for each in await world.listed("a")] == [made]
