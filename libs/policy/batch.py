"""The division of a cluster between batch jobs: the jobs whose shares are dealt to runners next, and the capacity that
their lines may use.

Shares are dealt evenly by tenant, and within a tenant by priority and window. At most half a minute's work is dealt
ahead, which is the longest wait of a later job. `MAX_OPEN_LINES` limits it too, so that the unread messages in the
broker do not grow with the number of jobs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SHARE_LINES = 256
"""The lines of one share: the record of its answered lines must fit into the metadata of an offset."""
MAX_OPEN_LINES = 16 * SHARE_LINES
"""The maximum number of dealt but unanswered lines of all jobs: two shares for each partition."""
LEAST_OPEN_LINES = 4 * SHARE_LINES
"""The lower bound of lines dealt ahead, for a slow cluster or one whose rate is unknown."""
AHEAD_S = 30.0
"""The seconds of work dealt ahead, within the two bounds; runners are dealt more long before they finish."""
# The number of lines in flight even if workers show no room, so that the demand for more capacity stays visible.
LOOK_AHEAD = 4
MAX_LINES_WAITING = 32
"""The maximum number of batch lines in the gateway's queue.

It is enough for one round of binding. No more lines are read while workers accept none.
"""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job with known length whose lines are not all answered."""

    job_id: str
    tenant: str
    priority: int
    created_unix_ns: int
    expires_unix_ns: int
    open_lines: int
    """The lines that are dealt but not answered."""
    undealt_lines: int
    """The lines not dealt yet; 0 for a stopped job, whose keeper answers them itself."""
    stopped: bool = False
    """True if the job was cancelled or its window has ended, so that its lines cost no capacity."""

    @property
    def left_lines(self) -> int:
        return self.open_lines + self.undealt_lines


def room_for(per_s: float | None) -> int:
    """Return the number of lines that may be unanswered at `per_s` answers per second (None if unknown)."""
    return int(min(max((per_s or 0.0) * AHEAD_S, LEAST_OPEN_LINES), MAX_OPEN_LINES))


def deal(jobs: Iterable[OpenJob], now_ns: int, per_s: float | None) -> list[str]:
    """Return the ids of the jobs whose shares are dealt next, in order; a job appears once per share.

    `per_s` is the number of lines the cluster answers per second, None if unknown.
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
    """Return each tenant's jobs in the order they are served.

    They are sorted by priority, then by the end of their window. Jobs that could not finish in time even alone come
    after the feasible jobs of their priority.
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
    """Return whether the job would miss its window even with the whole cluster's capacity."""
    return per_s is not None and job.left_lines * 1e9 > per_s * max(job.expires_unix_ns - now_ns, 0)


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """A gateway's view of its workers' load at one moment."""

    free: int
    """The number of sequences that could be bound now."""
    bound: int
    """The number of bound sequences, interactive and batch."""
    people_waiting: int
    """The queued requests that are not batch lines."""
    lines_waiting: int


def allowed(load: GatewayLoad, share: float, max_in_flight: int) -> int:
    """Return how many batch lines may be in flight.

    None may be added while interactive requests wait. Otherwise the number leaves room for an interactive request,
    but is never below a few lines that wait for workers.
    """
    if load.people_waiting or load.lines_waiting >= MAX_LINES_WAITING:
        return 0
    return min(max_in_flight, max(int(share * (load.free + load.bound)), LOOK_AHEAD))
