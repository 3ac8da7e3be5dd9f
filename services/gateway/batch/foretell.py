"""When jobs will have ended, by the pace of late, and whether that is worth telling. Pure."""

from collections import deque
from collections.abc import Iterable

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Foretold
from libs.policy.batch.deal import Standing, queues_of

WINDOW_S = 60.0
MIN_S = 2.0
"""Of work, before it says anything about pace."""
MARGIN = 0.05
"""Of the time that is left: so much beyond its window a job is late, so much within it is not any more."""
MOVED = 0.2
"""Of the time that is left: by so much another end is news."""


class LineRate:
    """Lines answered a second over the last minute, of which only time with work counts."""

    def __init__(self) -> None:
        self._answered: deque[tuple[int, int]] = deque()
        self._lines = 0
        self._since_ns = 0

    def work_begins(self, at_ns: int) -> None:
        """There was none before."""
        self._answered.clear()
        self._lines, self._since_ns = 0, at_ns

    def add(self, at_ns: int, lines: int) -> None:
        """So many were answered."""
        self._answered.append((at_ns, lines))
        self._lines += lines
        self._drop(at_ns)

    def per_s(self, now_ns: int) -> float | None:
        """None: too little is known."""
        self._drop(now_ns)
        since_ns = max(self._since_ns, now_ns - int(WINDOW_S * 1e9))
        seconds = (now_ns - since_ns) / 1e9
        return self._lines / seconds if self._since_ns and seconds >= MIN_S else None

    def _drop(self, now_ns: int) -> None:
        oldest_ns = now_ns - int(WINDOW_S * 1e9)
        while self._answered and self._answered[0][0] < oldest_ns:
            self._lines -= self._answered.popleft()[1]


def ends_s(jobs: Iterable[Standing], now_ns: int, per_s: float) -> dict[str, float]:
    """Seconds from now until each job ends, if tenants share alike and each works on one job after the other.

    Jobs that never end at this pace are not in it.
    """
    found: dict[str, float] = {}
    if per_s <= 0:
        return found
    queues = [deque((job.job_id, float(job.left_lines)) for job in q) for q in queues_of(jobs, now_ns, per_s).values()]
    passed_s = 0.0
    while queues := [queue for queue in queues if queue]:
        each_per_s = per_s / len(queues)
        lines = min(queue[0][1] for queue in queues)
        passed_s += lines / each_per_s
        for queue in queues:
            job_id, left = queue.popleft()
            if left > lines:
                queue.appendleft((job_id, left - lines))
            else:
                found[job_id] = passed_s
    return found


def news(job: Standing, known: Foretold | None, end_s: float | None, now_ns: int) -> Foretold | None:
    """What is to be told of a job's end; None: nothing new."""
    left_s = max((job.expires_unix_ns - now_ns) / 1e9, 0.0)
    was_late = known is not None and known.late
    late = end_s is None or end_s > left_s * (1 - MARGIN if was_late else 1 + MARGIN)
    end_unix_ns = 0 if end_s is None else now_ns + int(end_s * 1e9)
    if known is not None and late == was_late and bool(known.end_unix_ns) == bool(end_unix_ns):
        moved_s = abs(end_unix_ns - known.end_unix_ns) / 1e9
        if end_s is None or moved_s <= max(MOVED * end_s, MIN_S):
            return None
    return Foretold(end_unix_ns=end_unix_ns, late=late)
