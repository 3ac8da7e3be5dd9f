"""The work that pools of workers can take while the SLO holds, as measured in the lab, and its inverse."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

MOST_WORKERS: Final = 100_000
"""The most workers of a pool that a plan or a limit may contain; a message with more is malformed."""


@dataclass(frozen=True, slots=True)
class PoolTable:
    """The capacity of one phase: the most work for each number of workers, in permanently busy workers."""

    workers: tuple[int, ...]
    """Worker counts in strictly increasing order."""
    work: tuple[float, ...]
    """The most work for each count, never decreasing."""

    def most_work(self, workers: float) -> float:
        """Return the most work, interpolated between measured counts and proportional beyond the last."""
        if workers <= 0:
            return 0.0
        below, under = 0, 0.0
        for count, work in zip(self.workers, self.work, strict=True):
            if workers <= count:
                return under + (work - under) * (workers - below) / (count - below)
            below, under = count, work
        return under / below * workers if below else 0.0

    def workers_for(self, work: float) -> int:
        """Return the fewest workers that can take this work; `MOST_WORKERS` if none can."""
        if not work > 0:
            return 0
        if work == inf or not self.work or self.work[-1] <= 0:
            return MOST_WORKERS
        low, high = 0, 1
        while self.most_work(high) < work and high < MOST_WORKERS:
            low, high = high, min(high * 2, MOST_WORKERS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.most_work(middle) >= work else (middle, high)
        return high


def make_table(measured: Sequence[tuple[int, float]]) -> PoolTable:
    """From (workers, most work): more workers never take less, and none takes more than its own time."""
    ordered = sorted(measured)
    work, most = [], 0.0
    for count, found in ordered:
        most = max(most, min(found, float(count)))
        work.append(most)
    return PoolTable(tuple(count for count, _ in ordered), tuple(work))
