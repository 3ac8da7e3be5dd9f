"""Injected time that never steps back and follows the wall clock, and delayed calls by the event loop or a
simulation.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from libs.runtime.tasks import TaskOwner

# Smaller differences between a process's time and the wall clock are ignored.
STEP_NS: Final = 500_000_000
# After the wall clock was set back, time runs slower by 1/SLEW until the two agree.
SLEW: Final = 8


class Clock(Protocol):
    """The source of time; tests and the lab supply their own."""

    def now_ns(self) -> int:
        """Return Unix time in nanoseconds, never decreasing."""
        ...


class SystemClock:
    """The system's clock, on which a step of the wall clock never makes a duration negative.

    Monotonic time stands still while the machine sleeps, and a wall clock may be corrected by hours. Keys would then
    expire by another time than this process's, and services started later would stamp events by another. So a lead of
    the wall clock passes at once, as after a sleep. If the wall clock was set back, time runs slower until both agree.
    """

    def __init__(
        self, wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._offset_ns = wall_ns() - steady_ns()
        self._slewed_to_ns: int | None = None
        """Monotonic time up to which the offset has been slewed; None while the wall clock is not behind."""
        self._anchoring = threading.Lock()

    def now_ns(self) -> int:
        """Return Unix time in nanoseconds, never decreasing."""
        steady_ns, wall_ns = self._steady_ns(), self._wall_ns()
        now_ns = self._offset_ns + steady_ns
        if self._slewed_to_ns is None and -STEP_NS < wall_ns - now_ns < STEP_NS:
            return now_ns
        return self._anchor()

    def _anchor(self) -> int:
        """Move the offset towards the wall clock and return the time.

        The lock admits one thread at a time, since each must see the offset set by others.
        """
        with self._anchoring:
            steady_ns, wall_ns = self._steady_ns(), self._wall_ns()
            ahead_ns = self._offset_ns + steady_ns - wall_ns
            if ahead_ns <= -STEP_NS:
                self._offset_ns -= ahead_ns
            elif ahead_ns > 0 and self._slewed_to_ns is not None:
                self._offset_ns -= min((steady_ns - self._slewed_to_ns) // SLEW, ahead_ns)
            behind = ahead_ns >= STEP_NS or (self._slewed_to_ns is not None and ahead_ns > 0)
            self._slewed_to_ns = steady_ns if behind else None
            return self._offset_ns + steady_ns


Call = Callable[[], object]


class Scheduler(Protocol):
    """A scheduler that runs calls later, one after the other."""

    def soon(self, call: Call) -> None:
        """Run a call once all events of this moment have been processed."""
        ...

    def at(self, unix_ns: int, call: Call) -> None:
        """Run a call at `unix_ns` or later."""
        ...


class LoopScheduler:
    """The running event loop. A failed timed call stops the owner's service, and pending calls are dropped with the
    owner.
    """

    def __init__(self, clock: Clock, tasks: TaskOwner, name: str) -> None:
        self._clock = clock
        self._tasks = tasks
        self._name = name

    def soon(self, call: Call) -> None:
        """Run a call in the next turn of the loop."""
        asyncio.get_running_loop().call_soon(call)

    def at(self, unix_ns: int, call: Call) -> None:
        """Run a call at `unix_ns`, or as soon after it as the loop can."""
        self._tasks.spawn(self._name, self._wait(unix_ns, call))

    async def _wait(self, unix_ns: int, call: Call) -> None:
        await asyncio.sleep(max(unix_ns - self._clock.now_ns(), 0) / 1e9)
        call()
