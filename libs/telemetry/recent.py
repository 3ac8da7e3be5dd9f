"""Pairs of rising counters over the last day."""

from collections import deque
from collections.abc import Iterable
from typing import Final

RECENT_NS: Final = 86_400_000_000_000
"""The span of recent counts, which covers the hours of a day as the lengths of a plan's requests do."""
SAMPLE_NS: Final = 3_600_000_000_000
"""The distance of samples, so that a pair holds at most 27."""


class RecentCounts:
    """Samples of two counters of one process. A counter that falls belongs to a new process."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int]] = deque()

    def add(self, now_ns: int, first: int, second: int) -> None:
        samples = self._samples
        if samples and (first < samples[-1][1] or second < samples[-1][2]):
            samples.clear()
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < SAMPLE_NS:
            samples.pop()
        samples.append((now_ns, first, second))
        while len(samples) > 1 and samples[1][0] <= now_ns - RECENT_NS:
            samples.popleft()

    def rise(self, now_ns: int) -> tuple[int, int]:
        """Return the rise of both counters within the span; 0 if they have not been sampled in it."""
        if not self._samples or self._samples[-1][0] <= now_ns - RECENT_NS:
            return 0, 0
        (_, *low), (_, *high) = self._samples[0], self._samples[-1]
        return high[0] - low[0], high[1] - low[1]

    def total(self) -> tuple[int, int]:
        """Return both counters as of the last sample."""
        return self._samples[-1][1:] if self._samples else (0, 0)


def recent_sums(counts: Iterable[RecentCounts], now_ns: int) -> tuple[int, int]:
    """Sum the rises of many processes. Sum their totals instead if the first counter did not rise in any of them."""
    found = list(counts)
    for pairs in ([each.rise(now_ns) for each in found], [each.total() for each in found]):
        sums = sum(first for first, _ in pairs), sum(second for _, second in pairs)
        if sums[0]:
            return sums
    return 0, 0
