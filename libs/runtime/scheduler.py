"""Delayed calls, timed by the event loop live and by a discrete-event driver elsewhere."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

Call = Callable[[], object]


class Scheduler(Protocol):
    """Runs calls later, one after the other."""

    def soon(self, call: Call) -> None:
        """Run a call once all events of this moment have been processed."""
        ...

    def at(self, unix_ns: int, call: Call) -> None:
        """Run a call at `unix_ns` or later."""
        ...


class LoopScheduler:
    """The running event loop. A timed call that fails stops the owner's service, and is dropped with the owner."""

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
