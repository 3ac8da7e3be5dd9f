"""Tests of files and batches through OpenAI's client with its default retries."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import openai
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.testing.batch.work import MemoryWork, created, running, store
from libs.testing.wait import until
from services.gateway.batch.begin import AllowedTopics
from services.gateway.batch.routes import make_batch_router
from services.gateway.batch.view import JobView
from services.gateway.routes import handle_errors

pytestmark = pytest.mark.system

ENDPOINT: Final = "/v1/completions"
STORE_BYTES = 2_000
JOB = f"batch_{'1' * 32}"


class Gateway:
    """The routes of a gateway that counts its requests."""

    def __init__(self, app: FastAPI, view: JobView) -> None:
        self._app = app
        self.view = view
        self.requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        await self._app(scope, receive, send)


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Gateway]]:
    """A gateway with one file of one line, `file-1`."""
    work, files, app = MemoryWork(BATCH_JOBS), await store(tmp_path, max_bytes=STORE_BYTES), FastAPI()
    view = JobView(work)
    app.include_router(
        make_batch_router(
            bus=work,
            files=files,
            view=view,
            clock=SystemClock(),
            topics=AllowedTopics(""),
            max_file_bytes=10**6,
            max_line_bytes=10**6,
        )
    )
    handle_errors(app)
    gateway = Gateway(app, view)
    sock = bind("127.0.0.1", 0, "PORT")
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", api_key="any")
    async with serve_http(gateway, sock, tasks=TaskOwner(), drain_s=1), client, running(view.follow()):
        await until(view.replayed.is_set)
        yield client, gateway


async def test_a_permanent_error_is_not_retried(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, gateway):
        assert client.max_retries > 0
        with pytest.raises(openai.APIStatusError) as full:
            await client.files.create(file=("f", b"x" * STORE_BYTES), purpose="batch")
        assert (full.value.status_code, full.value.code, gateway.requests) == (507, "store_full", 1)
        gateway.view.apply(created(JOB))
        gateway.view.apply(pb.JobEvent(job_id=JOB, finished=pb.Finished(outcome=pb.OUTCOME_COMPLETED)))
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(JOB)
        assert gateway.requests == 2


async def test_a_job_created_twice_with_one_key_in_extra_headers_is_one_job(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        ids = {
            (
                await client.batches.create(
                    input_file_id="file-1",
                    endpoint=ENDPOINT,
                    completion_window="24h",
                    extra_headers={"Idempotency-Key": "nightly"},
                )
            ).id
            for _ in range(2)
        }
        assert len(ids) == 1


async def test_a_missing_input_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.batches.create(input_file_id="file-none", endpoint=ENDPOINT, completion_window="24h")
        assert (missing.value.code, missing.value.param) == ("file_not_found", "input_file_id")


@pytest.mark.parametrize(
    ("metadata", "tenant", "priority"),
    [
        ({"tenant": "Acme Corp", "priority": "high"}, "default", 0),
        ({"tenant": "", "priority": "101", "run": "7"}, "default", 0),
        ({"tenant": "ann", "priority": "-7"}, "ann", -7),
        (None, "default", 0),
    ],
)
async def test_metadata_belongs_to_the_client_unless_it_looks_like_our_own(
    tmp_path: Path, metadata: dict[str, str] | None, tenant: str, priority: int
) -> None:
    async with serving(tmp_path) as (client, _):
        job = await client.batches.create(
            input_file_id="file-1", endpoint=ENDPOINT, completion_window="24h", metadata=metadata
        )
        own = job.model_dump()["fulcrum"]
        assert (job.metadata, own["tenant"], own["priority"]) == (metadata, tenant, priority)
