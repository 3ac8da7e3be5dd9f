"""The gateway's composition root. It is the only module that constructs the adapters for the gateway's ports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from libs.bus.broker import Copies
from libs.bus.clients import brokers_of
from libs.bus.kafka import KafkaBus
from libs.bus.kafka_work import KafkaWork
from libs.contracts.errors import StartupError
from libs.filestore.local import LocalFiles
from libs.filestore.port import FileStore
from libs.keys.gate import follow_keys, start_keys
from libs.keys.store import open_keys
from libs.runtime import status
from libs.runtime.http import bind
from libs.runtime.linux import give_memory_back
from libs.runtime.paths import cache_dir
from libs.runtime.redis import refuse_cluster
from libs.runtime.service import Service
from libs.stores.catalogue import RedisCatalogue
from libs.stores.kvindex import RedisKvIndex
from libs.stores.limits import RedisLedger
from libs.stores.registry import RedisRegistry
from libs.stores.responses import RedisResponses
from services.gateway.answers.families import FormatNames
from services.gateway.batch.run import BatchPorts
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, open_gateway
from services.gateway.settings import GatewaySettings


async def main(service: Service[GatewaySettings]) -> None:
    """Serve until a stop signal. Then give running requests up to `settings.drain_s` to end."""
    settings, tasks = service.settings, service.tasks
    async with AsyncExitStack() as stack:
        sock = bind(settings.host, settings.port, "FULCRUM_GATEWAY_PORT", stall_s=settings.client_stall_s)
        stack.callback(sock.close)
        store = open_keys(settings.keys, redis=settings.redis, cluster=settings.cluster)
        stack.push_async_callback(store.close)
        table = await start_keys(settings, store, service.clock)
        names = FormatNames(
            settings.reasoning_formats,
            settings.tool_formats,
            templates=settings.chat_templates,
            as_text=settings.tools_as_text,
        )
        catalog = await asyncio.to_thread(load_catalog, settings.models, names, settings.adapters)
        bus = KafkaBus(
            brokers_of(settings),
            settings.cluster,
            settings.id,
            on_failure=tasks.fail,
            buffer_records=settings.kafka_buffer_records,
            copies=Copies(settings.kafka_copies, settings.kafka_in_sync),
        )
        await refuse_cluster(settings.redis)
        registry = RedisRegistry(settings.redis, settings.cluster)
        index = RedisKvIndex(settings.redis, settings.cluster)
        models = RedisCatalogue(settings.redis, settings.cluster) if settings.model_catalogue else None
        if models is not None:
            stack.push_async_callback(models.close)
        ledger = RedisLedger(settings.redis, settings.cluster)
        responses = RedisResponses(settings.redis, settings.cluster)
        for adapter in (bus, registry, index, ledger, responses):
            stack.push_async_callback(adapter.close)
        stack.push_async_callback(tasks.close)  # code that uses the adapters ends before them
        tasks.spawn("bus", bus.start())
        tasks.spawn("memory", give_memory_back())
        tasks.spawn("keys", follow_keys(store, table, service.clock))
        files = await stack.enter_async_context(_open_files(settings))
        batch = BatchPorts(KafkaWork(brokers_of(settings), settings.cluster, settings.id, bus.skipped), files)
        ports = GatewayPorts(bus, registry, index, batch, models, table, ledger, responses=responses, key_store=store)
        opening = open_gateway(
            settings=settings, ports=ports, catalog=catalog, sock=sock, clock=service.clock, tasks=tasks
        )
        gateway = await stack.enter_async_context(opening)
        status.emit("ready", http=gateway.url)
        await service.stopping.wait()


@asynccontextmanager
async def _open_files(settings: GatewaySettings) -> AsyncIterator[FileStore]:
    if not settings.files_s3_bucket:
        folder = settings.files_folder or cache_dir() / "files" / settings.cluster
        yield LocalFiles(Path(folder), max_bytes=settings.files_max_bytes)
        return
    try:
        from libs.filestore.s3 import open_s3  # noqa: PLC0415 (an extra that few installations have)
    except ImportError:
        raise StartupError("FULCRUM_GATEWAY_FILES_S3_BUCKET needs `pip install 'fulcrum-serving[s3]'`") from None
    async with open_s3(
        settings.files_s3_bucket,
        max_bytes=settings.files_max_bytes,
        prefix=settings.files_s3_prefix,
        endpoint=settings.files_s3_endpoint,
        region=settings.files_s3_region,
        access_key=settings.files_s3_access_key.get_secret_value(),
        secret_key=settings.files_s3_secret_key.get_secret_value(),
    ) as files:
        yield files
