"""Files and batches in the form of OpenAI's API. Pure."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol, TypeVar

from libs.contracts.errors import InvalidRequest, quoted
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.filestore.port import FileInfo
from libs.keys.book import TenantLimits
from libs.keys.table import NO_LIMITS
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.retention import expiry_unix_s


def show_file(info: FileInfo, limits: TenantLimits = NO_LIMITS) -> dict[str, Any]:
    """Return OpenAI's file object. `limits` are those of the file's tenant."""
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
    """Return OpenAI's list object with at most `limit` items after `after`, consuming no more of `items`.

    Raise InvalidRequest for an unknown id.
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
    """Return Fulcrum's own fields, which OpenAI's object does not have."""
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
