"""The gateway, built on its ports: links to workers, the queue and the HTTP API. `app.py` supplies the adapters."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import SystemRandom
from secrets import token_bytes

from fastapi import APIRouter
from starlette.types import ASGIApp

from libs.bus.port import Bus, BusCollector
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Hello
from libs.contracts.protocol import OLDEST, PROTOCOL
from libs.contracts.topics import AUDIT
from libs.dispatch.dispatcher import Bounds, Dispatcher, Ended
from libs.dispatch.generation import Ending, Generation
from libs.dispatch.rounds import Router
from libs.dispatch.suspects import PoisonCollector, Suspects
from libs.engine.kv_blocks import RandomBytes
from libs.keys.audit import AuditMiddleware, deletes
from libs.keys.book import KeyStore
from libs.keys.gate import KeyGate, own_hosts
from libs.keys.table import KeyTable
from libs.policy.gateway.binding import POLICIES
from libs.policy.gateway.order import WaitBounds
from libs.policy.gateway.placement import Attempt
from libs.policy.gateway.view import serves
from libs.runtime.clock import Clock, LoopScheduler, Scheduler
from libs.runtime.linux import USUAL_SLICE_NS, ask_slice
from libs.runtime.release import release
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport, guarded_transport
from libs.stores.catalogue import ModelCatalogue
from libs.stores.kvindex import KvIndex
from libs.stores.limits import Ledger
from libs.stores.registry import Registry
from libs.stores.responses import MemoryResponses, ResponseStore
from services.gateway.batch.run import BatchPorts, Serving, make_batch
from services.gateway.embeddings.exchange import pooled_readers
from services.gateway.embeddings.schema import MAX_INPUTS, POOLED_ROUTES
from services.gateway.fleet import SilenceWatch, WorkerLinks
from services.gateway.images.fetch import FetchBounds, ImageFetcher
from services.gateway.images.files import ImageLimits
from services.gateway.images.hosts import ImageHosts
from services.gateway.link import StreamTraffic
from services.gateway.messages.errors import MessagesDialect, refused_body
from services.gateway.messages.exchange import MessageReader
from services.gateway.messages.schema import MESSAGE_ROUTES
from services.gateway.messages.schema import PATH as MESSAGES_PATH
from services.gateway.metrics import GatewayMetrics, ImageFetchMetrics
from services.gateway.refusals import RefusalCounts, RefusalMiddleware
from services.gateway.request.endpoint import CompletionEndpoint, CompletionReader, Reader
from services.gateway.request.exchange import Stalls
from services.gateway.request.formats import ChatFormat, CompletionFormat
from services.gateway.request.intake import TOKENISE_THREADS, Intake, RequestLimits
from services.gateway.request.limits import PlaceExchange, TenantLimiter
from services.gateway.request.models import LoadableModels
from services.gateway.request.parse import Defaults, parse_chat, parse_completion
from services.gateway.request.prompt import Catalog, PrefixHints
from services.gateway.request.recorder import DemandPublisher, GpuCharge, QueueReporter, Recorder
from services.gateway.responses.exchange import ResponseReader
from services.gateway.responses.request import RESPONSE_ROUTES, StoredResponses, make_responses_router
from services.gateway.routes import cross_origin, make_routes, make_tenant_router, need, token_routes
from services.gateway.settings import GatewaySettings
from services.gateway.turns import IntakeRounds

# The time in which the last bytes of answers may be sent after every request has ended.
CLOSE_S = 1


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    bus: Bus
    registry: Registry
    kv_index: KvIndex
    batch: BatchPorts | None = None
    """Storage for files and batch jobs; None disables both."""
    models: ModelCatalogue | None = None
    """The catalogue of models that are loaded on demand; with None, only the models in the settings are served."""
    keys: KeyTable | None = None
    """The API keys that identify callers; with None, every request is accepted and its credentials are ignored."""
    limits: Ledger | None = None
    """The ledger of the use that all gateways have counted against tenants' limits; None disables limits."""
    key_store: KeyStore | None = None
    """The store in which keys are changed; with None, this gateway cannot change them."""
    responses: ResponseStore | None = None
    """The store of tenants' responses; with None, they are stored in this process's memory."""
    random_bytes: RandomBytes = token_bytes
    """The source of random names for KV blocks. Simulations replace it, because they must be repeatable."""


@dataclass(frozen=True, slots=True)
class RunningGateway:
    url: str
    dispatcher: Dispatcher
    fleet: WorkerLinks
    metrics: GatewayMetrics
    stalls: Stalls


@asynccontextmanager
async def open_gateway(
    *,
    settings: GatewaySettings,
    ports: GatewayPorts,
    catalog: Catalog,
    sock: socket.socket,
    clock: Clock,
    tasks: TaskOwner,
    transport: Transport | None = None,
) -> AsyncIterator[RunningGateway]:
    """Serve on a bound socket while the context is open. Then drain for up to `settings.drain_s`."""
    metrics, refusals = GatewayMetrics(), RefusalCounts()
    transport = transport or guarded_transport(settings, metrics.registry, refusals.turned_away, refused_body)
    fleet = _fleet(settings, ports, transport, metrics, tasks=tasks, clock=clock)
    demand, scheduler = DemandPublisher(ports.bus, settings.id, clock), LoopScheduler(clock, tasks, "expiry")
    limiter = _limiter(ports, clock, settings.id, tasks)
    ended = _ended(ports.bus, metrics, demand, limiter, fleet)
    dispatcher = _dispatcher(settings, fleet, clock, scheduler, ended=ended, keys=ports.keys)
    stalls = Stalls(settings.max_open, max(settings.max_open_body_bytes, settings.max_body_bytes), ports.keys)
    _watch(metrics, ports, dispatcher, fleet, stalls, tasks=tasks)
    with _tokenise_threads() as threads:
        hints = PrefixHints(ports.kv_index, fleet, tasks, threads, max_hold_ms=settings.prefix_wait_ms)
        metrics.watch_index(ports.kv_index, late=lambda: hints.late)
        intake = _intake(settings, catalog, fleet, hints, threads, keys=ports.keys, metrics=metrics)
        models = _models(ports.models, catalog, dispatcher, fleet, settings=settings, clock=clock, tasks=tasks)
        make_endpoint = partial(
            CompletionEndpoint,
            intake=intake,
            dispatcher=dispatcher,
            metrics=metrics,
            clock=clock,
            tasks=tasks,
            stalls=stalls,
            demand=demand,
            max_body_bytes=settings.max_body_bytes,
            models=models,
            limits=limiter,
            rounds=IntakeRounds(ports.keys),
        )
        kept = _kept_responses(settings, ports, clock)
        serving = Serving(catalog.names, intake, dispatcher, fleet, metrics, models)
        batch = make_batch(ports.batch, serving, settings, clock, keys=ports.keys, limiter=limiter)
        app = make_routes(
            hot=_hot_routes(make_endpoint, kept) | token_routes(intake, catalog, stalls, settings.max_body_bytes),
            routers=[*([batch.router] if batch else ()), make_responses_router(kept), *_tenants(ports, clock)],
            catalog=catalog,
            fleet=fleet,
            draining=lambda: dispatcher.draining,
            metrics=metrics,
            version=release(),
            loadable=models,
            declared=(*RESPONSE_ROUTES, *MESSAGE_ROUTES, *POOLED_ROUTES),
        )
        tasks.spawn("fleet", fleet.follow(ports.registry, dispatcher))
        scheduler.at(clock.now_ns(), dispatcher.watch_time)
        tasks.spawn("stalls", stalls.sweep())
        reporter = QueueReporter(ports.bus, dispatcher, refusals, settings.id, clock)
        tasks.spawn("queues", reporter.run())
        tasks.spawn("demand", demand.run())
        tasks.spawn("silence", SilenceWatch(fleet, metrics, settings.silent_after_ms, settings.max_silent_ms).run())
        guarded = _guarded(app, settings, ports, clock, metrics=metrics, refusals=refusals)
        http = transport.http(guarded, sock, tasks=tasks, drain_s=CLOSE_S)
        async with http as url, _sharing_places(dispatcher, ports, settings.id, tasks), AsyncExitStack() as jobs:
            if batch:
                await jobs.enter_async_context(batch.running(tasks))
            yield RunningGateway(url, dispatcher, fleet, metrics, stalls)
            # Concurrently, because leaving the Kafka broker takes time that running requests need.
            await asyncio.gather(drain(dispatcher, settings.drain_s), jobs.aclose())
            reporter.leave()
            demand.leave()


def _fleet(
    settings: GatewaySettings,
    ports: GatewayPorts,
    transport: Transport,
    metrics: GatewayMetrics,
    *,
    tasks: TaskOwner,
    clock: Clock,
) -> WorkerLinks:
    return WorkerLinks(
        hello=Hello(gateway_id=settings.id, cluster=settings.cluster, protocol=PROTOCOL, oldest_protocol=OLDEST),
        transport=transport,
        traffic=StreamTraffic(metrics),
        tasks=tasks,
        clock=clock,
        tpot_ns=settings.tpot_target_ms * 1e6,
        early_decodes=settings.early_decodes,
        random_bytes=ports.random_bytes,
    )


def _tokenise_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        TOKENISE_THREADS, thread_name_prefix="tokenise", initializer=ask_slice, initargs=(USUAL_SLICE_NS,)
    )


def _tenants(ports: GatewayPorts, clock: Clock) -> list[APIRouter]:
    if ports.keys is None or ports.key_store is None:
        return []
    return [make_tenant_router(ports.key_store, ports.keys, clock)]


def _kept_responses(settings: GatewaySettings, ports: GatewayPorts, clock: Clock) -> StoredResponses:
    store = ports.responses or MemoryResponses(lambda: clock.now_ns() / 1e9)
    return StoredResponses(store, settings.responses_keep_s, str if ports.keys is None else ports.keys.home)


def _intake(
    settings: GatewaySettings,
    catalog: Catalog,
    fleet: WorkerLinks,
    hints: PrefixHints,
    threads: ThreadPoolExecutor,
    *,
    keys: KeyTable | None,
    metrics: GatewayMetrics,
) -> Intake:
    fetcher = ImageFetcher(
        ImageHosts.parse(settings.image_hosts),
        FetchBounds(settings.max_image_bytes, settings.image_fetch_s, settings.image_redirects, settings.image_fetches),
        ImageFetchMetrics(metrics.registry),
        tenants=keys,
    )
    intake = Intake(
        catalog=catalog,
        fleet=fleet,
        hints=hints,
        threads=threads,
        defaults=Defaults(
            settings.id,
            settings.ttft_deadline_ms,
            settings.tpot_target_ms,
            {name: (each.ttft_ms, each.tpot_ms) for name, each in settings.class_targets.items()},
        ),
        limits=RequestLimits(
            settings.max_n,
            settings.max_choices,
            min(MAX_INPUTS, settings.max_waiting),
            ImageLimits(settings.max_images, settings.max_image_bytes, settings.max_image_pixels),
        ),
        cache_salt=str if keys is None else keys.cache_salt,
        tenants=keys,
        fetcher=fetcher,
    )
    slots = {"tokenise": intake.tokenising, "schemas": intake.schemas.slots, "image-fetches": fetcher.slots}
    metrics.watch_slots(slots)
    return intake


def _dispatcher(
    settings: GatewaySettings,
    fleet: WorkerLinks,
    clock: Clock,
    scheduler: Scheduler,
    *,
    ended: Ended,
    keys: KeyTable | None,
) -> Dispatcher:
    return Dispatcher(
        links=fleet,
        router=Router(POLICIES[settings.routing]()),
        clock=clock,
        scheduler=scheduler,
        ended=ended,
        suspects=Suspects(clock, settings.poison_s, quiet=partial(_quiet, fleet)),
        bounds=Bounds(
            max_waiting=settings.max_waiting,
            wait_bounds=WaitBounds(settings.max_wait_ms, settings.no_workers_wait_ms),
            max_reroutes=settings.max_reroutes,
        ),
        tenants=keys,
    )


def _guarded(
    app: ASGIApp,
    settings: GatewaySettings,
    ports: GatewayPorts,
    clock: Clock,
    *,
    metrics: GatewayMetrics,
    refusals: RefusalCounts,
) -> ASGIApp:
    """Wrap the app in middleware, from the inside out: key check, audit of deletions, Anthropic's format, CORS, refusal
    counts.

    The key check and the audit are added only if there are keys, CORS only if origins are configured.
    """
    served = app
    if ports.keys is not None:
        gate = KeyGate(app, ports.keys, clock, need=need, hosts=own_hosts(settings))
        record = partial(ports.bus.publish, AUDIT)
        served = AuditMiddleware(
            gate,
            ports.keys,
            clock,
            service="gateway",
            audited=deletes,
            publish=record,
            with_body=False,
            metrics=metrics.registry,
        )
    served = MessagesDialect(served)
    served = cross_origin(served, settings.cors_origins) if settings.cors_origins else served
    return RefusalMiddleware(served, refusals)


def _limiter(ports: GatewayPorts, clock: Clock, gateway_id: str, tasks: TaskOwner) -> TenantLimiter | None:
    """Start the task that exchanges usage with the ledger and return the limiter, or None if limits are disabled."""
    if ports.keys is None or ports.limits is None:
        return None
    limiter = TenantLimiter(ports.keys, ports.limits, clock, gateway_id)
    tasks.spawn("limits", limiter.run())
    return limiter


@asynccontextmanager
async def _sharing_places(
    dispatcher: Dispatcher, ports: GatewayPorts, gateway_id: str, tasks: TaskOwner
) -> AsyncIterator[None]:
    """Share tenants' decode places with other gateways until the context ends. Do nothing without keys or a ledger."""
    if ports.keys is None or ports.limits is None:
        yield
        return
    places = PlaceExchange(dispatcher, ports.limits, ports.keys, gateway_id)
    tasks.spawn("places", places.run())
    yield
    await places.leave()


def _models(
    store: ModelCatalogue | None,
    catalog: Catalog,
    dispatcher: Dispatcher,
    fleet: WorkerLinks,
    *,
    settings: GatewaySettings,
    clock: Clock,
    tasks: TaskOwner,
) -> LoadableModels | None:
    """Start the tasks that follow the catalogue and report use to it, and make the dispatcher consult it.

    Return None without a catalogue.
    """
    if store is None:
        return None
    loadable = LoadableModels(
        store,
        catalog,
        clock,
        gateway_id=settings.id,
        max_wait_s=settings.max_model_wait_ms / 1000,
        waiting=dispatcher.waiting_for,
        served=lambda name: serves(fleet.views(), name),
        draw=SystemRandom().random,
    )
    dispatcher.cold = loadable
    tasks.spawn("model catalogue", loadable.follow())
    tasks.spawn("model use", loadable.report())
    return loadable


def _quiet(fleet: WorkerLinks, attempt: Attempt) -> bool:
    link = fleet.link(attempt.worker)
    return link is not None and link.quiet(attempt.sequence_id)


def _ended(
    bus: Bus, metrics: GatewayMetrics, demand: DemandPublisher, limiter: TenantLimiter | None, fleet: WorkerLinks
) -> Ended:
    """Return a callback for ended choices.

    It calls the recorder, the demand publisher and, with limits, the GPU time charge.
    """
    hearers: list[Ended] = [Recorder(bus, metrics).ended, demand.ended]
    if limiter is not None:
        hearers.append(GpuCharge(limiter, fleet).ended)

    def ended(generation: Generation, outcome: Ending) -> None:
        for hear in hearers:
            hear(generation, outcome)

    return ended


def _watch(
    metrics: GatewayMetrics,
    ports: GatewayPorts,
    dispatcher: Dispatcher,
    fleet: WorkerLinks,
    stalls: Stalls,
    *,
    tasks: TaskOwner,
) -> None:
    metrics.watch_registry(ports.registry)
    metrics.registry.register(BusCollector(ports.bus))
    metrics.registry.register(PoisonCollector(dispatcher.suspects))
    metrics.watch(
        waiting=lambda: dispatcher.waiting,
        late=lambda: dispatcher.late,
        live=lambda: dispatcher.live,
        workers=lambda: sum(link.connected for link in fleet.links),
        unpaired=lambda: len(fleet.unpaired),
        legs=lambda: sum(len(link.running) + link.decode.reserved for link in fleet.links),
        tasks=lambda: len(tasks),
        open_requests=lambda: len(stalls),
        body_bytes=lambda: stalls.body_bytes,
    )


def _hot_routes(make_endpoint: Callable[..., CompletionEndpoint], kept: StoredResponses) -> dict[str, ASGIApp]:
    readers: dict[str, Reader] = {
        "/v1/chat/completions": CompletionReader(parse_chat, ChatFormat),
        "/v1/completions": CompletionReader(parse_completion, CompletionFormat),
        "/v1/responses": ResponseReader(kept),
        MESSAGES_PATH: MessageReader(),
        **pooled_readers(),
    }
    return {path: make_endpoint(path, reader=reader) for path, reader in readers.items()}


async def drain(dispatcher: Dispatcher, timeout_s: float) -> None:
    """Refuse new requests and wait until all others end. After `timeout_s`, fail the rest."""
    idle = asyncio.Event()
    dispatcher.drain(idle.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await idle.wait()
    dispatcher.stop()
