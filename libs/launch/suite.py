"""A suite's processes as one unit: up when all are up, and stopped in the order that lets requests finish."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from libs.contracts.errors import StartupError
from libs.launch.plan import SuitePlan
from libs.launch.processes.port import ChildSpec, Launcher
from libs.launch.processes.supervisor import Supervisor
from libs.launch.report import Reporter, StatusLine
from libs.launch.spares.spares import Spares
from libs.runtime.tasks import TaskOwner

# A big model takes minutes to load; after this the start has failed.
START_TIMEOUT_S = 900.0
GATEWAY_GRACE_S = 3.0
SERVICE_GRACE_S = 2.5
# Together well under the 10 s in which a suite must be gone. Services have nothing to finish once the gateways are
# gone: nobody needs a step that still runs.
STORE_GRACE_S = 0.5
# For a spare worker to finish its sequences when fewer are requested, while the suite continues.
SPARE_GRACE_S = 30.0
# How often logs are checked against their bound.
LOG_CHECK_S = 5.0

T = TypeVar("T")


class Suite:
    """Starts and stops the processes of a plan. `failure` is set when one of them ends the suite."""

    def __init__(self, plan: SuitePlan, launcher: Launcher, reporter: Reporter, *, restart: bool) -> None:
        self.failure: asyncio.Future[StartupError] = asyncio.get_running_loop().create_future()
        self._plan = plan
        self._launcher = launcher
        self._reporter = reporter
        self._restart = restart
        self._tasks = TaskOwner(lambda error: self._fail(StartupError(f"a fault in the launcher: {error!r}")))
        self.spares = Spares(
            plan.spares, self._supervise_spare, reporter, self._tasks, model=plan.model, grace_s=SPARE_GRACE_S
        )
        self._stages: list[tuple[float, list[Supervisor]]] = []
        """The grace and the children of each stage, in the order of stopping."""

    async def start(self) -> dict[str, StatusLine]:
        """Return all children's status lines by name once they are ready. Raises the first child's StartupError."""
        plan = self._plan
        self._tasks.spawn("logs", self._bound_logs())
        stores = await self._start_all((STORE_GRACE_S, plan.stores))
        services = await self._start_all(
            (SERVICE_GRACE_S, (*plan.workers, *plan.observers)), (GATEWAY_GRACE_S, plan.gateways)
        )
        return stores | services

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises StartupError as soon as the suite fails."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self.failure}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                raise self.failure.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def stop(self) -> None:
        """Stop the gateways first, so that requests finish, then what serves them, and the stores last."""
        for grace_s, supervisors in reversed(self._stages):
            stops = [supervisor.stop(grace_s) for supervisor in supervisors]
            if grace_s == SERVICE_GRACE_S:
                stops.append(self.spares.stop(grace_s))
            await asyncio.gather(*stops)
        await self._tasks.close()

    def kill(self) -> None:
        """Kill everything at once; a `stop` in progress then returns."""
        self.spares.kill()
        for _grace_s, supervisors in self._stages:
            for supervisor in supervisors:
                supervisor.kill()

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            await self._launcher.bound_logs()

    async def _start_all(self, *stages: tuple[float, Sequence[ChildSpec]]) -> dict[str, StatusLine]:
        started: list[Supervisor] = []
        for grace_s, specs in stages:
            supervisors = [self._supervise(spec) for spec in specs]
            self._stages.append((grace_s, supervisors))
            started += supervisors
        for supervisor in started:
            supervisor.start(self._tasks)
        lines = await self.unless_failed(_all_ready(started))
        return {supervisor.name: line for supervisor, line in zip(started, lines, strict=True)}

    def _supervise(self, spec: ChildSpec) -> Supervisor:
        return Supervisor(self._launcher, spec, self._reporter, restart=self._restart, on_death=self._fail)

    def _supervise_spare(self, spec: ChildSpec) -> Supervisor:
        """Supervise a spare worker, which is always restarted: the suite is complete without it."""
        return Supervisor(self._launcher, spec, self._reporter, restart=True, on_death=self._fail)

    @property
    def tasks(self) -> TaskOwner:
        """The tasks of the launcher."""
        return self._tasks

    def _fail(self, error: StartupError) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


async def _all_ready(supervisors: Sequence[Supervisor]) -> list[StatusLine]:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await asyncio.gather(*(supervisor.first_ready for supervisor in supervisors))
    except TimeoutError:
        late = ", ".join(supervisor.name for supervisor in supervisors if not supervisor.first_ready.done())
        raise StartupError(f"not ready after {START_TIMEOUT_S:g} s: {late}") from None
