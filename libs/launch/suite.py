"""The processes of a suite as one unit, and its spare workers.

The suite is up when all processes are up. It stops in an order that lets requests finish.
"""

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Header, Request, Response

from libs.actuators.port import to_end
from libs.actuators.process import SpareState, SpareWish
from libs.contracts.errors import StartupError, Unauthenticated
from libs.launch.plan import SuitePlan
from libs.launch.processes.port import ChildSpec, Launcher, Reporter, StatusLine
from libs.launch.processes.supervisor import Supervisor
from libs.runtime.backoff import Backoff
from libs.runtime.http.semantics import HttpSemantics
from libs.runtime.tasks import TaskOwner

FIRST_WAIT_S: Final = 2.0
# The longest pause before another attempt to start a spare worker that failed, however often it is requested.
MAX_WAIT_S: Final = 60.0


class Spares:
    """The supervisors of the spare workers. As many run as were requested last."""

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
        """The running workers, including those that are being stopped."""
        self._ending: set[str] = set()
        self._backoff = Backoff(first_s=FIRST_WAIT_S, max_s=MAX_WAIT_S)
        self._not_before_s = 0.0

    @property
    def state(self) -> SpareState:
        return SpareState(list(self._running), len(self._specs), self._model)

    def have(self, count: int, first_to_end: Sequence[str] = ()) -> None:
        """Set the number of workers that run. Tasks start and stop them."""
        staying = [name for name in self._running if name not in self._ending]
        for name in to_end(staying, count, first_to_end):
            self._ending.add(name)
            self._tasks.spawn(f"end {name}", self._end(name))
        # A worker that is being stopped still uses its resources, so its name is not free yet.
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
        """Wait for a worker's start. After a failure, no worker starts until a pause has passed."""
        try:
            await supervisor.first_ready
        except (StartupError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not supervisor.first_ready.cancelled():
                raise  # this task was cancelled, not the start
            if self._running.get(name) is supervisor and name not in self._ending:
                wait_s = self._backoff.next_s()
                self._not_before_s = asyncio.get_running_loop().time() + wait_s
                del self._running[name]
                self._reporter.note(f"{error}: it may be tried again in {wait_s:g} s")
            return
        self._backoff.reset()
        self._reporter.note(f"{name} has been started: the planner wishes more workers")


# A big model takes minutes to load. After this time the start has failed.
START_TIMEOUT_S = 900.0
GATEWAY_GRACE_S = 3.0
SERVICE_GRACE_S = 2.5
# All graces together are well below the 10 s in which a suite must stop. Services have no work once the gateways have
# stopped.
STORE_GRACE_S = 0.5
# The time for a spare worker to finish its sequences when fewer are requested while the suite runs.
SPARE_GRACE_S = 30.0
# The interval between checks of the logs' size.
LOG_CHECK_S = 5.0

T = TypeVar("T")


class Suite:
    """The processes of a plan, started and stopped together. `failure` is set when one of them ends the suite."""

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
        """The grace and the children of each stage, in the order of their start."""

    async def start(self) -> dict[str, StatusLine]:
        """Start all children and return their status lines by name. Raise the first child's StartupError."""
        plan = self._plan
        self._tasks.spawn("logs", self._bound_logs())
        stores = await self._start_all((STORE_GRACE_S, plan.stores))
        services = await self._start_all(
            (SERVICE_GRACE_S, (*plan.workers, *plan.observers)), (GATEWAY_GRACE_S, plan.gateways)
        )
        return stores | services

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raise StartupError as soon as the suite fails."""
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
        """Stop the gateways first, so that requests finish, then workers and services, and the stores last."""
        for grace_s, supervisors in reversed(self._stages):
            stops = [supervisor.stop(grace_s) for supervisor in supervisors]
            if grace_s == SERVICE_GRACE_S:
                stops.append(self.spares.stop(grace_s))
            await asyncio.gather(*stops)
        await self._tasks.close()

    def kill(self) -> None:
        """Kill everything at once, which also ends a `stop` in progress."""
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
        """Return a supervisor that always restarts its spare worker, since the suite is complete without it."""
        return Supervisor(self._launcher, spec, self._reporter, restart=True, on_death=self._fail)

    @property
    def tasks(self) -> TaskOwner:
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


MAX_BODY_BYTES: Final = 64 * 1024


def make_spares_app(spares: Spares, token: str) -> FastAPI:
    """Return an app with GET and PUT /v1/spares, for callers with the suite's token."""
    app = FastAPI(title="Fulcrum launcher", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpSemantics)

    @app.exception_handler(Unauthenticated)
    async def refused(_request: Request, error: Unauthenticated) -> Response:
        return Response(str(error), status_code=401)

    @app.get("/v1/spares")
    async def look(authorization: Annotated[str, Header()] = "") -> Response:
        _check(token, authorization)
        return _answer(spares.state)

    @app.put("/v1/spares")
    async def have(request: Request, authorization: Annotated[str, Header()] = "") -> Response:
        _check(token, authorization)
        if int(request.headers.get("content-length") or MAX_BODY_BYTES + 1) > MAX_BODY_BYTES:
            return Response("a wish is short", status_code=413)
        try:
            wish = msgspec.json.decode(await request.body(), type=SpareWish)
        except msgspec.MsgspecError as error:
            return Response(str(error), status_code=400)
        spares.have(wish.count, wish.first_to_end)
        return _answer(spares.state)

    return app


def _check(token: str, authorization: str) -> None:
    if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise Unauthenticated("only the planner may start spare workers")


def _answer(state: SpareState) -> Response:
    return Response(msgspec.json.encode(state), media_type="application/json")
