"""Which requests wait so that more can be in time, once not all can be.

On one machine, most jobs are in time under Moore's rule (J. M. Moore, Management Science 15:1, 1968). Whenever one
in the line would be late, the longest job up to and including it is left out. The jobs left out are about the work
that is too much anyway, so the work done in time does not suffer. Here all workers of a model are one machine with
a measured pace. Each class of a tenant leaves out only its own requests; fairness.py decides between them.
"""

from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

# Share of the measured pace. In the lab 0.7 to 1 do equally well; more makes too many requests late.
PACE_COUNTED_ON: Final = 0.85


class Due(NamedTuple):
    """A waiting request with its latest start."""

    number: int
    flow: Hashable
    prefill_ns: int
    """The prefill time of its prompt on the fastest worker."""
    latest_ns: float
    """The latest start in time; inf if it has no deadline.

    A request without a deadline makes no room: it would never be late, and so never be owed a share.
    """


def making_room(line: Iterable[Due], now_ns: int, pace: float) -> set[int]:
    """Return the numbers of the requests that wait so that others can start in time, in O(n log n).

    `line` is in service order. `pace` is the nanoseconds of `prefill_ns` that workers complete per nanosecond,
    above 0.
    """
    starts_ns, found = float(now_ns), set[int]()
    # By flow, heaps of (-prefill, number) of the requests that are kept and could wait instead.
    longest: dict[Hashable, list[tuple[int, int]]] = {}
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
