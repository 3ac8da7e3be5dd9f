"""The planner put together: the only place that knows which adapters stand behind the ports."""

from contextlib import AsyncExitStack

from libs.bus.kafka import KafkaBus
from libs.registry.redis import RedisRegistry
from libs.runtime import status
from libs.runtime.http import bind
from libs.runtime.service import Service
from services.planner.run import PlannerPorts, RunningPlanner, open_planner
from services.planner.settings import PlannerSettings
from services.planner.store import RedisPlannerStore

GATHER_MS = 100
"""Of an idle cluster; every fetch costs this process and the broker half a millisecond."""
BUSY_GATHER_MS = 20
"""Of one that works: a decision is to follow a spike within a quarter of a second."""


async def main(service: Service[PlannerSettings]) -> None:
    """Serve until told to stop."""
    settings, tasks = service.settings, service.tasks
    running: list[RunningPlanner] = []
    async with AsyncExitStack() as stack:
        sock = bind(settings.host, settings.port, "FULCRUM_PLANNER_PORT")
        stack.callback(sock.close)
        bus = KafkaBus(
            settings.kafka,
            settings.cluster,
            settings.id,
            on_failure=tasks.fail,
            buffer_records=settings.kafka_buffer_records,
            gather_ms=lambda: BUSY_GATHER_MS if running and not running[0].state.at_rest else GATHER_MS,
        )
        registry = RedisRegistry(settings.redis, settings.cluster)
        store = RedisPlannerStore(settings.redis, settings.cluster)
        for adapter in (store, registry, bus):
            stack.push_async_callback(adapter.close)
        stack.push_async_callback(tasks.close)  # whatever uses the adapters ends before them
        ports = PlannerPorts(bus, registry, store)
        opening = open_planner(settings=settings, ports=ports, sock=sock, clock=service.clock, tasks=tasks)
        running.append(await stack.enter_async_context(opening))
        status.emit("ready", http=running[0].url)
        await service.stopping.wait()
