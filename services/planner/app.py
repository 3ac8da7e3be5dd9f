"""Wiring of the planner."""

from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.kafka import KafkaBus
from libs.registry.collector import RegistryCollector
from libs.registry.redis import RedisRegistry
from libs.runtime import status
from libs.runtime.http import bind, serve_http
from libs.runtime.service import Service
from libs.telemetry.split import prefill_shares
from services.planner.api import PlannerCollector, make_api
from services.planner.core import Limits
from services.planner.loop import decide_forever, follow_telemetry, follow_workers
from services.planner.mode import MODES, ModeStore
from services.planner.mode_api import ModeApi
from services.planner.settings import PlannerSettings
from services.planner.state import Identity, PlannerState

MS_NS = 1_000_000
GATHER_MS = 100
"""Of a decision's quarter of a second; every fetch costs this process and the broker half a millisecond."""


async def main(service: Service[PlannerSettings]) -> None:
    """Serve until told to stop."""
    settings, clock, tasks = service.settings, service.clock, service.tasks
    sock = bind(settings.host, settings.port, "FULCRUM_PLANNER_PORT")
    bus = KafkaBus(
        settings.kafka,
        settings.cluster,
        settings.id,
        on_failure=tasks.fail,
        buffer_records=settings.kafka_buffer_records,
        gather_ms=lambda: GATHER_MS,
    )
    registry = RedisRegistry(settings.redis, settings.cluster)
    modes = ModeStore(settings.redis, settings.cluster)
    mode = await modes.load() or MODES[settings.mode]
    state = PlannerState(
        Identity(settings.id, clock.now_ns(), mode),
        Limits(),
        prefill_shares,
        lag_ns=settings.lag_ms * MS_NS,
        window_ns=settings.window_ms * MS_NS,
        kept_decisions=settings.kept_decisions,
    )
    metrics = CollectorRegistry()
    metrics.register(PlannerCollector(state, clock))
    metrics.register(BusCollector(bus))
    guard = settings.http_guard()
    metrics.register(guard)
    metrics.register(RegistryCollector(registry))
    try:
        tasks.spawn("follow workers", follow_workers(registry, bus, state, clock))
        tasks.spawn("follow telemetry", follow_telemetry(bus, state, clock))
        await bus.start()
        tasks.spawn("decide", decide_forever(bus, state, clock, period_s=settings.period_ms / 1000))
        modes_api = ModeApi(state, modes, bus, clock, token=settings.token.get_secret_value())
        async with serve_http(make_api(state, clock, metrics, modes_api), sock, tasks=tasks, guard=guard) as url:
            status.emit("ready", http=url)
            await service.stopping.wait()
    finally:
        await tasks.close()  # before what they read from
        sock.close()
        await bus.close()
        await registry.close()
        await modes.close()
