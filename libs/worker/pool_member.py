"""A worker of a pool, which serves one model after another and keeps earlier ones asleep in host memory.

For each model it runs an ordinary worker under a new incarnation. Epochs of assignments continue over all models. The
planner decides; this module only executes.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest, QueueFull, SleepFailed, StaleRole, StartupError
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import DeviceMemory, Engine
from libs.model.info import ModelInfo, load_model_info
from libs.policy.worker.assignment import LatestLead, Leaving, leave, too_many
from libs.runtime.clock import Clock
from libs.runtime.release import release
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport
from libs.stores.registry import Registry, RegistryDown
from libs.worker.host import WorkerHost, drain
from libs.worker.known_answer import KnownAnswer
from libs.worker.roles import refuse_stale_lead
from libs.worker.run import ModelStay, WorkerPorts, open_worker
from libs.worker.settings import RENEWALS_PER_LEASE, WorkerSettings

log = structlog.get_logger()

MB: Final = 1024 * 1024
# The assumed load speed of a device without a stated one, until a model has been loaded.
GUESSED_BYTES_PER_S: Final = 1e9
# The prompt tokens in a step beside decodes, if settings give no number.
DEFAULT_BUDGET_TOKENS: Final = 256

MakeEngine = Callable[[WorkerSettings, str, int], Engine]
"""A function that makes an engine from settings, the model's name and the size of its weights."""
MakePorts = Callable[[WorkerSettings, ModelInfo, Engine, ModelStay], WorkerPorts]


@dataclass(frozen=True, slots=True)
class Goal:
    """The model to serve; an empty name means none."""

    model: str = ""
    source: str = ""
    size_bytes: int = 0


@dataclass(slots=True)
class _Asleep:
    engine: Engine
    host_bytes: int
    """The bytes of weights in host memory; 0 if they were dropped."""
    answer: KnownAnswer


class PoolMember:
    """A worker that serves one model after another, as the planner assigns them."""

    def __init__(
        self,
        settings: WorkerSettings,
        registry: Registry,
        clock: Clock,
        tasks: TaskOwner,
        *,
        make_engine: MakeEngine,
        make_ports: MakePorts,
        transport: Transport | None = None,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._clock = clock
        self._tasks = tasks
        self._make_engine = make_engine
        self._make_ports = make_ports
        self._transport = transport
        self.address = ""
        """The address of the admin service, set before it runs."""
        self._incarnation = self._since_ns = clock.now_ns()
        self._epoch = 1
        self._lead = LatestLead()
        self._goal = self._at = Goal()
        self._forget = False
        self._state = common.WORKER_STATE_ASLEEP
        self._expected_ns = 0
        self._last = common.ModelMove()
        self._host: WorkerHost | None = None
        """The host of the served model; None if no model is served."""
        self._stack: AsyncExitStack | None = None
        self._serving: tuple[Engine, Goal, KnownAnswer] | None = None
        self._leaving = Leaving.CLOSED
        self._device_bytes = 0
        """The memory of each of the worker's GPUs, as reported by a sleeping engine; 0 if unknown."""
        self._asleep: OrderedDict[str, _Asleep] = OrderedDict()
        """The sleeping models by name. The first is the first to be closed."""
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self.announced = asyncio.Event()
        """Set once the worker is in the registry."""

    # ------------------------------------------------------------ administration

    @property
    def epoch(self) -> int:
        return self._host.assignment.current.epoch if self._host else self._epoch

    def worker(self) -> common.Worker:
        if self._host is not None:
            return self._host.worker()
        worker = common.Worker(
            id=self._settings.id,
            incarnation=self._incarnation,
            node=self._settings.node,
            pid=os.getpid(),
            address=self.address,
            engine=self._settings.engine,
            gpus=self._settings.gpus,
            gpu_uuids=self._settings.gpu_uuids,
            gpu_share=self._settings.gpu_share,
            nodes=1,
            state=self._state,
            version=release(),
            pool=self._pool(),
        )
        role = common.ROLE_MIXED if self._goal.model else common.ROLE_STANDBY
        worker.assignment.CopyFrom(common.Assignment(model=self._goal.model, role=role, epoch=self._epoch))
        return worker

    def assign(self, request: pb.AssignModelRequest) -> pb.AssignModelResponse:
        """Accept the assignment of another model.

        Raise StaleRole if the caller's view is out of date, and QueueFull while the worker is between two models.
        """
        held = self.worker()
        if request.incarnation and request.incarnation != held.incarnation:
            raise StaleRole("the worker has had another model since: check its state, then try again")
        refuse_stale_lead(self._lead, request.lead_term)
        if request.expected_epoch != self.epoch:
            raise StaleRole(f"expected epoch {request.expected_epoch}, the worker is at {self.epoch}")
        if self._goal != self._at:
            raise QueueFull(
                f"the worker brings {self._goal.model or 'nothing'} up: try again when it has", retry_after_s=1
            )
        if request.model == self._at.model:
            raise InvalidRequest(f"the worker holds {request.model or 'no model'} already", param="model")
        self._epoch = self.epoch + 1
        self._goal = Goal(request.model, request.source, request.size_bytes)
        self._forget = request.forget
        expected_s = self._expected_s(self._goal)
        log.info("model assigned", model=request.model, epoch=self._epoch, actor=request.actor, reason=request.reason)
        self._changed.set()
        role = common.ROLE_MIXED if request.model else common.ROLE_STANDBY
        assignment = common.Assignment(model=request.model, role=role, epoch=self._epoch)
        return pb.AssignModelResponse(assignment=assignment, expected_ns=round(expected_s * 1e9))

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve the assigned models until cancelled, then close at once."""
        announcing = self._tasks.spawn(f"announce {self._settings.id}", self._announce())
        try:
            while True:
                self._changed.clear()
                if self._goal != self._at:
                    await self._move(self._goal)
                await self._changed.wait()
        finally:
            announcing.cancel()
            await self._close()

    async def drain(self) -> None:
        """Wait for running sequences to end, for at most the settings' `drain_s`."""
        if self._host is not None:
            await drain(self._host, self._settings.drain_s)

    async def _move(self, goal: Goal) -> None:
        await self._leave()
        began_ns = self._clock.now_ns()
        if goal.model:
            self._stand(common.WORKER_STATE_LOADING, self._expected_s(goal))
            try:
                await self._enter(goal, began_ns)
            except (FulcrumError, OSError, MemoryError) as error:
                self._failed(goal, error)
        else:
            self._stand(common.WORKER_STATE_ASLEEP, 0.0)
        self._at = self._goal

    async def _enter(self, goal: Goal, began_ns: int) -> None:
        settings = self._settings.model_copy(
            update={
                "model": goal.model,
                "model_path": goal.source,
                "role": "mixed",
                "budget_tokens": self._settings.budget_tokens or DEFAULT_BUDGET_TOKENS,
            }
        )
        info = await asyncio.to_thread(load_model_info, goal.source, goal.model)
        slept = self._asleep.pop(goal.model, None)
        if slept is not None:
            try:
                await self._open(settings, info, goal, slept.engine, began_ns, answer=slept.answer)
            except StartupError as error:  # its processes may have died in the meantime
                log.warning("a model cannot be woken: loading it from its files", model=goal.model, error=error.message)
            else:
                return
        # An engine's first imports take long, so they run on a thread while the registration is renewed.
        engine = await asyncio.to_thread(self._make_engine, settings, goal.model, goal.size_bytes)
        await self._open(settings, info, goal, engine, began_ns)

    async def _open(
        self,
        settings: WorkerSettings,
        info: ModelInfo,
        goal: Goal,
        engine: Engine,
        began_ns: int,
        *,
        answer: KnownAnswer | None = None,
    ) -> None:
        """Serve the model. `answer` is the earlier answer of an engine that slept; None for a newly loaded one."""
        woken, answer = answer is not None, answer or KnownAnswer()

        def pool() -> common.PoolWorker:
            # `open_worker` calls this once the model is loaded.
            self._since_ns, self._expected_ns = self._clock.now_ns(), 0
            took_ns = self._since_ns - began_ns
            self._last = common.ModelMove(model=goal.model, from_host=woken, took_ns=took_ns, unix_ns=self._since_ns)
            return self._pool()

        tenancy = ModelStay(self._epoch, woken, self._left, pool, answer)
        self._serving, self._leaving = (engine, goal, answer), Leaving.CLOSED
        stack = AsyncExitStack()
        try:
            ports = self._make_ports(settings, info, engine, tenancy)
            opening = open_worker(settings, ports, self._clock, self._tasks, self._transport)
            running = await stack.enter_async_context(opening)
        except BaseException:
            await stack.aclose()
            self._serving = None
            raise
        self._stack, self._host = stack, running.host

    async def _leave(self) -> None:
        """Drain the served model, then put its engine to sleep if host memory has room."""
        if self._stack is None or self._host is None or self._serving is None:
            return
        engine, goal, answer = self._serving
        await drain(self._host, self._settings.pool_drain_s)
        self._leaving = leave(
            goal.size_bytes,
            host_bytes=self._settings.host_memory_mb * MB,
            sleeps=engine.capabilities.sleeps and not self._forget,
            drops_weights=engine.capabilities.drops_weights,
        )
        self._spare_next()
        host_bytes = goal.size_bytes if self._leaving is Leaving.WITH_WEIGHTS else 0
        if host_bytes:
            await self._make_room(host_bytes)
        stack, self._stack, self._host = self._stack, None, None
        self._stand(common.WORKER_STATE_LOADING, self._expected_s(self._goal))
        await stack.aclose()
        self._serving = None
        if self._leaving is not Leaving.CLOSED:
            self._asleep[goal.model] = _Asleep(engine, host_bytes, answer)
            self._spare_next()
            await self._clear_device(engine)

    async def _left(self) -> None:
        """Put the engine to sleep, or close it if it cannot sleep or there is no room."""
        if self._serving is None:
            return
        engine, goal, _ = self._serving
        if self._leaving is not Leaving.CLOSED:
            try:
                await engine.sleep(keep_weights=self._leaving is Leaving.WITH_WEIGHTS)
            except SleepFailed as error:
                log.warning("a model cannot be put to sleep: closing it", model=goal.model, error=error.message)
                self._leaving = Leaving.CLOSED
            else:
                return
        await engine.close()

    def _spare_next(self) -> None:
        # The model to be woken next is closed after all others, including the one just left.
        if self._goal.model in self._asleep:
            self._asleep.move_to_end(self._goal.model)

    async def _make_room(self, size_bytes: int) -> None:
        """Free host memory by closing sleeping models, oldest first."""
        held = [each.host_bytes for each in self._asleep.values()]
        for _ in range(too_many(held, size_bytes, self._settings.host_memory_mb * MB)):
            await self._give_up_oldest()

    async def _clear_device(self, left: Engine) -> None:
        """Close sleeping models until the others fit the GPU memory reserved for them.

        No model is awake on the GPUs now, so all used memory belongs to sleeping ones. `left` is the engine that fell
        asleep last.
        """
        while self._asleep:
            memory = await self._device_memory(left)
            if memory is None:
                return
            self._device_bytes = memory.total_bytes
            if memory.used_bytes <= self._settings.asleep_gpu_memory_mb * MB:
                return
            await self._give_up_oldest()

    async def _device_memory(self, left: Engine) -> DeviceMemory | None:
        # Ask the engine that fell asleep last first, since the processes of others may have died in the meantime.
        asleep = [each.engine for each in self._asleep.values()]
        for engine in sorted(asleep, key=lambda each: each is not left):
            if (memory := await engine.device_memory()) is not None:
                return memory
        return None

    async def _give_up_oldest(self) -> None:
        name, oldest = self._asleep.popitem(last=False)
        log.info("closing a sleeping model to make room", model=name)
        await oldest.engine.close()

    def _failed(self, goal: Goal, error: Exception) -> None:
        message = error.message if isinstance(error, FulcrumError) else str(error) or type(error).__name__
        log.warning("a model cannot be loaded", model=goal.model, error=message)
        now_ns = self._clock.now_ns()
        self._last = common.ModelMove(model=goal.model, error=message, unix_ns=now_ns)
        self._goal = Goal()
        self._stand(common.WORKER_STATE_ASLEEP, 0.0)

    async def _close(self) -> None:
        self._leaving = Leaving.CLOSED
        if self._stack is not None:
            await self._stack.aclose()
        for each in self._asleep.values():
            await each.engine.close()
        self._asleep.clear()
        try:
            await self._registry.withdraw(self._settings.id, self._clock.now_ns())
        except RegistryDown as error:
            log.info("the registration could not be withdrawn: it will expire", error=str(error))

    # ------------------------------------------------------------ registration

    def _stand(self, state: "common.WorkerState", expected_s: float) -> None:
        """Change the state in the worker's own registration, under a new incarnation."""
        self._incarnation = self._since_ns = self._clock.now_ns()
        self._state, self._expected_ns = state, round(expected_s * 1e9)
        self._news.set()

    def _expected_s(self, goal: Goal) -> float:
        """Return the expected seconds until the model serves, by the device's stated speeds."""
        if not goal.model:
            return 0.0
        load_per_s, wake_per_s, overhead_s = self._speeds()
        per_s = wake_per_s if goal.model in self._asleep else load_per_s
        leaving = self._serving[1].size_bytes / (wake_per_s or GUESSED_BYTES_PER_S) if self._serving else 0.0
        return goal.size_bytes / (per_s or GUESSED_BYTES_PER_S) + overhead_s + leaving

    def _speeds(self) -> tuple[float, float, float]:
        """Return (load bytes/s, wake bytes/s, overhead in seconds) as stated by the settings; 0 for unknown ones."""
        settings = self._settings
        if settings.engine != "sim":
            return 0.0, 0.0, 0.0
        speed = settings.sim_speedup * 1e9
        overhead_s = settings.sim_load_overhead_s / settings.sim_speedup
        return settings.sim_load_gb_per_s * speed, settings.sim_wake_gb_per_s * speed, overhead_s

    def _pool(self) -> common.PoolWorker:
        load_per_s, wake_per_s, overhead_s = self._speeds()
        settings = self._settings
        return common.PoolWorker(
            address=self.address,
            since_unix_ns=self._since_ns,
            asleep=[common.HeldModel(model=name, size_bytes=each.host_bytes) for name, each in self._asleep.items()],
            memory_bytes=self._memory_bytes(),
            host_memory_bytes=settings.host_memory_mb * MB,
            load_bytes_per_s=load_per_s,
            wake_bytes_per_s=wake_per_s,
            overhead_s=overhead_s,
            expected_ns=self._expected_ns,
            last=self._last if self._last.unix_ns else None,
        )

    def _memory_bytes(self) -> int:
        """Return the memory for a model in the worker's share of its GPUs; 0 if unknown."""
        settings = self._settings
        if self._device_bytes:
            part = self._device_bytes * settings.gpu_share - settings.asleep_gpu_memory_mb * MB
            return max(round(part), 0) * settings.gpus
        return round(settings.sim_memory_gb * 1e9 * settings.gpu_share) if settings.engine == "sim" else 0

    async def _announce(self) -> None:
        """Register the worker while it serves no model. While it serves one, `open_worker` registers it."""
        lease_ms = self._settings.lease_ms
        while True:
            self._news.clear()
            if self._host is None:
                try:
                    await self._registry.announce(self.worker(), lease_ms=lease_ms)
                    self.announced.set()
                except RegistryDown as error:
                    log.info("registry is away", error=str(error))
            try:
                async with asyncio.timeout(lease_ms / 1000 / RENEWALS_PER_LEASE):
                    await self._news.wait()
            except TimeoutError:
                continue
