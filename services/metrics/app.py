"""Wiring of the metrics service."""

from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.kafka import KafkaBus
from libs.runtime import status
from libs.runtime.http import bind, serve_http
from libs.runtime.service import Service
from libs.telemetry.split import prefill_share
from services.metrics.api import make_api
from services.metrics.ingest import ingest
from services.metrics.prometheus import OccupancyCollector, RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState

MS_NS = 1_000_000


async def main(service: Service[MetricsSettings]) -> None:
    """Serve until told to stop."""
    settings, clock = service.settings, service.clock
    lag_ns = settings.lag_ms * MS_NS
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
    registry.register(
        OccupancyCollector(
            state.fleet, state.decisions, lambda: clock.now_ns() - lag_ns, settings.gauge_window_ms * MS_NS
        )
    )
    registry.register(BusCollector(bus))
    try:
        service.tasks.spawn("ingest", ingest(bus, state, clock))
        await bus.start()
        async with serve_http(make_api(state, clock, registry, lag_ns=lag_ns), sock, tasks=service.tasks) as url:
            status.emit("ready", http=url)
            await service.stopping.wait()
    finally:
        await service.tasks.close()  # before what they read from
        sock.close()
        await bus.close()
