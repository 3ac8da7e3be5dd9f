"""What a tenant may have of batch: bytes of files, lines of open batches, GPU time."""

from typing import Final

from libs.contracts.errors import QuotaUsed
from libs.filestore.port import FileInfo, FileStore
from libs.keys.book import TenantLimits
from libs.keys.table import NO_LIMITS, KeyTable
from services.gateway.batch.jobs.job import Job
from services.gateway.batch.jobs.view import JobView
from services.gateway.dispatch.tenant_limits import TenantLimiter


class TenantBounds:
    """By the limits of the book of keys; without one nobody has any."""

    def __init__(self, table: KeyTable | None = None, limiter: TenantLimiter | None = None) -> None:
        self._table = table
        self._limiter = limiter

    def limits_of(self, tenant: str) -> TenantLimits:
        """Those of a tenant."""
        return NO_LIMITS if self._table is None else self._table.limits_of(tenant)

    def deleted_unix_ns(self, tenant: str) -> int:
        """When the tenant was deleted; 0: never."""
        return 0 if self._table is None else self._table.deleted_unix_ns(tenant)

    def is_gone(self, job: Job) -> bool:
        """Whether the job's tenant was deleted after it was made: it counts as one that is not there."""
        return job.created_unix_ns <= self.deleted_unix_ns(job.created.tenant)

    def home(self, tenant: str) -> str:
        """The name under which the tenant's things are kept."""
        return tenant if self._table is None else self._table.home(tenant)

    async def file_room(self, files: FileStore, tenant: str, most_bytes: int) -> int:
        """How large another file of the tenant's may be. Raises QuotaUsed where there is no room for any."""
        limit = self.limits_of(tenant).stored_bytes
        if limit is None:
            return most_bytes
        left = limit - stored_bytes(await files.infos(), tenant)
        if left <= 0:
            raise QuotaUsed(f"the files of tenant {tenant} have {limit} bytes, which is its limit: delete some")
        return min(left, most_bytes)

    def line_room(self, view: JobView, tenant: str, job_id: str, most_lines: int) -> tuple[int, str]:
        """How many lines a job of the tenant's may have beside its other open ones, and whose bound that is."""
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
        """Raises RateLimited where the tenant has used its GPU-seconds of today."""
        if self._limiter is not None:
            await self._limiter.check_gpu_time(tenant)


def stored_bytes(infos: list[FileInfo], tenant: str) -> int:
    """Bytes of one tenant's files."""
    return sum(info.bytes for info in infos if info.tenant == tenant)


UNBOUNDED: Final = TenantBounds()
