"""The routes of OpenAI's Files and Batch APIs, and the formats of their files and batches."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from libs.bus.work import WorkBus
from libs.contracts.classes import ENDPOINTS
from libs.contracts.errors import (
    BatchNotFound,
    BrokerUnavailable,
    Conflict,
    FileNotFound,
    InvalidRequest,
    quoted,
)
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS
from libs.filestore.port import FileInfo, FileStore, youngest_first
from libs.keys.book import TenantLimits
from libs.keys.gate import caller_of
from libs.keys.table import DEFAULT_TENANT, NO_LIMITS, TENANT_HEADER, Caller, named_in
from libs.runtime.clock import Clock
from libs.runtime.http.semantics import check_json
from services.gateway.batch.begin import (
    IDEMPOTENCY_HEADER,
    MAX_BODY_BYTES,
    AllowedTopics,
    job_id,
    read_request,
    same_request,
)
from services.gateway.batch.bounds import TenantBounds, expiry_unix_s, is_over
from services.gateway.batch.job import Job, PerhapsCreated
from services.gateway.batch.lines import check_topics
from services.gateway.batch.output import PART_PURPOSE
from services.gateway.batch.upload import PURPOSES, receive_file, small_body
from services.gateway.batch.view import JobView
from services.gateway.request.exchange import ClientGone
from services.gateway.request.parse import read_headers


def show_file(info: FileInfo, limits: TenantLimits = NO_LIMITS) -> dict[str, Any]:
    """Return a file in OpenAI's format. `limits` are those of the file's tenant."""
    return {
        "id": info.id,
        "object": "file",
        "bytes": info.bytes,
        "created_at": info.created_unix_s,
        "filename": info.name,
        "purpose": info.purpose,
        "status": "processed",
        "expires_at": expiry_unix_s(info, limits),
    }


def show_batch(job: Job) -> dict[str, Any]:
    created, finished = job.created, job.finished
    ended_s = _seconds(job.finished_unix_ns)
    outcome = finished.outcome if finished else None
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": created.endpoint,
        "errors": _errors(finished),
        "input_file_id": job.input_file_id,
        "completion_window": created.completion_window,
        "status": job.status,
        "output_file_id": (finished.output_file_id or None) if finished else None,
        "error_file_id": (finished.error_file_id or None) if finished else None,
        "created_at": _seconds(job.created_unix_ns),
        "in_progress_at": _seconds(job.started_unix_ns),
        "expires_at": _seconds(created.expires_unix_ns),
        "finalizing_at": _seconds(job.answered_unix_ns) if job.answered else None,
        "completed_at": ended_s if outcome == pb.OUTCOME_COMPLETED else None,
        "failed_at": ended_s if outcome == pb.OUTCOME_FAILED else None,
        "expired_at": ended_s if outcome == pb.OUTCOME_EXPIRED else None,
        "cancelling_at": _seconds(job.cancel_unix_ns),
        "cancelled_at": ended_s if outcome == pb.OUTCOME_CANCELLED else None,
        "request_counts": {"total": job.lines, "completed": job.completed, "failed": job.failed},
        "metadata": dict(created.metadata) or None,
        "fulcrum": _own(job),
    }


class _Item(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Item)


def show_page(
    items: Iterable[Item], show: Callable[[Item], dict[str, Any]], *, after: str | None, limit: int
) -> dict[str, Any]:
    """Return a list in OpenAI's format with at most `limit` items after the item `after`.

    It consumes no more of `items` than needed. Raise InvalidRequest if no item has the id `after`.
    """
    coming = iter(items)
    if after is not None and not any(item.id == after for item in coming):
        raise InvalidRequest(f"after: no {quoted(after)} in the list", param="after")
    page = list(islice(coming, limit))
    return {
        "object": "list",
        "data": [show(item) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": next(coming, None) is not None,
    }


def _own(job: Job) -> dict[str, Any]:
    """Return Fulcrum's own fields of a batch, an extension of OpenAI's format."""
    created, end = job.created, None if job.finished else job.expected_end
    topics = ("input_topic", "output_topic", "error_topic")
    return {
        "tenant": created.tenant,
        "priority": created.priority,
        "expected_end_at": _seconds(end.end_unix_ns) if end else None,
        "late": end.late if end else None,
        "waits_for": job.waits_for or None,
        **{name: topic for name in topics if (topic := getattr(created, name))},
    }


def _errors(finished: pb.Finished | None) -> dict[str, Any] | None:
    if finished is None or not finished.error_code:
        return None
    param = finished.error_param or None
    error = {"code": finished.error_code, "message": finished.error_message, "param": param, "line": None}
    return {"object": "list", "data": [error]}


def _seconds(unix_ns: int) -> int | None:
    return unix_ns // 1_000_000_000 or None


CONTENT_TYPE: Final = "application/octet-stream"
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "The request's fault."},
    "5XX": {"description": "The suite's fault, or the file store is full."},
}
_FILE: Final = {"type": "string", "format": "binary"}
UPLOAD_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "file": _FILE,
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
                    },
                }
            }
        },
    }
}
BATCH_BODY: Final[dict[str, Any]] = {
    "parameters": [{"name": IDEMPOTENCY_HEADER, "in": "header", "schema": {"type": "string"}}],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["endpoint"],
                    "properties": {
                        "input_file_id": {"type": "string"},
                        "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
                        "completion_window": {"type": "string", "default": "24h"},
                        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                        "priority": {"type": "integer", "default": 0},
                        "input_topic": {"type": "string"},
                        "output_topic": {"type": "string"},
                        "error_topic": {"type": "string"},
                    },
                }
            }
        },
    },
}


def page_parameters(*more: str) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "integer" if name == "limit" else "string"}}
            for name in ("after", "limit", *more)
        ]
    }


# The status is never sent, because the client has disconnected.
CLIENT_GONE_STATUS = 499
MAY_BE_THERE = (
    "the batch may have been created, so look at the list of batches before you ask again; with a header "
    "Idempotency-Key, asking again gives the same batch"
)
FILES_PAGE, FILES_PAGE_MAX = 1_000, 10_000
BATCHES_PAGE, BATCHES_PAGE_MAX = 20, 100


def make_batch_router(
    *,
    bus: WorkBus,
    files: FileStore,
    view: JobView,
    clock: Clock,
    topics: AllowedTopics,
    max_file_bytes: int,
    max_line_bytes: int,
    bounds: TenantBounds | None = None,
) -> APIRouter:
    """Return the router. With `bounds` of None, tenants have no limits."""
    router, shelf = APIRouter(responses=ERRORS), Shelf(files, clock, bounds or TenantBounds())
    _add_files(router, shelf, view, max_file_bytes=max_file_bytes, max_line_bytes=max_line_bytes)
    _add_batches(router, bus, shelf, view, clock, topics=topics)
    return router


class Shelf:
    """The unexpired files that a caller may see."""

    def __init__(self, files: FileStore, clock: Clock, bounds: TenantBounds) -> None:
        self.files = files
        self.bounds = bounds
        self._clock = clock

    def over(self, info: FileInfo) -> bool:
        """Return whether the file has expired, even if it has not been deleted."""
        bounds, now_s = self.bounds, self._clock.now_ns() / 1e9
        return is_over(info, bounds.limits_of(info.tenant), now_s, bounds.deleted_unix_ns(info.tenant))

    def show(self, info: FileInfo) -> dict[str, Any]:
        return show_file(info, self.bounds.limits_of(info.tenant))

    async def find(self, file_id: str, caller: Caller) -> FileInfo:
        """Return a file that the caller may see.

        Raise FileNotFound if it does not exist or belongs to another tenant.
        """
        info = await self.files.info(file_id)
        # A part belongs to a job that is still being answered, so clients do not see it.
        hidden = caller.role == "user" and info.purpose == PART_PURPOSE
        if not caller.may_read(info.tenant) or hidden or self.over(info):
            raise FileNotFound(f"no file {quoted(file_id)} is kept here", param="file_id")
        return info

    async def of(
        self, caller: Caller, purpose: str | None, tenant: str | None, *, ascending: bool = False
    ) -> Iterator[FileInfo]:
        """Return an iterator of the files that the caller may see, youngest first unless `ascending`.

        Each file is checked only when it is consumed. A purpose or tenant of None selects all.
        """
        found = await self._readable(caller)
        return (
            info
            for info in (reversed(found) if ascending else found)
            if info.purpose != PART_PURPOSE
            and caller.may_read(info.tenant)
            and tenant in (None, info.tenant or DEFAULT_TENANT)
            and purpose in (None, info.purpose)
            and not self.over(info)
        )

    async def _readable(self, caller: Caller) -> list[FileInfo]:
        """Return the files of all tenants that the caller may read, youngest first."""
        if caller.role != "user":
            return await self.files.infos()
        found = await self.files.of(caller.tenant)
        # Files of older versions have no tenant.
        return found if caller.tenant != DEFAULT_TENANT else youngest_first([*found, *await self.files.of("")])


def _add_files(router: APIRouter, shelf: Shelf, view: JobView, *, max_file_bytes: int, max_line_bytes: int) -> None:
    files = shelf.files

    @router.post("/v1/files", tags=["files"], summary="Upload a file.", openapi_extra=UPLOAD_BODY)
    async def upload(request: Request) -> Any:
        """Upload a file."""
        tenant = read_headers(dict(request.headers.raw), caller_of(request.scope)).tenant
        try:
            async with shelf.bounds.uploads.slot(tenant):
                info = await receive_file(
                    request,
                    files,
                    tenant=tenant,
                    max_bytes=max_file_bytes,
                    max_line_bytes=max_line_bytes,
                    room=lambda: shelf.bounds.file_room(files, view, tenant, max_file_bytes),
                )
        except ClientGone:
            return Response(status_code=CLIENT_GONE_STATUS)
        return shelf.show(info)

    @router.get("/v1/files", tags=["files"], summary="List files.", openapi_extra=page_parameters("purpose", "order"))
    async def list_files(request: Request) -> Any:
        """List files that the caller may see, the youngest first."""
        query = request.query_params
        limit, ascending = _limit(request, FILES_PAGE, FILES_PAGE_MAX), _order(request) == "asc"
        caller, tenant = caller_of(request.scope), _named_tenant(request)
        listed = await shelf.of(caller, query.get("purpose"), tenant, ascending=ascending)
        return _json(show_page(listed, shelf.show, after=query.get("after"), limit=limit))

    @router.get("/v1/files/{file_id}", tags=["files"], summary="Describe a file.")
    async def retrieve_file(file_id: str, request: Request) -> dict[str, Any]:
        """Return one file's metadata."""
        return shelf.show(await shelf.find(file_id, caller_of(request.scope)))

    @router.get(
        "/v1/files/{file_id}/content",
        tags=["files"],
        summary="Read a file.",
        response_class=StreamingResponse,
        responses={200: {"description": "Its bytes.", "content": {CONTENT_TYPE: {}}}},
    )
    async def content(file_id: str, request: Request) -> StreamingResponse:
        """Return a file's content."""
        info = await shelf.find(file_id, caller_of(request.scope))
        headers = {"content-length": str(info.bytes)}
        return StreamingResponse(files.read(file_id), media_type=CONTENT_TYPE, headers=headers)

    @router.delete("/v1/files/{file_id}", tags=["files"], summary="Delete a file that no running batch reads.")
    async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
        """Delete a file."""
        caller = caller_of(request.scope)
        caller.check_write((await shelf.find(file_id, caller)).tenant, file_id)
        await view.ready()
        user = next((job for job in view.jobs() if not job.finished and job.input_file_id == file_id), None)
        if user is not None:
            raise Conflict(f"{user.id} still reads the file: cancel it first", param="file_id")
        await files.delete(file_id)
        return {"id": file_id, "object": "file", "deleted": True}


def _add_batches(
    router: APIRouter, bus: WorkBus, shelf: Shelf, view: JobView, clock: Clock, *, topics: AllowedTopics
) -> None:
    @router.post("/v1/batches", tags=["batches"], summary="Run a file of requests.", openapi_extra=BATCH_BODY)
    async def create(request: Request) -> dict[str, Any]:
        """Run a file of requests."""
        headers = dict(request.headers.raw)
        check_json(headers)
        body, now_ns = await small_body(request, MAX_BODY_BYTES), clock.now_ns()
        caller = caller_of(request.scope)
        named = read_headers(headers, caller).tenant
        tenant = named if caller.tenant or TENANT_HEADER in request.headers else ""
        created = read_request(body, topics=topics, tenant=tenant, caller=caller, now_ns=now_ns)
        key = request.headers.get(IDEMPOTENCY_HEADER)
        event = pb.JobEvent(job_id=job_id(key, shelf.bounds.home(created.tenant)), at_unix_ns=now_ns, created=created)
        await view.ready()
        if (known := view.get(event.job_id)) is not None:
            if not same_request(known.created, created):
                raise Conflict(f"{known.id} was created with this key for another request", param="body")
            return show_batch(known)
        await _check_input(shelf, created, caller)
        await shelf.bounds.check_gpu_time(created.tenant)
        await shelf.bounds.check_answer_room(shelf.files, view, created)
        with view.room(created.tenant):
            await check_topics(bus, created)
            await _publish(bus, event, repeatable=key is not None)
            view.published(event)
        return show_batch(await view.seen(event.job_id))

    @router.get("/v1/batches", tags=["batches"], summary="List batches.", openapi_extra=page_parameters())
    async def list_batches(request: Request) -> Any:
        """List batches that the caller may see, the youngest first."""
        limit, caller = _limit(request, BATCHES_PAGE, BATCHES_PAGE_MAX), caller_of(request.scope)
        await view.ready()
        gone = shelf.bounds.is_gone
        named = _named_tenant(request)
        jobs = view.jobs(
            lambda job: (
                caller.may_read(job.created.tenant)
                and named in (None, job.created.tenant or DEFAULT_TENANT)
                and not gone(job)
            )
        )
        return _json(show_page(jobs, show_batch, after=request.query_params.get("after"), limit=limit))

    @router.get("/v1/batches/{batch_id}", tags=["batches"], summary="Tell how far a batch is.")
    async def retrieve(batch_id: str, request: Request) -> dict[str, Any]:
        """Return one batch."""
        return show_batch(await _job(view, shelf, batch_id, caller_of(request.scope)))

    @router.post("/v1/batches/{batch_id}/cancel", tags=["batches"], summary="Answer no further lines of a batch.")
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        """Cancel a batch. Unanswered lines get an error with that reason."""
        caller = caller_of(request.scope)
        job = await _job(view, shelf, batch_id, caller)
        caller.check_write(job.created.tenant, job.id)
        if job.finished:
            raise Conflict(f"the batch is {job.status} already", param="batch_id")
        event = pb.JobEvent(job_id=job.id, at_unix_ns=clock.now_ns(), cancel_asked=pb.CancelAsked())
        await bus.send(BATCH_JOBS, event)
        view.published(event)
        return show_batch(job)


def _named_tenant(request: Request) -> str | None:
    """Return the tenant to which a list is restricted. The key check has verified that the caller may name it."""
    return named_in(dict(request.headers.raw), TENANT_HEADER)


async def _job(view: JobView, shelf: Shelf, batch_id: str, caller: Caller) -> Job:
    """Return a batch that the caller may see. Raise BatchNotFound."""
    job = await view.seen(batch_id)
    if not caller.may_read(job.created.tenant) or shelf.bounds.is_gone(job):
        raise BatchNotFound(f"no batch {quoted(batch_id)} is known", param="batch_id")
    return job


async def _check_input(shelf: Shelf, created: pb.Created, caller: Caller) -> None:
    """Raise FileNotFound, InvalidRequest or StoreUnavailable if the input file cannot be used."""
    if created.input_file_id:
        try:
            info = await shelf.find(created.input_file_id, caller)
        except FileNotFound as error:
            raise FileNotFound(error.message, param="input_file_id") from None
        if info.purpose not in PURPOSES:
            raise InvalidRequest(f"{info.id} was not uploaded to be a batch's input", param="input_file_id")


async def _publish(bus: WorkBus, event: pb.JobEvent, *, repeatable: bool) -> None:
    """Publish an event. Raise BrokerUnavailable, or PerhapsCreated if a retry could create a second job."""
    try:
        await bus.send(BATCH_JOBS, event)
    except BrokerUnavailable as error:
        if repeatable:
            raise
        raise PerhapsCreated(f"{error.message}: {MAY_BE_THERE}") from error


def _json(page: dict[str, Any]) -> Response:
    # A page may have 10,000 entries, for which FastAPI's encoder would block the event loop for up to a second.
    return Response(msgspec.json.encode(page), media_type="application/json")


def _limit(request: Request, default: int, maximum: int) -> int:
    text = request.query_params.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 0 < limit <= maximum:
        raise InvalidRequest(f"limit must be from 1 to {maximum}", param="limit")
    return limit


def _order(request: Request) -> str:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    return order
