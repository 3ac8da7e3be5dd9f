"""Limits on stored batch data by tenant and age.

Tenants have limits on concurrent uploads, files and their total size, lines of open batches, and GPU time. Expired
files are deleted.

Answers in Kafka are deleted once no job needs them: a job needs its answers until its files contain them. When all
unfinished jobs began after some answers, the broker deletes these answers, whatever the retention of the topic. A file
that is deleted from the store then has no copy in Kafka.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from libs.bus.work import WorkBus
from libs.contracts.errors import FileNotFound, FileTooLarge, FulcrumError, QuotaUsed, StoreFull
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.dispatch.ports import OneForAll, Tenancy
from libs.filestore.port import FileInfo, FileStore, StoreTotals
from libs.keys.book import TenantLimits
from libs.keys.table import DEFAULT_TENANT, NO_LIMITS, KeyTable
from libs.policy.gateway.places import queue_room
from libs.runtime.clock import Clock
from services.gateway.batch.job import Job
from services.gateway.batch.output import PART_PURPOSE
from services.gateway.batch.upload import FileRoom
from services.gateway.batch.view import JobView
from services.gateway.request.limits import TenantLimiter
from services.gateway.turns import FairSlots

UNBOUNDED: Final = StoreTotals(sys.maxsize, sys.maxsize)
# The maximum number of concurrent uploads to one gateway.
MAX_UPLOADS: Final = 8
MAX_UPLOADS_WAITING: Final = 64
# The maximum time that an upload waits for a slot.
UPLOAD_WAIT_S: Final = 10.0
ANSWER_FILES: Final = 2
"""The number of files that a batch writes: its answers and its errors."""
# One part in this many of the store's capacity is reserved for the answers of batches.
ANSWERS_SHARE: Final = 4


class TenantBounds:
    """The limits of tenants, from the key table. Without a table there are none."""

    def __init__(
        self,
        table: KeyTable | None = None,
        limiter: TenantLimiter | None = None,
        *,
        store: StoreTotals = UNBOUNDED,
        tenant_files: int = UNBOUNDED.files,
    ) -> None:
        """Create the limits. `store` is the capacity of the file store.

        `tenant_files` is the maximum number of files for tenants whose limits specify none.
        """
        self._table = table
        self._limiter = limiter
        self._tenants: Tenancy = OneForAll() if table is None else table
        self._store = store
        self._tenant_files = tenant_files
        self.uploads = self.slots(MAX_UPLOADS, MAX_UPLOADS_WAITING, "uploads", max_wait_s=UPLOAD_WAIT_S)

    def slots(
        self, slots: int, max_waiting: int, what: str = "batches", *, max_wait_s: float | None = None
    ) -> FairSlots:
        """Return slots that tenants share fairly. `what` names the waiting requests in error messages."""
        full = f"{what} have {slots} slots and too many wait for one, or too long: others need one too"
        return FairSlots(slots, max_waiting, full, tenants=self._tenants, max_wait_s=max_wait_s)

    def limits_of(self, tenant: str) -> TenantLimits:
        return NO_LIMITS if self._table is None else self._table.limits_of(tenant)

    def deleted_unix_ns(self, tenant: str) -> int:
        """Return the time at which the tenant was deleted, in Unix ns; 0 if it was not."""
        return 0 if self._table is None else self._table.deleted_unix_ns(tenant)

    def is_gone(self, job: Job) -> bool:
        """Return whether the job's tenant was deleted after the job was created. Such a job is treated as absent."""
        return job.created_unix_ns <= self.deleted_unix_ns(job.created.tenant)

    def home(self, tenant: str) -> str:
        """Return the name under which the tenant's files and jobs are stored."""
        return tenant if self._table is None else self._table.home(tenant)

    async def file_room(self, files: FileStore, view: JobView, tenant: str, most_bytes: int) -> FileRoom:
        """Return the size that a further file of the tenant may have.

        Raise QuotaUsed or StoreFull if there is no room at all.
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
        if limit is None and self._tenants.are_distinct:
            limit = self._tenant_files
        if limit is not None and own.files + more > limit:
            text = f"tenant {tenant} has {own.files} files, those that its batches will write included"
            raise QuotaUsed(f"{text}, of {limit} that it may have: delete some")
        if self._room(self._store.files, used.files, own.files, tenant) < more:
            text = f"the file store holds {used.files} files of {self._store.files}, {own.files} of tenant {tenant}"
            raise StoreFull(f"{text}: delete some")

    def _room(self, most: int, used: int, own: int, tenant: str) -> int:
        """Return the part of the capacity `most` that the tenant may still use.

        It leaves room for every other tenant.
        """
        if not self._tenants.are_distinct:
            return most - used
        return min(queue_room(most, used, own, self._tenants.weight(tenant)), most - used)

    async def _stored(self, files: FileStore, view: JobView, tenant: str) -> tuple[StoreTotals, StoreTotals]:
        """Return the totals of the tenant and of all tenants. They include files that unfinished batches will write."""
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
        """Return the number of lines that a job may have besides the tenant's other open jobs, and the bound's name for
        errors.
        """
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
        """Raise RateLimited if the tenant has used up its GPU time for today."""
        if self._limiter is not None:
            await self._limiter.check_gpu_time(tenant)


def _files_to_come(job: Job) -> int:
    """Return the number of files that an unfinished batch may still write, including a copy of its topic."""
    return ANSWER_FILES + bool(job.created.input_topic and job.started is None)


log = structlog.get_logger()

# The interval between deletions of expired files and unneeded answers.
LOOK_S: Final = 60.0
# The minimum age of a recorded topic end up to which answers are deleted. After that time, this gateway has read of all
# jobs that began before it.
SETTLED_S: Final = 600.0
DAY_S: Final = 86_400


def expiry_unix_s(info: FileInfo, limits: TenantLimits) -> int | None:
    """Return the Unix time at which a file expires, by the upload's request or its tenant's limit, or None if it never
    does.
    """
    own = [info.expires_unix_s] if info.expires_unix_s else []
    bound = [info.created_unix_s + limits.file_days * DAY_S] if limits.file_days is not None else []
    return min([*own, *bound], default=None)


def is_over(info: FileInfo, limits: TenantLimits, now_s: float, deleted_unix_ns: int = 0) -> bool:
    """Return whether a file is treated as absent. `deleted_unix_ns` is the time of its tenant's deletion, or 0."""
    ends = expiry_unix_s(info, limits)
    made_ns = info.created_unix_ns or info.created_unix_s * 1_000_000_000
    return made_ns <= deleted_unix_ns or (ends is not None and now_s >= ends)


def unneeded(settled: Sequence[int], unfinished: Iterable[Job]) -> list[int]:
    """Return the offset in each partition below which no unfinished job needs answers.

    `settled` contains the topic's ends at an earlier time. `unfinished` must include every unfinished job that began
    before that time.
    """
    before = list(settled)
    for job in unfinished:
        if job.started is not None:
            before = [min(pair) for pair in zip(before, job.started.results_since, strict=False)]
    return before


class Retention:
    # Several gateways may do the same work at once without harm.

    def __init__(
        self,
        work: WorkBus,
        files: FileStore,
        view: JobView,
        clock: Clock,
        bounds: TenantBounds,
    ) -> None:
        self._work = work
        self._files = files
        self._view = view
        self._clock = clock
        self._bounds = bounds
        self._ends: deque[tuple[float, list[int]]] = deque(maxlen=int(SETTLED_S / LOOK_S) + 2)
        """The ends of the results topic, with the time in s at which each was read."""
        self._trimmed: list[int] = []

    async def run(self) -> None:
        await self._view.replayed.wait()
        while True:
            for look in (self.forget, self.expire, self.trim):
                try:
                    await look()
                except FulcrumError as error:
                    log.warning("expired files could not be deleted yet", error=error.message)
            await asyncio.sleep(LOOK_S)

    async def forget(self) -> None:
        """Cancel the unfinished batches of deleted tenants and delete the files of finished ones.

        Raise BrokerUnavailable.
        """
        gone = [job for job in self._view.jobs() if self._bounds.is_gone(job)]
        there = {info.id for info in await self._files.infos()} if gone else set[str]()
        for job in gone:
            if job.finished is None:
                if not job.cancel_unix_ns:
                    event = pb.JobEvent(job_id=job.id, at_unix_ns=self._clock.now_ns(), cancel_asked=pb.CancelAsked())
                    await self._work.send(BATCH_JOBS, event)
                    self._view.published(event)
                continue
            for file_id in there.intersection((job.finished.output_file_id, job.finished.error_file_id)):
                with suppress(FileNotFound):
                    await self._files.delete(file_id)
                    log.info("deleted a file of a deleted tenant", file=file_id, tenant=job.created.tenant)

    async def expire(self) -> None:
        """Delete expired files, except those that an unfinished job reads."""
        read = {job.input_file_id for job in self._view.unfinished()}
        now_s = self._now_s
        for info in await self._files.infos():
            bounds, tenant = self._bounds, info.tenant
            over = is_over(info, bounds.limits_of(tenant), now_s, bounds.deleted_unix_ns(tenant))
            if over and info.purpose != PART_PURPOSE and info.id not in read:
                with suppress(FileNotFound):
                    await self._files.delete(info.id)
                log.info("a file has expired", file=info.id, tenant=info.tenant)

    async def trim(self) -> None:
        """Make the broker delete the answers that no job needs. Raise BrokerUnavailable."""
        now_s = self._now_s
        self._ends.append((now_s, await self._work.ends(BATCH_RESULTS)))
        settled = next((ends for at_s, ends in reversed(self._ends) if now_s - at_s >= SETTLED_S), None)
        if settled is None:
            return
        before = unneeded(settled, self._view.unfinished())
        if any(before) and before != self._trimmed:
            await self._work.trim(BATCH_RESULTS, before)
            self._trimmed = before

    @property
    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9
