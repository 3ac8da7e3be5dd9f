"""Sets of integers kept as disjoint half-open intervals, for covered time and received batch numbers."""

from array import array
from bisect import bisect_left, bisect_right


class Intervals:
    """A union of half-open intervals [start, end) of int64. Touching ones merge, so a steady stream stays one entry."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, point: int) -> bool:
        index = bisect_right(self._starts, point) - 1
        return index >= 0 and point < self._ends[index]

    @property
    def start(self) -> int:
        """Start of the first interval; 0 where there is none."""
        return self._starts[0] if self._starts else 0

    def add(self, start: int, end: int) -> None:
        """Unite with [start, end); an empty interval changes nothing."""
        if end <= start:
            return
        if self._ends and self._starts[-1] <= start <= self._ends[-1]:  # the usual case of a steady stream
            self._ends[-1] = max(end, self._ends[-1])
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = array("q", (start,))
        self._ends[first:last] = array("q", (end,))

    def within(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts inside [low, high), in order."""
        first = bisect_right(self._ends, low)
        last = bisect_left(self._starts, high)
        if first >= last:
            return []
        if last == first + 1:  # the usual case, as a steady stream is one interval
            return [(max(low, self._starts[first]), min(high, self._ends[first]))]
        return [
            (max(low, start), min(high, end))
            for start, end in zip(self._starts[first:last], self._ends[first:last], strict=True)
        ]

    def within_each(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts inside spans, which must be disjoint and in order."""
        return [part for span in spans for part in self.within(*span)]

    def reach(self, point: int) -> int:
        """Return the end of the interval that holds or touches `point`, or else `point` itself."""
        index = bisect_right(self._starts, point) - 1
        return max(point, self._ends[index]) if index >= 0 and self._ends[index] >= point else point

    def start_of_newest(self, count: int) -> int:
        """Return the start of the oldest among the `count` newest intervals; there must be as many."""
        return self._starts[-count]

    def forget_before(self, point: int) -> None:
        gone = bisect_right(self._ends, point)
        del self._starts[:gone], self._ends[:gone]
        if self._starts and self._starts[0] < point:
            self._starts[0] = point

    def forget_from(self, point: int) -> None:
        kept = bisect_left(self._starts, point)
        del self._starts[kept:], self._ends[kept:]
        if self._ends and self._ends[-1] > point:
            self._ends[-1] = point


def total_ns(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)
