"""Who waits so that more can be in time, once not all can be. Pure.

On one machine the most jobs are in time if, as soon as one in the line would be late, the longest up to and with it is
left out (J. M. Moore, Management Science 15:1, 1968). What is left out is about as much work as is too much anyway, so
that work in time does not suffer. Here all workers of a model are one machine that works at a measured pace, and each
tenant's class leaves out only its own: whose turn it is among them is for fairness.py to say.
"""

from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

PACE_COUNTED_ON: Final = 0.85
"""Of the pace that was measured: 0.7 to 1 do as well in the lab, more makes too many late."""


class Due(NamedTuple):
    """One that waits."""

    number: int
    flow: Hashable
    """Whose it is: tenant and class."""
    prefill_ns: int
    """Of its prompt, on the fastest worker."""
    latest_ns: float
    """When it has to start at the latest; inf: whenever it may, and it makes no room, as it would never be late and so
    never be owed anything."""


def making_room(line: Iterable[Due], now_ns: int, pace: float) -> set[int]:
    """Numbers of those of a line, in its order, that are to wait so that others can start in time; O(n log n).

    `pace`: nanoseconds of `prefill_ns` that workers do in one, above 0.
    """
    starts_ns, found = float(now_ns), set[int]()
    longest: dict[Hashable, list[tuple[int, int]]] = {}
    """By flow, heaps of (-prefill, number) of those that go and could wait."""
    for number, flow, prefill_ns, latest_ns in line:
        before_ns, starts_ns = starts_ns, starts_ns + prefill_ns / pace
        if latest_ns == inf:
            continue
        own = longest.get(flow)
        if own is None:
            own = longest[flow] = []
        heappush(own, (-prefill_ns, number))
        while before_ns > latest_ns and number not in found:
            minus_ns, other = heappop(own)
            found.add(other)
            starts_ns += minus_ns / pace
            before_ns += minus_ns / pace
    return found
