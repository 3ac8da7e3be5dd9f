"""The spare workers of a suite, started and ended at the planner's request."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from libs.actuators.port import to_end
from libs.actuators.process import SpareState
from libs.contracts.errors import StartupError
from libs.launch.processes.port import ChildSpec
from libs.launch.processes.supervisor import Supervisor
from libs.launch.report import Reporter
from libs.runtime.backoff import Backoff
from libs.runtime.tasks import TaskOwner

FIRST_WAIT_S: Final = 2.0
# The pause before a spare worker that could not start is tried again, however often it is requested.
MAX_WAIT_S: Final = 60.0


class Spares:
    """Supervises the requested number of spare workers, the first ones of the plan."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        supervise: Callable[[ChildSpec], Supervisor],
        reporter: Reporter,
        tasks: TaskOwner,
        *,
        model: str,
        grace_s: float,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._supervise = supervise
        self._reporter = reporter
        self._tasks = tasks
        self._model = model
        self._grace_s = grace_s
        self._running: dict[str, Supervisor] = {}
        """The running workers, including those that are ending."""
        self._ending: set[str] = set()
        self._backoff = Backoff(first_s=FIRST_WAIT_S, max_s=MAX_WAIT_S)
        self._not_before_s = 0.0

    @property
    def state(self) -> SpareState:
        """Return the present state."""
        return SpareState(list(self._running), len(self._specs), self._model)

    def have(self, count: int, first_to_end: Sequence[str] = ()) -> None:
        """Run this many from now on. Starting and ending happens in tasks."""
        staying = [name for name in self._running if name not in self._ending]
        for name in to_end(staying, count, first_to_end):
            self._ending.add(name)
            self._tasks.spawn(f"end {name}", self._end(name))
        # While others end their places are taken: there are never more than the plan has room for.
        free = [name for name in self._specs if name not in self._running]
        wanted = max(min(count, len(self._specs)) - len(staying), 0)
        if asyncio.get_running_loop().time() < self._not_before_s:
            return
        for name in free[:wanted]:
            supervisor = self._running[name] = self._supervise(self._specs[name])
            supervisor.start(self._tasks)
            self._tasks.spawn(f"await {name}", self._await(name, supervisor))

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(supervisor.stop(grace_s) for supervisor in list(self._running.values())))
        self._running.clear()

    def kill(self) -> None:
        for supervisor in self._running.values():
            supervisor.kill()

    async def _end(self, name: str) -> None:
        try:
            await self._running[name].stop(self._grace_s)
        finally:
            self._running.pop(name, None)
            self._ending.discard(name)
        self._reporter.note(f"{name} has ended: the planner wishes fewer workers")

    async def _await(self, name: str, supervisor: Supervisor) -> None:
        """Wait for a worker's start. One that cannot start costs the suite only the pause before the next try."""
        try:
            await supervisor.first_ready
        except (StartupError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not supervisor.first_ready.cancelled():
                raise  # this task was, not the start
            if self._running.get(name) is supervisor and name not in self._ending:
                wait_s = self._backoff.next_s()
                self._not_before_s = asyncio.get_running_loop().time() + wait_s
                del self._running[name]
                self._reporter.note(f"{error}: it may be tried again in {wait_s:g} s")
            return
        self._backoff.reset()
        self._reporter.note(f"{name} has been started: the planner wishes more workers")
