"""Virtual time in picoseconds: ordered events, and the clock and scheduler that the dispatcher runs on."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final

from libs.runtime.clock import Call

PS_PER_NS: Final = 1_000
# One second, because policies take a time of 0 to mean "not yet".
START_PS: Final = 10**12
_EVENT, _SOON = 0, 1


class VirtualTime:
    """A clock and scheduler in virtual time. Events at one moment run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_ps = START_PS
        self.events = 0
        """The number of events run so far."""
        self._heap: list[tuple[int, int, int, Callable[[], object]]] = []
        self._numbers = count()

    def now_ns(self) -> int:
        return self.now_ps // PS_PER_NS

    def soon(self, call: Call) -> None:
        """Call after all other events of this moment."""
        heappush(self._heap, (self.now_ps, _SOON, next(self._numbers), call))

    def at(self, unix_ns: int, call: Call) -> None:
        """Call at that time, or now if it has passed."""
        self.at_ps(unix_ns * PS_PER_NS, call)

    def at_ps(self, time_ps: int, call: Callable[[], object]) -> None:
        """Call at that time in picoseconds, or now if it has passed."""
        at_ps = time_ps if time_ps > self.now_ps else self.now_ps
        heappush(self._heap, (at_ps, _EVENT, next(self._numbers), call))

    def in_ps(self, delay_ps: int, call: Callable[[], object]) -> None:
        heappush(self._heap, (self.now_ps + delay_ps, _EVENT, next(self._numbers), call))

    def run(self, going_on: Callable[[], bool]) -> None:
        """Run events until none are left or `going_on` returns False."""
        heap = self._heap
        while heap and going_on():
            self.now_ps, _, _, call = heappop(heap)
            self.events += 1
            call()
