"""The planner's composition root. It is the only module that constructs the adapters for the planner's ports."""

from contextlib import AsyncExitStack

from libs.actuators.port import Actuator
from libs.bus.broker import Copies
from libs.bus.clients import brokers_of
from libs.bus.kafka import KafkaBus
from libs.keys.gate import follow_keys, start_keys
from libs.keys.store import open_keys
from libs.runtime import status
from libs.runtime.http import bind
from libs.runtime.redis import refuse_cluster
from libs.runtime.service import Service
from libs.stores.catalogue import RedisCatalogue
from libs.stores.registry import RedisRegistry
from services.planner.run import PlannerPorts, RunningPlanner, open_planner
from services.planner.settings import PlannerSettings
from services.planner.store import RedisPlannerStore

# The interval between fetches in an idle cluster. Each fetch costs the planner and the broker half a millisecond.
GATHER_MS = 100
# The interval between fetches under load, so that a decision follows a spike within a quarter of a second.
BUSY_GATHER_MS = 20


def make_actuators(settings: PlannerSettings) -> list[Actuator]:
    if settings.actuator == "process":
        from libs.actuators.process import ProcessActuator  # noqa: PLC0415 (what only some planners need)

        return [ProcessActuator(settings.actuator_url, settings.token.get_secret_value())]
    if settings.actuator == "docker":
        from libs.actuators.docker import DockerActuator  # noqa: PLC0415

        return [
            DockerActuator(
                service=settings.actuator_service, most=settings.actuator_most, engine_url=settings.actuator_url
            )
        ]
    if settings.actuator == "kubernetes":
        from libs.actuators.kubernetes import KubernetesActuator  # noqa: PLC0415

        return [
            KubernetesActuator(deployment=each.strip(), most=settings.actuator_most, kubeconfig=settings.actuator_url)
            for each in settings.actuator_service.split(",")
        ]
    return []


async def main(service: Service[PlannerSettings]) -> None:
    settings, tasks = service.settings, service.tasks
    running: list[RunningPlanner] = []
    async with AsyncExitStack() as stack:
        sock = bind(settings.host, settings.port, "FULCRUM_PLANNER_PORT")
        stack.callback(sock.close)
        bus = KafkaBus(
            brokers_of(settings),
            settings.cluster,
            settings.id,
            on_failure=tasks.fail,
            buffer_records=settings.kafka_buffer_records,
            copies=Copies(settings.kafka_copies, settings.kafka_in_sync),
            gather_ms=lambda: BUSY_GATHER_MS if running and not running[0].state.at_rest else GATHER_MS,
        )
        await refuse_cluster(settings.redis)
        registry = RedisRegistry(settings.redis, settings.cluster)
        store = RedisPlannerStore(settings.redis, settings.cluster)
        actuators = make_actuators(settings)
        models = RedisCatalogue(settings.redis, settings.cluster) if settings.model_catalogue else None
        if models is not None:
            stack.push_async_callback(models.close)
        for adapter in (store, registry, bus):
            stack.push_async_callback(adapter.close)
        for actuator in actuators:
            stack.push_async_callback(actuator.close)
        keys = open_keys(settings.keys, redis=settings.redis, cluster=settings.cluster)
        stack.push_async_callback(keys.close)
        stack.push_async_callback(tasks.close)  # whatever uses the adapters ends before them
        table = await start_keys(settings, keys, service.clock)
        tasks.spawn("keys", follow_keys(keys, table, service.clock))
        ports = PlannerPorts(bus, registry, store, actuators, models, table)
        opening = open_planner(settings=settings, ports=ports, sock=sock, clock=service.clock, tasks=tasks)
        running.append(await stack.enter_async_context(opening))
        status.emit("ready", http=running[0].url)
        await service.stopping.wait()
