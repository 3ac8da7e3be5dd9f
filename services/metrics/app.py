"""Wiring of the metrics service."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.live import KafkaLiveBus
from libs.bus.port import Bus, Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import ALERTS, WINDOWS
from libs.policy.alerts.book import Alert
from libs.runtime import status
from libs.runtime.clock import Clock
from libs.runtime.http import bind, serve_http
from libs.runtime.service import Service
from libs.telemetry.rollups import TIERS
from libs.telemetry.split import prefill_shares
from services.metrics.alerts.desk import AlertDesk
from services.metrics.alerts.prometheus import AlertCollector
from services.metrics.alerts.webhook import Webhook
from services.metrics.alerts.wire import alert_event
from services.metrics.api import make_api
from services.metrics.history_file import HistoryFile
from services.metrics.hub import Hub
from services.metrics.ingest import Take, ingest, read_from_ns
from services.metrics.keeping import Keeper
from services.metrics.live import TICK_NS, tick_forever
from services.metrics.prometheus import LiveCollector, OccupancyCollector, RequestMetrics
from services.metrics.queue_collector import QueueCollector
from services.metrics.refill.gaps import Gaps
from services.metrics.refill.prometheus import GapCollector
from services.metrics.refill.refill import Refill
from services.metrics.settings import MetricsSettings
from services.metrics.sharing.prometheus import SharingCollector
from services.metrics.sharing.shares import Shares
from services.metrics.sharing.sharing import Sharing
from services.metrics.state import MetricsState
from services.metrics.ticks import TickWriter
from services.metrics.traces.book import TraceBook
from services.metrics.traces.otlp import TraceExporter

MS_NS = 1_000_000
GATHER_MS, UNREAD_GATHER_MS = 30, 90
"""Of the 200 within which a step is shown, and while nobody reads the stream; every fetch costs this process and the
broker half a millisecond."""


async def main(service: Service[MetricsSettings]) -> None:
    """Serve until told to stop."""
    settings, clock = service.settings, service.clock
    began_ns = clock.now_ns()
    lag_ns, live_lag_ns = settings.lag_ms * MS_NS, settings.live_lag_ms * MS_NS
    sock = bind(settings.host, settings.port, "FULCRUM_METRICS_PORT")
    hub = Hub()
    bus = _bus(service, hub)
    registry, guard = CollectorRegistry(), settings.http_guard()
    state = MetricsState(prefill_shares, RequestMetrics(registry), _sharing(settings, bus, began_ns))
    gaps = Gaps()
    refill = Refill(state, gaps, prefill_shares, clock)
    writer = TickWriter(window_ns=TICK_NS, settled_ns=lag_ns)
    desk = AlertDesk(state, settings.alert_limits(), lag_ns=live_lag_ns)
    webhooks = _webhooks(settings, desk, clock)
    desk.tell += [_publisher(bus, settings.id, began_ns), *(webhook.tell for webhook in webhooks)]
    for collector in (
        OccupancyCollector(
            state.fleet,
            state.rollups,
            state.members,
            decisions=state.decisions,
            end_ns=lambda: clock.now_ns() - lag_ns,
            window_ns=settings.gauge_window_ms * MS_NS,
        ),
        QueueCollector(state, clock),
        BusCollector(bus),
        LiveCollector(hub, state.history, lambda: state.age_ns(clock.now_ns())),
        GapCollector(gaps),
        AlertCollector(desk, webhooks),
        guard,
    ):
        registry.register(collector)
    takers = [state.take, *_traces(service, state, registry)]
    shares = None
    if state.sharing is not None:
        registry.register(SharingCollector(state.sharing))
        shares = state.sharing.shares
    keeper = open_keeper(settings, state)
    try:
        kept_from_ns = None
        if keeper is not None:
            registry.register(keeper)
            kept_from_ns = await keeper.restore()
            service.tasks.spawn("history", keeper.run())
        since_unix_ns = read_from_ns(kept_from_ns, began_ns, shared=settings.shared)
        state.requests.begin(began_ns if since_unix_ns is None else since_unix_ns)
        reading = ingest(bus, takers, clock, on_gap=refill.note, since_unix_ns=since_unix_ns, shares=shares)
        service.tasks.spawn("ingest", reading)
        service.tasks.spawn("refill", refill.run(bus.back_reader))
        service.tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=live_lag_ns))
        await bus.start()
        api = make_api(state, hub, desk.book, clock, registry, lag_ns=lag_ns, live_lag_ns=live_lag_ns)
        async with serve_http(api, sock, tasks=service.tasks, guard=guard) as url:
            desk.book.runbook_url = f"{settings.public_url or url}/runbook"
            for webhook in webhooks:
                webhook.page_url = settings.public_url or url
                service.tasks.spawn("webhook", webhook.run())
            status.emit("ready", http=url)
            await service.stopping.wait()
            hub.close()  # or its readers would hold up the end of serving
    finally:
        await service.tasks.close()  # before what they read from
        if keeper is not None:
            await keeper.close()
        sock.close()
        await bus.close()


def _bus(service: Service[MetricsSettings], hub: Hub) -> KafkaLiveBus:
    return KafkaLiveBus(
        service.settings.kafka,
        service.settings.cluster,
        "metrics",
        on_failure=service.tasks.fail,
        buffer_records=service.settings.kafka_buffer_records,
        gather_ms=lambda: GATHER_MS if hub.readers else UNREAD_GATHER_MS,
    )


def _sharing(settings: MetricsSettings, bus: Bus, began_ns: int) -> Sharing | None:
    if not settings.shared:
        return None
    publish = partial(bus.publish, WINDOWS)
    return Sharing(Shares(settings.id), publish, began_ns=began_ns, unsent=lambda: bus.stats().buffered)


def _webhooks(settings: MetricsSettings, desk: AlertDesk, clock: Clock) -> list[Webhook]:
    return [Webhook(url, desk.book, clock, cluster=settings.cluster) for url in settings.webhooks()]


def _traces(service: Service[MetricsSettings], state: MetricsState, registry: CollectorRegistry) -> Iterator[Take]:
    """What makes traces of records, where they are wanted; its exporter runs from here on."""
    if not service.settings.traces_url:
        return
    book = TraceBook(service.settings.traces_share)
    exporter = TraceExporter(book, service.settings.traces_url, service.clock)
    registry.register(exporter)
    service.tasks.spawn("traces", exporter.run())

    def enter(record: Record, now_ns: int) -> None:
        value, sharing = record.value, state.sharing
        if sharing is None or not isinstance(value, RequestEvent) or sharing.tells_of(value, state.fleet, now_ns):
            book.enter(record, now_ns)

    yield enter


def _publisher(bus: Bus, metrics_id: str, incarnation: int) -> Callable[[list[Alert]], None]:
    def publish(changed: list[Alert]) -> None:
        for alert in changed:
            bus.publish(ALERTS, alert_event(alert, metrics_id, incarnation))

    return publish


def open_keeper(settings: MetricsSettings, state: MetricsState) -> Keeper | None:
    """Raises StartupError where there is a file and it cannot be used."""
    if not settings.history_file:
        return None
    return Keeper(state, HistoryFile(Path(settings.history_file).expanduser(), settings.cluster, TIERS[1:]))
