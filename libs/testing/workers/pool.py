"""Workers of a pool in the test's own process, with real members, engines and gRPC over a registry in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.local import make_engine
from libs.engine.port import Engine
from libs.engine.sim import SimRunner
from libs.model.info import BUILTIN_SIM, ModelInfo
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner, end
from libs.runtime.transport import SystemTransport
from libs.stores.registry import Registry
from libs.testing.engines.gpu import FakeGpu, GpuEngine
from libs.testing.memory.registry import MemoryRegistry
from libs.testing.memory.store import MemoryStore
from libs.testing.workers.hosts import TOKEN, WAIT_S, RecordingBus, RecordingKvIndex, RecordingStepTimes
from libs.worker.pool_member import PoolMember
from libs.worker.run import ModelStay, WorkerPorts
from libs.worker.settings import WorkerSettings

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LocalPoolMember:
    """A member that runs in this process."""

    member: PoolMember
    registry: Registry
    engines: list[Engine]
    """The engines made so far."""
    gpu: FakeGpu | None = None
    """The GPU that the engines share."""

    def engine(self, number: int) -> GpuEngine:
        """Return one of the engines on the simulated GPU."""
        found = self.engines[number]
        assert isinstance(found, GpuEngine)
        return found

    def assign(self, model: str, size_bytes: int = 16 * GB, **fields: Any) -> pb.AssignModelResponse:
        """Assign a model as the planner would, from the present epoch."""
        request = pb.AssignModelRequest(
            expected_epoch=self.member.epoch, model=model, source=BUILTIN_SIM, size_bytes=size_bytes, actor="test"
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return self.member.assign(request)

    async def registered(self) -> Worker:
        """Return the member's only entry."""
        (worker,) = await self.registry.workers()
        return worker

    async def until(self, state: int, model: str) -> Worker:
        """Wait for the entry to have that state and model."""
        return await self._once(lambda worker: (worker.state, worker.assignment.model) == (state, model))

    async def failed(self, model: str) -> Worker:
        """Wait for the entry to report that a model could not be loaded."""
        return await self._once(lambda worker: worker.pool.last.model == model and bool(worker.pool.last.error))

    async def _once(self, holds: Callable[[Worker], bool]) -> Worker:
        async with asyncio.timeout(WAIT_S):
            async for found in self.registry.watch(poll_ms=20):
                if found and holds(found[0]):
                    return found[0]
        raise AssertionError


@asynccontextmanager
async def local_pool_member(
    worker_id: str, store: MemoryStore, *, gpu: FakeGpu | None = None, **overrides: Any
) -> AsyncIterator[LocalPoolMember]:
    """Run a sim worker of a pool, 100 times as fast as its device; leaving the context ends it without a drain.

    On a given `gpu`, sleeping engines leave some memory occupied, and others can use only the rest.
    """
    values: dict[str, Any] = {
        "engine": "sim", "sim_speedup": 100.0, "telemetry_ms": 20, "drain_s": 5.0, "token": TOKEN, "max_sequences": 8,
        "pool": True, "lease_ms": 600,
    } | overrides  # fmt: skip
    settings = WorkerSettings.model_validate({"id": worker_id, "role": "standby", **values})
    clock, tasks, engines = SystemClock(), TaskOwner(), list[Engine]()
    registry = MemoryRegistry(store, "test")

    def engine(own: WorkerSettings, model: str, size_bytes: int) -> Engine:
        config = own.engine_config(model, weights_bytes=size_bytes)
        if gpu is None:
            engines.append(make_engine(own.engine, config, clock))
        else:
            part = gpu.total_bytes - config.vllm_asleep_mb * 1024 * 1024
            engines.append(GpuEngine(SimRunner(config), config, clock, gpu=gpu, awake_bytes=part))
        return engines[-1]

    def ports(own: WorkerSettings, info: ModelInfo, made: Engine, tenancy: ModelStay) -> WorkerPorts:
        return WorkerPorts(made, registry, RecordingKvIndex(), RecordingStepTimes(), RecordingBus(), info, tenancy)

    transport = SystemTransport(settings)
    member = PoolMember(settings, registry, clock, tasks, make_engine=engine, make_ports=ports, transport=transport)
    member.address = "127.0.0.1:1"
    running = tasks.spawn("pool member", member.run())
    try:
        await member.announced.wait()
        yield LocalPoolMember(member, registry, engines, gpu)
    finally:
        await end(running)
        await tasks.close()
    if tasks.error is not None:
        raise tasks.error
