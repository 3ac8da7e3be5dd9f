"""Composition root of prefill and decode, which are one worker in different first roles."""

import asyncio
from typing import TypeVar

from libs.bus.clients import brokers_of
from libs.bus.kafka import KafkaBus
from libs.engine.factory import make_engine
from libs.engine.port import Engine, EngineIdentity
from libs.engine.vllm.other_nodes import follow
from libs.model.info import ModelInfo, load_model_info
from libs.runtime import status
from libs.runtime.paths import cache_dir
from libs.runtime.service import Service
from libs.stores.kvindex import RedisKvIndex
from libs.stores.registry.redis import RedisRegistry
from libs.stores.steps.files import FileStepTimes
from libs.stores.steps.layered import LayeredStepTimes
from libs.stores.steps.redis import RedisStepTimes
from libs.worker.pool.service import serve_pool
from libs.worker.run import ModelStay, WorkerPorts, run_worker
from libs.worker.settings import WorkerSettings

# Time for a failed worker, such as one whose engine process died, to close its streams and leave the registry.
# Gateways detect anything left after it as they would after a kill.
FAILED_S = 0.8

SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


async def serve_worker(service: Service[SettingsT]) -> None:
    """Run a worker and its companions, or another node's share of one, until the service is stopped."""
    settings = service.settings
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
    )


def _bus(settings: WorkerSettings, service: Service[SettingsT]) -> KafkaBus:
    return KafkaBus(
        brokers_of(settings),
        settings.cluster,
        client_id=settings.id,
        on_failure=service.tasks.fail,
        buffer_records=settings.kafka_buffer_records,
    )
