"""Composition root of the pool workers in one process."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import grpc.aio

from libs.bus.port import Bus
from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.engine.factory import import_heavy, make_engine
from libs.engine.port import Engine
from libs.engine.sim.gpu import SimGpu
from libs.runtime import status
from libs.runtime.net.rpc import abort_with
from libs.runtime.service import Service
from libs.runtime.tasks import end
from libs.runtime.transport import SystemTransport
from libs.stores.registry.redis import RedisRegistry
from libs.worker.admin.server import OK
from libs.worker.admin.trail import Record, actor_from, audit_changes
from libs.worker.pool.member import MakePorts, PoolMember
from libs.worker.settings import WorkerSettings

Context = grpc.aio.ServicerContext[Any, Any]


class PoolAdminServicer(pb_grpc.WorkerAdminServiceServicer):
    """Describe and AssignModel of a pool worker. Other verbs go to the address of the worker that serves its model."""

    def __init__(self, member: PoolMember, record: Record) -> None:
        self._member = member
        self._record = record

    async def Describe(self, _request: pb.DescribeRequest, _context: Context) -> pb.DescribeResponse:  # noqa: N802
        return pb.DescribeResponse(worker=self._member.worker())

    async def AssignModel(  # noqa: N802
        self, request: pb.AssignModelRequest, context: Context
    ) -> pb.AssignModelResponse:
        """Compare and set the model by epoch. The call returns before the model is loaded."""
        asked = f"{request.model or 'no model'} at epoch {request.expected_epoch}: {request.reason}"
        request.actor = actor_from(context, request.actor)
        try:
            assigned = self._member.assign(request)
        except FulcrumError as error:
            self._record(request.actor, "AssignModel", asked, error.http_status)
            await abort_with(context, error)
            raise
        self._record(request.actor, "AssignModel", asked, OK)
        return assigned


SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


async def serve_pool(service: Service[SettingsT], make_ports: MakePorts, bus: Bus) -> None:
    """Run a worker of the pool and its companions until the service is stopped, then drain.

    `bus` carries the audit trail, whichever model a worker holds.
    """
    settings = service.settings
    names = (settings.id, *settings.companions)
    async with AsyncExitStack() as stack:
        registry = RedisRegistry(settings.redis, settings.cluster)
        stack.push_async_callback(registry.close)
        stack.push_async_callback(bus.close)
        await bus.start()
        # Before anybody can ask for a model: what the first one took would be expected of all others.
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
