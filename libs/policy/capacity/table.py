"""How much work pools of workers take while the SLO holds, as the lab measured it, and its inverse. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

MOST_WORKERS: Final = 100_000
"""Of a pool: more are no plan."""


@dataclass(frozen=True, slots=True)
class PoolTable:
    """Capacity of one phase: the most work, in workers that would be busy all the time, that each number of workers
    takes."""

    workers: tuple[int, ...]
    """Growing."""
    work: tuple[float, ...]
    """Never shrinking."""

    def most_work(self, workers: float) -> float:
        """Between measured numbers on a line, beyond the last as each of those takes."""
        if workers <= 0:
            return 0.0
        below, under = 0, 0.0
        for count, work in zip(self.workers, self.work, strict=True):
            if workers <= count:
                return under + (work - under) * (workers - below) / (count - below)
            below, under = count, work
        return under / below * workers if below else 0.0

    def workers_for(self, work: float) -> int:
        """The fewest that take so much; `MOST_WORKERS` where nothing does."""
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
