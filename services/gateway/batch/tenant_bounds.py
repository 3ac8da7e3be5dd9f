"""Tenants' bounds on batch: concurrent uploads, files and their bytes, lines of open batches, GPU time."""

import sys
from typing import Final

from libs.contracts.errors import FileTooLarge, QuotaUsed, StoreFull
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.dispatch.fair_slots import FairSlots
from libs.dispatch.ports import OneForAll, Tenancy
from libs.filestore.port import FileStore, StoreTotals
from libs.keys.book import TenantLimits
from libs.keys.table import DEFAULT_TENANT, NO_LIMITS, KeyTable
from libs.policy.gateway.places import queue_room
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.jobs.view import JobView
from services.gateway.batch.lines.upload import FileRoom
from services.gateway.dispatch.tenant_limits import TenantLimiter

UNBOUNDED: Final = StoreTotals(sys.maxsize, sys.maxsize)
# Concurrent uploads to one gateway.
MAX_UPLOADS: Final = 8
MAX_UPLOADS_WAITING: Final = 64
# Bound on an upload's wait for its turn.
UPLOAD_WAIT_S: Final = 10.0
ANSWER_FILES: Final = 2
"""The files that a batch writes: its answers and its errors."""
# One part in this many of the store's bytes is reserved for answers of batches.
ANSWERS_SHARE: Final = 4


class TenantBounds:
    """The bounds set by the keys' limits; without keys there are none."""

    def __init__(
        self,
        table: KeyTable | None = None,
        limiter: TenantLimiter | None = None,
        *,
        store: StoreTotals = UNBOUNDED,
        tenant_files: int = UNBOUNDED.files,
    ) -> None:
        """`store` is the file store's capacity. `tenant_files` bounds a tenant's files if its key sets no limit."""
        self._table = table
        self._limiter = limiter
        self._tenants: Tenancy = OneForAll() if table is None else table
        self._store = store
        self._tenant_files = tenant_files
        self.uploads = self.slots(MAX_UPLOADS, MAX_UPLOADS_WAITING, "uploads", max_wait_s=UPLOAD_WAIT_S)

    def slots(
        self, slots: int, max_waiting: int, what: str = "batches", *, max_wait_s: float | None = None
    ) -> FairSlots:
        """Return slots that tenants share. `what` names the things of which too many wait, for errors."""
        full = f"{what} have {slots} slots and too many wait for one, or too long: others need one too"
        return FairSlots(slots, max_waiting, full, tenants=self._tenants, max_wait_s=max_wait_s)

    def limits_of(self, tenant: str) -> TenantLimits:
        return NO_LIMITS if self._table is None else self._table.limits_of(tenant)

    def deleted_unix_ns(self, tenant: str) -> int:
        """Return when the tenant was deleted; 0 for never."""
        return 0 if self._table is None else self._table.deleted_unix_ns(tenant)

    def is_gone(self, job: Job) -> bool:
        """Return whether the job's tenant was deleted after the job was created, so that it counts as absent."""
        return job.created_unix_ns <= self.deleted_unix_ns(job.created.tenant)

    def home(self, tenant: str) -> str:
        """Return the name under which the tenant's files and jobs are kept."""
        return tenant if self._table is None else self._table.home(tenant)

    async def file_room(self, files: FileStore, view: JobView, tenant: str, most_bytes: int) -> FileRoom:
        """Return how large another file of the tenant may be. Raise QuotaUsed or StoreFull if there is no room for
        any.
        """
        own, used = await self._stored(files, view, tenant)
        self._check_count(own, used, tenant, 1)
        limit = self.limits_of(tenant).stored_bytes
        left = most_bytes if limit is None else limit - own.bytes
        if left <= 0:
            raise QuotaUsed(f"the files of tenant {tenant} have {limit} bytes, which is its limit: delete some")
        most = self._store.bytes - self._store.bytes // ANSWERS_SHARE
        room = self._room(most, used.bytes, own.bytes, tenant)
        full = StoreFull(f"the file store has {max(room, 0)} bytes left for files of tenant {tenant}: delete some")
        if room <= 0:
            raise full
        if room < min(left, most_bytes):
            return FileRoom(room, full)
        text = "the file is larger than the room that its tenant has left"
        return FileRoom(min(left, most_bytes), FileTooLarge(text, param="file"))

    async def check_answer_room(self, files: FileStore, view: JobView, created: pb.Created) -> None:
        """Raise QuotaUsed or StoreFull if there may be no room for another batch's answers when it ends."""
        tenant = created.tenant or DEFAULT_TENANT
        own, used = await self._stored(files, view, tenant)
        self._check_count(own, used, tenant, ANSWER_FILES + bool(created.input_topic))
        if used.bytes >= self._store.bytes:
            raise StoreFull("the file store has no room for the batch's answers: delete some files")

    def _check_count(self, own: StoreTotals, used: StoreTotals, tenant: str, more: int) -> None:
        limit = self.limits_of(tenant).files
        if limit is None and self._tenants.told_apart:
            limit = self._tenant_files
        if limit is not None and own.files + more > limit:
            text = f"tenant {tenant} has {own.files} files, those that its batches will write included"
            raise QuotaUsed(f"{text}, of {limit} that it may have: delete some")
        if self._room(self._store.files, used.files, own.files, tenant) < more:
            text = f"the file store holds {used.files} files of {self._store.files}, {own.files} of tenant {tenant}"
            raise StoreFull(f"{text}: delete some")

    def _room(self, most: int, used: int, own: int, tenant: str) -> int:
        """Return how much more of the store's capacity `most` a tenant may take, leaving some to every other tenant."""
        if not self._tenants.told_apart:
            return most - used
        return min(queue_room(most, used, own, self._tenants.weight(tenant)), most - used)

    async def _stored(self, files: FileStore, view: JobView, tenant: str) -> tuple[StoreTotals, StoreTotals]:
        """Return what the tenant and what all tenants store, including files that unfinished batches will write."""
        found = await files.of(tenant)
        if tenant == DEFAULT_TENANT:
            found += await files.of("")
        used, unfinished = await files.stored(), view.unfinished()
        own = sum(_files_to_come(job) for job in unfinished if (job.created.tenant or DEFAULT_TENANT) == tenant)
        return (
            StoreTotals(len(found) + own, sum(info.bytes for info in found)),
            StoreTotals(used.files + sum(map(_files_to_come, unfinished)), used.bytes),
        )

    def line_room(self, view: JobView, tenant: str, job_id: str, most_lines: int) -> tuple[int, str]:
        """Return how many lines a job of the tenant may have besides its other open jobs, and whose bound applies."""
        limit = self.limits_of(tenant).batch_lines
        if limit is None:
            return most_lines, "a batch may have"
        others = sum(
            job.lines - job.completed - job.failed
            for job in view.unfinished()
            if job.created.tenant == tenant and job.id != job_id
        )
        left = max(limit - others, 0)
        if left >= most_lines:
            return most_lines, "a batch may have"
        return left, f"are left of the {limit} that tenant {tenant} may have open in its batches"

    async def check_gpu_time(self, tenant: str) -> None:
        """Raise RateLimited if the tenant has used up today's GPU-seconds."""
        if self._limiter is not None:
            await self._limiter.check_gpu_time(tenant)


def _files_to_come(job: Job) -> int:
    """Return the number of files that an unfinished batch may still write, including a topic's copy."""
    return ANSWER_FILES + bool(job.created.input_topic and job.started is None)
