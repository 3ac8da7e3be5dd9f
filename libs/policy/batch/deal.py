"""Which job's next share is dealt to runners: tenants alike, within a tenant by priority and window. Pure.

No more are out at a time than half a minute's work, so that a job that comes later waits behind these and no others,
and no more than MAX_OPEN_LINES, so that what the broker holds unread does not grow with jobs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SHARE_LINES = 256
"""Lines of a share: few enough that the answered ones of it fit into the note of an offset."""
MAX_OPEN_LINES = 16 * SHARE_LINES
"""Lines dealt and not answered, of all jobs: two shares for each partition of them."""
LEAST_OPEN_LINES = 4 * SHARE_LINES
"""However slow the cluster is, and as long as its pace is not known."""
AHEAD_S = 30.0
"""Work dealt ahead, between the two bounds: runners get more long before they have done it."""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that has been counted and is not answered yet."""

    job_id: str
    tenant: str
    priority: int
    created_unix_ns: int
    expires_unix_ns: int
    open_lines: int
    """Dealt, not answered."""
    undealt_lines: int
    """None of a job that is stopped: its keeper answers them."""
    stopped: bool = False
    """Cancelled, or its window has ended: its lines cost no capacity."""

    @property
    def left_lines(self) -> int:
        """Not answered."""
        return self.open_lines + self.undealt_lines


def room_for(per_s: float | None) -> int:
    """Lines that may be dealt and unanswered at a rate of `per_s` answers per second; None: unknown."""
    return int(min(max((per_s or 0.0) * AHEAD_S, LEAST_OPEN_LINES), MAX_OPEN_LINES))


def deal(jobs: Iterable[OpenJob], now_ns: int, per_s: float | None) -> list[str]:
    """Ids of jobs in the order in which their next shares are dealt now; one that gets several is there several times.

    `per_s`: lines that the cluster answers a second, None where that is not known.
    """
    queues, room = queues_of(jobs, now_ns, per_s), room_for(per_s)
    open_lines: Counter[str] = Counter()
    undealt: dict[str, int] = {}
    for tenant, queue in queues.items():
        open_lines[tenant] = sum(job.open_lines for job in queue)
        undealt.update({job.job_id: job.undealt_lines for job in queue})
    waiting = {tenant: deque(job for job in queue if job.undealt_lines) for tenant, queue in queues.items()}
    waiting = {tenant: queue for tenant, queue in waiting.items() if queue}
    turns: list[str] = []
    while waiting and open_lines.total() < room:
        tenant = min(waiting, key=lambda name: (open_lines[name], name))
        job = waiting[tenant][0]
        lines = min(SHARE_LINES, undealt[job.job_id])
        turns.append(job.job_id)
        open_lines[tenant] += lines
        undealt[job.job_id] -= lines
        if not undealt[job.job_id]:
            waiting[tenant].popleft()
            if not waiting[tenant]:
                del waiting[tenant]
    return turns


def queues_of(jobs: Iterable[OpenJob], now_ns: int, per_s: float | None) -> Mapping[str, list[OpenJob]]:
    """Each tenant's jobs, the first one first.

    By priority, then by window; jobs that could not make theirs even alone come after those of their priority that can.
    """
    queues: dict[str, list[OpenJob]] = {}
    for job in jobs:
        queues.setdefault(job.tenant, []).append(job)
    for queue in queues.values():
        queue.sort(
            key=lambda job: (
                not job.stopped,
                -job.priority,
                is_hopeless(job, now_ns, per_s),
                job.expires_unix_ns,
                job.created_unix_ns,
                job.job_id,
            )
        )
    return queues


def is_hopeless(job: OpenJob, now_ns: int, per_s: float | None) -> bool:
    """Whether all capacity there is would not bring it to its end within its window."""
    return per_s is not None and job.left_lines * 1e9 > per_s * max(job.expires_unix_ns - now_ns, 0)
