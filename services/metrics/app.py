"""Wiring of the metrics service."""

from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.kafka import KafkaBus
from libs.bus.port import Bus
from libs.contracts.topics import ALERTS
from libs.runtime import status
from libs.runtime.http import bind, serve_http
from libs.runtime.service import Service
from libs.telemetry.rollups import TIERS
from libs.telemetry.split import prefill_share
from services.metrics.alerts.book import Alert
from services.metrics.alerts.desk import AlertDesk
from services.metrics.alerts.prometheus import AlertCollector
from services.metrics.alerts.webhook import Webhook
from services.metrics.alerts.wire import alert_event
from services.metrics.api import make_api
from services.metrics.history_file import HistoryFile
from services.metrics.hub import Hub
from services.metrics.ingest import ingest
from services.metrics.keeping import Keeper
from services.metrics.live import TICK_NS, tick_forever
from services.metrics.prometheus import LiveCollector, OccupancyCollector, RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.ticks import TickWriter
from services.metrics.traces.book import TraceBook
from services.metrics.traces.otlp import TraceExporter

MS_NS = 1_000_000


async def main(service: Service[MetricsSettings]) -> None:
    """Serve until told to stop."""
    settings, clock = service.settings, service.clock
    lag_ns, live_lag_ns = settings.lag_ms * MS_NS, settings.live_lag_ms * MS_NS
    sock = bind(settings.host, settings.port, "FULCRUM_METRICS_PORT")
    bus = KafkaBus(
        settings.kafka,
        settings.cluster,
        "metrics",
        on_failure=service.tasks.fail,
        buffer_records=settings.kafka_buffer_records,
    )
    registry = CollectorRegistry()
    state = MetricsState(prefill_share, RequestMetrics(registry))
    hub, writer = Hub(), TickWriter(window_ns=TICK_NS, settled_ns=lag_ns)
    registry.register(
        OccupancyCollector(
            state.fleet, state.decisions, lambda: clock.now_ns() - lag_ns, settings.gauge_window_ms * MS_NS
        )
    )
    registry.register(BusCollector(bus))
    registry.register(LiveCollector(hub, state.history))
    desk = AlertDesk(state, settings.alert_limits(), lag_ns=live_lag_ns)
    urls = [url.strip() for url in settings.alert_webhooks.split(",") if url.strip()]
    webhooks = [Webhook(url, desk.book, clock, cluster=settings.cluster) for url in urls]
    desk.tell += [_publisher(bus, settings.id, clock.now_ns()), *(webhook.tell for webhook in webhooks)]
    registry.register(AlertCollector(desk, webhooks))
    takers = [state.take]
    if settings.traces_url:
        book = TraceBook(settings.traces_share)
        exporter = TraceExporter(book, settings.traces_url, clock)
        registry.register(exporter)
        takers.append(book.enter)
        service.tasks.spawn("traces", exporter.run())
    keeper = open_keeper(settings, state)
    try:
        since_unix_ns = None
        if keeper is not None:
            registry.register(keeper)
            since_unix_ns = await keeper.restore()
            service.tasks.spawn("history", keeper.run())
        service.tasks.spawn("ingest", ingest(bus, takers, clock, since_unix_ns=since_unix_ns))
        service.tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=live_lag_ns))
        await bus.start()
        api = make_api(state, hub, desk.book, clock, registry, lag_ns=lag_ns, live_lag_ns=live_lag_ns)
        async with serve_http(api, sock, tasks=service.tasks) as url:
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
