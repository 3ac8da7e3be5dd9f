"""The life of a worker, from its settings and the ports that its service has chosen."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.protocol import OLDEST, PROTOCOL
from libs.contracts.roles import role_from_name
from libs.counters import GpuSampler, open_nvml
from libs.engine.kv_port import KvFetcher
from libs.engine.port import Engine, EngineIdentity, Progress
from libs.model.info import ModelInfo
from libs.perfmodel.profiles import prior_step_time
from libs.policy.worker.assignment import FIRST_EPOCH
from libs.runtime import status
from libs.runtime.clock import Clock
from libs.runtime.linux import CpuWaitReader
from libs.runtime.net.access import is_loopback
from libs.runtime.release import release
from libs.runtime.tasks import TaskOwner, end
from libs.runtime.transport import SystemTransport, Transport
from libs.stores.kvindex import KvIndex
from libs.stores.registry import Registry
from libs.stores.steps import StepTimeStore
from libs.worker.admin import AdminServicer, Registration, audit_changes, kept_role
from libs.worker.gateways import WorkerServicer
from libs.worker.host import WorkerHost, drain, pump
from libs.worker.known_answer import KnownAnswer
from libs.worker.kv_client import GrpcKvFetcher, SharedMemory
from libs.worker.kv_server import BlockPublisher, KvServicer
from libs.worker.roles import AssignmentState
from libs.worker.settings import WorkerSettings
from libs.worker.telemetry import StepBatchBuilder, StepTimes, TelemetryPublisher, TelemetrySource, step_time_key
from libs.worker.tuning import PrefillTuner
from libs.worker.wire import capabilities_message

log = structlog.get_logger()

# The interpreter's switch interval. By default, a step's Python code keeps the lock for 5 ms while the event loop
# waits. A role change needs several iterations of the loop.
LOCK_TURN_S = 0.0005
# The time for streams to end by themselves after the worker has drained.
SERVER_STOP_S = 1.0


StartEngine = Callable[[EngineIdentity, KvFetcher, Progress], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ModelStay:
    epoch: int
    """The epoch of the stay's first assignment. Epochs continue across the models of a worker."""
    asleep: bool
    """True if the engine sleeps and must be woken."""
    leave: Callable[[], Awaitable[None]]
    """A function that is called instead of closing the engine."""
    pool: Callable[[], common.PoolWorker]
    answer: KnownAnswer
    """The check that precedes serving the model."""


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """The adapters of a worker, built by the service's composition root."""

    engine: Engine
    registry: Registry
    kv_index: KvIndex
    step_times: StepTimeStore
    bus: Bus
    model: ModelInfo
    tenancy: ModelStay | None = None
    """The stay of a pool's model; None for a worker with a fixed model."""
    cpu_waits: CpuWaitReader | None = None
    """The reader of the time that threads wait for a CPU; None in a simulation, whose time is not the kernel's."""


def _engine_life(ports: WorkerPorts) -> tuple[StartEngine, Callable[[], Awaitable[None]]]:
    engine, tenancy = ports.engine, ports.tenancy
    if tenancy is None:
        return engine.start, engine.close

    async def start(identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        await (engine.wake if tenancy.asleep else engine.start)(identity, fetcher, progress)
        await tenancy.answer.check(engine)

    return start, tenancy.leave


async def run_worker(
    settings: WorkerSettings,
    ports: WorkerPorts,
    clock: Clock,
    tasks: TaskOwner,
    stopping: asyncio.Event,
    *,
    ready: Callable[[str], None],
) -> None:
    """Serve until `stopping` is set, then drain. `ready` receives the address. Raise StartupError."""
    sys.setswitchinterval(LOCK_TURN_S)
    async with AsyncExitStack() as stack:
        opening = asyncio.ensure_future(stack.enter_async_context(open_worker(settings, ports, clock, tasks)))
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait((opening, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not opening.done():  # a stop signal arrived while the model was loading
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
        if opening.cancelled():
            return
        running = opening.result()
        # All objects so far live until the end. A full collection would visit them, which takes a tenth of a second
        # with torch.
        gc.collect()
        gc.freeze()
        ready(running.address)
        await stopping.wait()
        if tasks.error is None:
            await drain(running.host, settings.drain_s)


@dataclass(frozen=True, slots=True)
class RunningWorker:
    host: WorkerHost
    address: str


@asynccontextmanager
async def open_worker(
    settings: WorkerSettings,
    ports: WorkerPorts,
    clock: Clock,
    tasks: TaskOwner,
    transport: Transport | None = None,
) -> AsyncIterator[RunningWorker]:
    """Serve while the context is open. Its end aborts running sequences."""
    transport = transport or SystemTransport(settings)
    async with AsyncExitStack() as stack:
        for close in (ports.kv_index.close, ports.registry.close, ports.step_times.close):
            stack.push_async_callback(close)
        # The port is bound before the model loads, because KV handles contain the address. A port in use then fails at
        # once.
        server, port = transport.server(settings.listen_address())
        stack.push_async_callback(server.stop, None)
        address = settings.advertised_address(port)
        incarnation = clock.now_ns()
        memory = SharedMemory(settings.kv_shared_dir)
        stack.callback(memory.close)
        fetcher = GrpcKvFetcher(transport, settings.id, memory.maps, on_failure=tasks.fail)
        stack.push_async_callback(fetcher.close)
        start, leave = _engine_life(ports)
        stack.push_async_callback(leave)
        await start(EngineIdentity(settings.id, incarnation, address), fetcher, status.progress)
        await ports.bus.start()
        stack.push_async_callback(ports.bus.close)

        host = _host(
            settings, ports, clock, address=address, incarnation=incarnation, kept=await _kept(settings, ports)
        )
        builder = StepBatchBuilder(_source(settings, ports.engine, incarnation), clock.now_ns())
        step_times = await _step_times(ports, settings.gpus)
        kv = KvServicer(host, incarnation)
        gpus = GpuSampler(open_nvml, Path(gettempdir()))
        telemetry = TelemetryPublisher(
            builder, host, step_times, ports.bus, clock,
            kv=kv, gpus=gpus, cpu_waits=ports.cpu_waits, period_ms=settings.telemetry_ms,
        )  # fmt: skip
        blocks = BlockPublisher(ports.kv_index, ports.model.name, settings.id, lease_ms=settings.kv_index_lease_ms)
        registration = Registration(ports.registry, host, lease_ms=settings.lease_ms)
        stack.callback(telemetry.publish, last=True)
        step_times.on_change(host.speed.learned)
        listeners = (host.speed.on_event, host.on_event, telemetry.on_event, blocks.on_event, step_times.on_event)
        _own(stack, tasks.spawn("engine events", pump(ports.engine, listeners)))
        _own(stack, tasks.spawn("telemetry", telemetry.run()))
        _own_samplers(stack, tasks, gpus, ports.cpu_waits)
        stack.push_async_callback(step_times.save)
        _own(stack, tasks.spawn("step times", step_times.run()))
        stack.push_async_callback(blocks.forget)
        _own(stack, tasks.spawn("kv index", blocks.run()))
        _own(stack, tasks.spawn("shared memory", memory.run()))

        tuner = PrefillTuner(ports.engine, step_times, clock, host.chunked, named_tokens=settings.prefill_chunk_tokens)
        await tuner.settle(host.assignment.current.role)
        host.on_change(lambda: tuner.role_is(host.assignment.current.role))
        _own(stack, tasks.spawn("prefill chunk", tuner.run()))
        _own(stack, tasks.spawn("heartbeat", beat(host)))
        await _add_services(server, _admin(settings, ports, host, tuner, step_times, clock=clock), host, kv, settings)
        await server.start()
        stack.push_async_callback(server.stop, SERVER_STOP_S)
        stack.callback(kv.hang_up)
        stack.callback(host.gateways.hang_up)
        stack.push_async_callback(registration.withdraw)
        _own(stack, tasks.spawn("registration", registration.run()))
        log.info("worker is serving", id=settings.id, address=address)
        yield RunningWorker(host, address)


def _admin(
    settings: WorkerSettings,
    ports: WorkerPorts,
    host: WorkerHost,
    tuner: PrefillTuner,
    step_times: StepTimes,
    *,
    clock: Clock,
) -> AdminServicer:
    record = audit_changes(ports.bus, clock, settings.id)
    return AdminServicer(host, tuner, step_times, record=record, drain_s=settings.drain_s, registry=ports.registry)


async def _step_times(ports: WorkerPorts, gpus: int) -> StepTimes:
    """Return step times learned by earlier workers, or else the figures known for the model on `gpus` GPUs."""
    engine = ports.engine
    key, can = step_time_key(engine, ports.model), engine.capabilities
    prior = prior_step_time(engine.name, engine.device, can.compute, gpus, variant=can.variant)
    step_times = StepTimes(ports.step_times, key, prior, exact=engine.name == "sim")
    await step_times.restore()
    step_times.on_change(engine.set_step_time)
    return step_times


def _source(settings: WorkerSettings, engine: Engine, incarnation: int) -> TelemetrySource:
    can = engine.capabilities
    return TelemetrySource(
        worker_id=settings.id,
        incarnation=incarnation,
        node=settings.node,
        gpus=settings.gpus,
        engine=engine.name,
        compute=can.compute,
        kv_blocks=can.kv_blocks,
        max_sequences=can.max_sequences,
        block_size_tokens=can.block_size_tokens,
        chunk_tokens=can.chunk_tokens,
        group=settings.parallel.group,
    )


def _own(stack: AsyncExitStack, task: "asyncio.Task[None]") -> None:
    """Cancel the task when the stack unwinds, and wait for it. Its owner has reported any failure."""
    stack.push_async_callback(end, task)


def _own_samplers(stack: AsyncExitStack, tasks: TaskOwner, gpus: GpuSampler, cpu_waits: CpuWaitReader | None) -> None:
    _own(stack, tasks.spawn("gpu counters", gpus.run()))
    if cpu_waits is not None:
        _own(stack, tasks.spawn("cpu waits", cpu_waits.run()))


async def _kept(settings: WorkerSettings, ports: WorkerPorts) -> common.Worker | None:
    """Return the role that a person set before; None in a pool, where roles are set with each model."""
    return None if ports.tenancy else await kept_role(ports.registry, settings.id, ports.model.name)


def _host(
    settings: WorkerSettings,
    ports: WorkerPorts,
    clock: Clock,
    *,
    address: str,
    incarnation: int,
    kept: common.Worker | None,
) -> WorkerHost:
    engine, model = ports.engine, ports.model
    identity = common.Worker(
        id=settings.id,
        incarnation=incarnation,
        node=settings.node,
        pid=os.getpid(),
        address=address,
        engine=engine.name,
        device=engine.device,
        gpus=settings.gpus,
        gpu_uuids=settings.gpu_uuids,
        gpu_share=settings.gpu_share,
        nodes=settings.parallel.nodes,
        group=settings.parallel.group,
        capabilities=capabilities_message(engine.capabilities),
        model_revision=model.revision,
        version=release(),
        protocol=PROTOCOL,
        oldest_protocol=OLDEST,
        pool=ports.tenancy.pool() if ports.tenancy else None,
    )
    epoch = ports.tenancy.epoch if ports.tenancy else FIRST_EPOCH
    role, budget_tokens = role_from_name(settings.role, settings.budget_tokens)
    if kept is not None:
        role, budget_tokens = kept.assignment.role, kept.assignment.budget_tokens
    host = WorkerHost(
        engine=engine,
        identity=identity,
        assignment=AssignmentState(model.name, role, budget_tokens, epoch=epoch),
        cluster=settings.cluster,
        clock=clock,
        adapters=frozenset(settings.adapters),
    )
    if kept is not None:
        host.last_change.took_again(kept.role_change, host.assignment.message)
    return host


async def _add_services(
    server: grpc.aio.Server, admin: AdminServicer, host: WorkerHost, kv: KvServicer, settings: WorkerSettings
) -> None:
    pb_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(host), server)  # type: ignore[no-untyped-call]
    kv.add_to(server)
    pb_grpc.add_WorkerAdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values()]
    if is_loopback(settings.listen_address()):  # other workers need no such search
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)


async def beat(host: WorkerHost) -> None:
    """Send heartbeats to gateways until cancelled."""
    gateways, now_s = host.gateways, asyncio.get_running_loop().time
    while True:
        due_s = gateways.beat(now_s())
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await gateways.became_busy.wait()
        gateways.became_busy.clear()
