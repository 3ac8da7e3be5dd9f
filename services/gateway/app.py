"""The gateway put together: the only place that knows which adapters stand behind the ports."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from importlib.metadata import version

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Hello
from libs.kvindex.redis import RedisKvIndex
from libs.registry.redis import RedisRegistry
from libs.runtime import status
from libs.runtime.http import bind, serve_http
from libs.runtime.rpc import make_channel
from libs.runtime.service import Service
from services.gateway.catalog import load_catalog
from services.gateway.dispatch import Dispatcher
from services.gateway.endpoint import CompletionEndpoint
from services.gateway.fleet import Fleet
from services.gateway.formats import ChatFormat, CompletionFormat
from services.gateway.headers import Defaults
from services.gateway.hints import PrefixHints
from services.gateway.intake import Intake, Limits
from services.gateway.metrics import GatewayMetrics
from services.gateway.parse import parse_chat, parse_completion
from services.gateway.recorder import Recorder
from services.gateway.routes import make_routes
from services.gateway.settings import GatewaySettings

TOKENISE_THREADS = 2


async def main(service: Service[GatewaySettings]) -> None:
    """Serve until told to stop, then let running requests end for a bounded time."""
    settings = service.settings
    sock = bind(settings.host, settings.port, "FULCRUM_GATEWAY_PORT")
    catalog = await asyncio.to_thread(load_catalog, settings.models)
    metrics = GatewayMetrics()
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        threads = stack.enter_context(ThreadPoolExecutor(TOKENISE_THREADS, thread_name_prefix="tokenise"))
        bus = KafkaBus(settings.kafka, settings.cluster, settings.id)
        stack.push_async_callback(bus.close)
        registry = RedisRegistry(settings.redis, settings.cluster)
        stack.push_async_callback(registry.close)
        index = RedisKvIndex(settings.redis, settings.cluster)
        stack.push_async_callback(index.close)
        stack.push_async_callback(service.tasks.close)
        fleet = Fleet(
            hello=Hello(gateway_id=settings.id, cluster=settings.cluster),
            open_channel=lambda address: make_channel(settings, address),
            tasks=service.tasks,
        )
        dispatcher = Dispatcher(
            fleet=fleet,
            clock=service.clock,
            ended=Recorder(bus, metrics).ended,
            max_waiting=settings.max_waiting,
            max_wait_ms=settings.max_wait_ms,
            no_workers_wait_ms=settings.no_workers_wait_ms,
            max_reroutes=settings.max_reroutes,
        )
        intake = Intake(
            catalog=catalog,
            fleet=fleet,
            hints=PrefixHints(index, fleet, service.tasks),
            threads=threads,
            defaults=Defaults(settings.id, settings.ttft_deadline_ms, settings.tpot_target_ms),
            limits=Limits(settings.max_n, settings.max_choices),
        )
        metrics.watch(
            waiting=lambda: dispatcher.waiting,
            live=lambda: dispatcher.live,
            workers=lambda: sum(link.connected for link in fleet.links),
        )
        hot = _hot_routes(service, intake, dispatcher, metrics)
        app = make_routes(hot=hot, catalog=catalog, fleet=fleet, metrics=metrics, version=version("fulcrum"))
        service.tasks.spawn("bus", bus.start())
        service.tasks.spawn("fleet", fleet.follow(registry, dispatcher))
        service.tasks.spawn("expiry", dispatcher.expire())
        async with serve_http(app, sock, drain_s=settings.drain_s) as url:
            status.emit("ready", http=url)
            await service.stopping.wait()


def _hot_routes(
    service: Service[GatewaySettings], intake: Intake, dispatcher: Dispatcher, metrics: GatewayMetrics
) -> dict[str, CompletionEndpoint]:
    return {
        route: CompletionEndpoint(
            route,
            parse=parse,
            make_format=make_format,
            intake=intake,
            dispatcher=dispatcher,
            metrics=metrics,
            clock=service.clock,
            tasks=service.tasks,
            max_body_bytes=service.settings.max_body_bytes,
        )
        for route, parse, make_format in (
            ("/v1/chat/completions", parse_chat, ChatFormat),
            ("/v1/completions", parse_completion, CompletionFormat),
        )
    }
