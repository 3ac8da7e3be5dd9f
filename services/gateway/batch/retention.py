"""Deletes expired files, and answers in Kafka that no job needs any more.

A job's answers are needed in their topic until its files hold them. Once no unfinished job began before some
answers, the broker deletes them, whatever the topic's own retention. A file deleted from the store then leaves no
copy there.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from libs.bus.work import WorkBus
from libs.contracts.errors import FileNotFound, FulcrumError
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS
from libs.filestore.port import FileInfo, FileStore
from libs.keys.book import TenantLimits
from libs.runtime.clock import Clock
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.jobs.view import JobView
from services.gateway.batch.lines.parts import PART_PURPOSE
from services.gateway.batch.tenant_bounds import TenantBounds

log = structlog.get_logger()

# Interval between checks of files and answers.
LOOK_S: Final = 60.0
# An end of the topic has to be this old before anything below it is deleted. By then every gateway's jobs that
# began before it are known here.
SETTLED_S: Final = 600.0
DAY_S: Final = 86_400


def expiry_unix_s(info: FileInfo, limits: TenantLimits) -> int | None:
    """Return when a file expires, by its owner's request or its tenant's limit; None for never."""
    own = [info.expires_unix_s] if info.expires_unix_s else []
    bound = [info.created_unix_s + limits.file_days * DAY_S] if limits.file_days is not None else []
    return min([*own, *bound], default=None)


def is_over(info: FileInfo, limits: TenantLimits, now_s: float, deleted_unix_ns: int = 0) -> bool:
    """Return whether a file counts as absent. `deleted_unix_ns` is when its tenant was deleted; 0 for never."""
    ends = expiry_unix_s(info, limits)
    made_ns = info.created_unix_ns or info.created_unix_s * 1_000_000_000
    return made_ns <= deleted_unix_ns or (ends is not None and now_s >= ends)


def unneeded(settled: Sequence[int], unfinished: Iterable[Job]) -> list[int]:
    """Return the offset of each partition below which no unfinished job needs answers.

    `settled` holds ends of the topic as of some time. Every job that began before then is in `unfinished` or has
    ended.
    """
    before = list(settled)
    for job in unfinished:
        if job.started is not None:
            before = [min(pair) for pair in zip(before, job.started.results_since, strict=False)]
    return before


class Retention:
    # Several gateways may do the same work without harm.

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
        """The ends of the answers' topic, with the times at which they were read."""
        self._trimmed: list[int] = []

    async def run(self) -> None:
        await self._view.replayed.wait()
        while True:
            for look in (self.forget, self.expire, self.trim):
                try:
                    await look()
                except FulcrumError as error:
                    log.warning("what is over stays for now", error=error.message)
            await asyncio.sleep(LOOK_S)

    async def forget(self) -> None:
        """Cancel the batches of deleted tenants and delete their files. Raise BrokerUnavailable."""
        gone = [job for job in self._view.jobs() if self._bounds.is_gone(job)]
        there = {info.id for info in await self._files.infos()} if gone else set[str]()
        for job in gone:
            if job.finished is None:
                if not job.cancel_unix_ns:
                    asked = pb.JobEvent(job_id=job.id, at_unix_ns=self._clock.now_ns(), cancel_asked=pb.CancelAsked())
                    await self._work.send(BATCH_JOBS, asked)
                    self._view.published(asked)
                continue
            for file_id in there.intersection((job.finished.output_file_id, job.finished.error_file_id)):
                with suppress(FileNotFound):
                    await self._files.delete(file_id)
                    log.info("a file of a deleted tenant is gone", file=file_id, tenant=job.created.tenant)

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
                log.info("a file's time is over", file=info.id, tenant=info.tenant)

    async def trim(self) -> None:
        """Have the broker delete answers that no job needs. Raise BrokerUnavailable."""
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
