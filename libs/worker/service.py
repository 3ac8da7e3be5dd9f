"""The composition roots of worker processes: a worker with one model, or a worker of a pool."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import grpc.aio

from libs.bus.broker import Copies
from libs.bus.clients import brokers_of
from libs.bus.kafka import KafkaBus
from libs.bus.port import Bus
from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.engine.local import import_heavy, make_engine
from libs.engine.port import Engine, EngineIdentity
from libs.engine.sim import SimGpu
from libs.engine.vllm.core import follow
from libs.model.info import ModelInfo, load_model_info
from libs.runtime import status
from libs.runtime.linux import CpuWaitReader
from libs.runtime.net.rpc import abort_with
from libs.runtime.paths import cache_dir
from libs.runtime.redis import refuse_cluster
from libs.runtime.service import Service
from libs.runtime.tasks import end
from libs.runtime.transport import SystemTransport
from libs.stores.kvindex import RedisKvIndex
from libs.stores.registry import RedisRegistry
from libs.stores.steps import FileStepTimes, LayeredStepTimes, RedisStepTimes
from libs.worker.admin import OK, Record, actor_from, audit_changes
from libs.worker.pool_member import MakePorts, PoolMember
from libs.worker.run import ModelStay, WorkerPorts, run_worker
from libs.worker.settings import WorkerSettings

Context = grpc.aio.ServicerContext[Any, Any]


class PoolAdminServicer(pb_grpc.WorkerAdminServiceServicer):
    """The admin service of a pool worker, with Describe and AssignModel only.

    The worker that serves the model has the other verbs, at its own address.
    """

    def __init__(self, member: PoolMember, record: Record) -> None:
        self._member = member
        self._record = record

    async def Describe(self, _request: pb.DescribeRequest, _context: Context) -> pb.DescribeResponse:  # noqa: N802
        return pb.DescribeResponse(worker=self._member.worker())

    async def AssignModel(  # noqa: N802
        self, request: pb.AssignModelRequest, context: Context
    ) -> pb.AssignModelResponse:
        """Change the model if `expected_epoch` is current. Return before the model is loaded."""
        described = f"{request.model or 'no model'} at epoch {request.expected_epoch}: {request.reason}"
        request.actor = actor_from(context, request.actor)
        try:
            assigned = self._member.assign(request)
        except FulcrumError as error:
            self._record(request.actor, "AssignModel", described, error.http_status)
            await abort_with(context, error)
            raise
        self._record(request.actor, "AssignModel", described, OK)
        return assigned


SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


async def serve_pool(service: Service[SettingsT], make_ports: MakePorts, bus: Bus) -> None:
    """Run a worker of the pool and its companions until the service is stopped, then drain.

    `bus` receives the audit trail of all its models.
    """
    settings = service.settings
    names = (settings.id, *settings.companions)
    async with AsyncExitStack() as stack:
        registry = RedisRegistry(settings.redis, settings.cluster)
        stack.push_async_callback(registry.close)
        stack.push_async_callback(bus.close)
        await bus.start()
        # Before a model can be requested. The first model's load time predicts those of all others, so it must not
        # include imports.
        await asyncio.to_thread(import_heavy, settings.engine)
        sim_gpu = SimGpu() if settings.gpu_share < 1 else None
        members = [
            await _open(
                stack,
                service,
                settings.model_copy(update={"id": name}),
                registry,
                make_ports,
                record=audit_changes(bus, service.clock, name),
                sim_gpu=sim_gpu,
            )
            for name in names
        ]
        await asyncio.gather(*(member.announced.wait() for member in members))
        status.emit("ready", grpc=members[0].address)
        await service.stopping.wait()
        if service.tasks.error is None:
            await asyncio.gather(*(member.drain() for member in members))


async def _open(
    stack: AsyncExitStack,
    service: Service[SettingsT],
    settings: WorkerSettings,
    registry: RedisRegistry,
    make_ports: MakePorts,
    *,
    record: Record,
    sim_gpu: SimGpu | None,
) -> PoolMember:
    def engine(own: WorkerSettings, model: str, size_bytes: int) -> Engine:
        config = own.engine_config(model, weights_bytes=size_bytes)
        return make_engine(own.engine, config, service.clock, sim_gpu=sim_gpu)

    transport = SystemTransport(settings)
    member = PoolMember(
        settings, registry, service.clock, service.tasks, make_engine=engine, make_ports=make_ports, transport=transport
    )
    server, port = transport.server(settings.listen_address())
    servicer = PoolAdminServicer(member, record)
    pb_grpc.add_WorkerAdminServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    member.address = settings.advertised_address(port)
    await server.start()
    stack.push_async_callback(server.stop, None)
    stack.push_async_callback(end, service.tasks.spawn(f"pool {settings.id}", member.run()))
    return member


# The time for a failed worker, for example one whose engine process died, to close its streams and leave the registry.
# After it, gateways notice the loss as they notice a kill.
FAILED_S = 0.8


async def serve_worker(service: Service[SettingsT]) -> None:
    """Run a worker and its companions, or one node's part of an engine, until the service is stopped."""
    settings = service.settings
    await refuse_cluster(settings.redis)
    if settings.pool:
        await serve_pool(
            service,
            lambda own, info, engine, tenancy: _ports(own, service, info, engine, tenancy),
            _bus(settings, service),
        )
        return
    model = load_model_info(settings.model_path, settings.model or None)
    if settings.parallel.node_rank:
        identity = EngineIdentity(settings.id, service.clock.now_ns(), settings.advertised_address(0))
        await follow(settings.engine_config(model.name), identity, service.stopping)
        return
    alike = [settings.model_copy(update={"id": name}) for name in (settings.id, *settings.companions)]
    addresses: list[str] = []

    def ready(address: str) -> None:
        addresses.append(address)
        if len(addresses) == len(alike):
            status.emit("ready", grpc=addresses[0])

    running = [
        asyncio.ensure_future(
            run_worker(
                each, _own_ports(each, service, model), service.clock, service.tasks, service.stopping, ready=ready
            )
        )
        for each in alike
    ]
    try:
        await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _own_ports(settings: WorkerSettings, service: Service[SettingsT], model: ModelInfo) -> WorkerPorts:
    engine = make_engine(settings.engine, settings.engine_config(model.name), service.clock)
    return _ports(settings, service, model, engine)


def _ports(
    settings: WorkerSettings,
    service: Service[SettingsT],
    model: ModelInfo,
    engine: Engine,
    tenancy: ModelStay | None = None,
) -> WorkerPorts:
    return WorkerPorts(
        engine=engine,
        registry=RedisRegistry(settings.redis, settings.cluster),
        kv_index=RedisKvIndex(settings.redis, settings.cluster),
        step_times=LayeredStepTimes(
            (FileStepTimes(cache_dir() / "step-times"), RedisStepTimes(settings.redis, settings.cluster))
        ),
        bus=_bus(settings, service),
        model=model,
        tenancy=tenancy,
        cpu_waits=CpuWaitReader(),
    )


def _bus(settings: WorkerSettings, service: Service[SettingsT]) -> KafkaBus:
    return KafkaBus(
        brokers_of(settings),
        settings.cluster,
        client_id=settings.id,
        on_failure=service.tasks.fail,
        buffer_records=settings.kafka_buffer_records,
        copies=Copies(settings.kafka_copies, settings.kafka_in_sync),
    )
