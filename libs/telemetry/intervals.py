"""Sets of integers as disjoint half-open intervals, and spans of a worker's time with its roles and parts."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import step_rows


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
        """Return the start of the first interval; 0 if there is none."""
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
        if last == first + 1:  # the usual case, since a steady stream is one interval
            return [(max(low, self._starts[first]), min(high, self._ends[first]))]
        return [
            (max(low, start), min(high, end))
            for start, end in zip(self._starts[first:last], self._ends[first:last], strict=True)
        ]

    def within_each(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts inside spans, which must be disjoint and in order."""
        return [part for span in spans for part in self.within(*span)]

    def reach(self, point: int) -> int:
        """Return the end of the interval that contains or touches `point`, or `point` if there is none."""
        index = bisect_right(self._starts, point) - 1
        return max(point, self._ends[index]) if index >= 0 and self._ends[index] >= point else point

    def start_of_newest(self, count: int) -> int:
        """Return the start of the oldest among the `count` newest intervals; there must be that many."""
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


MAX_SPANS: Final = 512
"""The bound on spans per worker; the oldest are dropped. Adjacent spans of one role merge, so a steady worker has one.
"""


class RoleLog:
    """Disjoint spans [from, to), each with the worker's role, entered in any order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._roles: list[str] = []

    def add(self, start_ns: int, end_ns: int, role: str) -> None:
        """Record that the worker had `role` in [start, end). Time that is already known keeps its role."""
        if self._ends and self._ends[-1] == start_ns and self._roles[-1] == role:  # the usual case
            self._ends[-1] = max(end_ns, start_ns)
            return
        index = bisect_right(self._starts, start_ns)
        if index:
            start_ns = max(start_ns, self._ends[index - 1])
        if index < len(self._starts):
            end_ns = min(end_ns, self._starts[index])
        if start_ns >= end_ns:
            return
        first = last = index
        if index and self._ends[index - 1] == start_ns and self._roles[index - 1] == role:
            first, start_ns = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == end_ns and self._roles[index] == role:
            last, end_ns = index + 1, self._ends[index]
        self._starts[first:last], self._ends[first:last], self._roles[first:last] = [start_ns], [end_ns], [role]
        if len(self._roles) > MAX_SPANS:
            del self._starts[0], self._ends[0], self._roles[0]

    @property
    def newest(self) -> str:
        """Return the latest known role; empty if there is none."""
        return self._roles[-1] if self._roles else ""

    def forget_from(self, from_ns: int) -> None:
        """Drop the roles at and after `from_ns`."""
        kept = bisect_left(self._starts, from_ns)
        del self._starts[kept:], self._ends[kept:], self._roles[kept:]
        if self._ends and self._ends[-1] > from_ns:
            self._ends[-1] = from_ns

    def at(self, at_ns: int) -> str:
        """Return the role at a moment, or else the previous one, or else the first; empty if none is known."""
        if not self._roles:
            return ""
        return self._roles[max(bisect_right(self._starts, at_ns) - 1, 0)]


LATE_NS = 10_000_000_000
"""The longest time by which a dummy step may begin before its batch's cover: engines report dummy steps late, and one
may be long.
"""


class PhaseParts:
    """Parts of idle time, by cause, and of prefill. Empty spans, and spans outside the reach of their batch, are left
    out.
    """

    def __init__(self) -> None:
        self.starved = Intervals()
        """The time in which all KV that sequences awaited was still being computed elsewhere."""
        self.dummies = Intervals()
        """The time of steps that computed for no sequence, because another rank of the data-parallel group had work."""
        self.encodes = Intervals()
        """The time of finished steps that encoded images, a part of prefill."""

    def __iter__(self) -> Iterator[Intervals]:
        return iter((self.starved, self.dummies, self.encodes))

    def take(self, batch: StepBatch) -> None:
        from_ns, to_ns = batch.covered_from_unix_ns, batch.covered_to_unix_ns
        for span in batch.starved:
            if from_ns <= span.start_unix_ns < span.end_unix_ns <= to_ns:
                self.starved.add(span.start_unix_ns, span.end_unix_ns)
        if batch.HasField("dummy_steps"):
            for span in batch.dummy_steps.spans:
                if max(from_ns - LATE_NS, 0) < span.start_unix_ns < span.end_unix_ns <= to_ns:
                    self.dummies.add(span.start_unix_ns, span.end_unix_ns)
        if batch.steps.encoded_images:
            for step in step_rows(batch.steps):
                # A step that an earlier batch announced began before this cover.
                if step.encoded_images and 0 < step.start_unix_ns < step.end_unix_ns <= to_ns:
                    self.encodes.add(step.start_unix_ns, step.end_unix_ns)

    def forget_before(self, point_ns: int) -> None:
        for part in self:
            part.forget_before(point_ns)

    def forget_from(self, point_ns: int) -> None:
        for part in self:
            part.forget_from(point_ns)
