"""The roles of a worker over time, as spans with one role each."""

from bisect import bisect_left, bisect_right
from typing import Final

MAX_SPANS: Final = 512
"""The most spans kept of one worker; the oldest are dropped. Adjacent spans of one role merge, so a steady worker has
one.
"""


class RoleLog:
    """Disjoint spans [from, to) with the role that held in them, entered in any order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._roles: list[str] = []

    def add(self, start_ns: int, end_ns: int, role: str) -> None:
        """Record that the worker had `role` in [start, end). Time that is known already keeps its role."""
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
        """The role of the latest moment; empty when none is known."""
        return self._roles[-1] if self._roles else ""

    def forget_from(self, from_ns: int) -> None:
        """Drop the roles at and after `from_ns`."""
        kept = bisect_left(self._starts, from_ns)
        del self._starts[kept:], self._ends[kept:], self._roles[kept:]
        if self._ends and self._ends[-1] > from_ns:
            self._ends[-1] = from_ns

    def at(self, at_ns: int) -> str:
        """Return the role at a moment, else the one before it, else the first; empty when none is known."""
        if not self._roles:
            return ""
        return self._roles[max(bisect_right(self._starts, at_ns) - 1, 0)]
