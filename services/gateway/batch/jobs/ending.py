"""Predict when jobs will end from their recent pace, and decide which predictions to publish. Pure."""

from collections import deque
from collections.abc import Iterable

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Foretold
from libs.policy.batch import OpenJob, queues_of

WINDOW_S = 60.0
MIN_S = 2.0
"""Time with work before a rate is reported."""
MARGIN = 0.05
"""Share of the remaining time. A job becomes late when its end lies this far beyond its window, and stops being late
when its end lies this far within it."""
MOVED = 0.2
"""A predicted end is published again when it moved by more than this share of the remaining time."""


class LineRate:
    """Lines answered per second over the last minute; time without work does not count."""

    def __init__(self) -> None:
        self._answered: deque[tuple[int, int]] = deque()
        self._lines = 0
        self._since_ns = 0

    def work_begins(self, at_ns: int) -> None:
        """Restart the measurement: until now there was no work."""
        self._answered.clear()
        self._lines, self._since_ns = 0, at_ns

    def add(self, at_ns: int, lines: int) -> None:
        self._answered.append((at_ns, lines))
        self._lines += lines
        self._drop(at_ns)

    def per_s(self, now_ns: int) -> float | None:
        """The rate; None in the first `MIN_S` of work."""
        self._drop(now_ns)
        since_ns = max(self._since_ns, now_ns - int(WINDOW_S * 1e9))
        seconds = (now_ns - since_ns) / 1e9
        return self._lines / seconds if self._since_ns and seconds >= MIN_S else None

    def _drop(self, now_ns: int) -> None:
        oldest_ns = now_ns - int(WINDOW_S * 1e9)
        while self._answered and self._answered[0][0] < oldest_ns:
            self._lines -= self._answered.popleft()[1]


def ends_s(jobs: Iterable[OpenJob], now_ns: int, per_s: float) -> dict[str, float]:
    """Seconds from now until each job ends, assuming tenants get equal shares and run one job after the other.

    Leaves out jobs that never end at this pace.
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


def news(job: OpenJob, known: Foretold | None, end_s: float | None, now_ns: int) -> Foretold | None:
    """The prediction to publish for a job; None where it hardly differs from the published one, `known`."""
    left_s = max((job.expires_unix_ns - now_ns) / 1e9, 0.0)
    was_late = known is not None and known.late
    late = end_s is None or end_s > left_s * (1 - MARGIN if was_late else 1 + MARGIN)
    end_unix_ns = 0 if end_s is None else now_ns + int(end_s * 1e9)
    if known is not None and late == was_late and bool(known.end_unix_ns) == bool(end_unix_ns):
        moved_s = abs(end_unix_ns - known.end_unix_ns) / 1e9
        if end_s is None or moved_s <= max(MOVED * end_s, MIN_S):
            return None
    return Foretold(end_unix_ns=end_unix_ns, late=late)
