"""When to call: soon, or at a time. The event loop keeps time live; a discrete-event driver brings its own."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

Call = Callable[[], object]


class Scheduler(Protocol):
    """Calls that are made later, one after the other."""

    def soon(self, call: Call) -> None:
        """Once all that happens at this moment has been taken in."""
        ...

    def at(self, unix_ns: int, call: Call) -> None:
        """Not before then."""
        ...


class LoopScheduler:
    """The running event loop. A call at a time that fails stops the owner's service, and is dropped with the owner."""

    def __init__(self, clock: Clock, tasks: TaskOwner, name: str) -> None:
        self._clock = clock
        self._tasks = tasks
        self._name = name

    def soon(self, call: Call) -> None:
        """In the next turn of the loop."""
        asyncio.get_running_loop().call_soon(call)

    def at(self, unix_ns: int, call: Call) -> None:
        """At that time, or as soon after it as the loop can."""
        self._tasks.spawn(self._name, self._wait(unix_ns, call))

    async def _wait(self, unix_ns: int, call: Call) -> None:
        await asyncio.sleep(max(unix_ns - self._clock.now_ns(), 0) / 1e9)
        call()
