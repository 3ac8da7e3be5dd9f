"""The composition root of the metrics service, the only module that chooses adapters for its ports."""

import os
import secrets
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from libs.bus.local import LocalBus
from libs.bus.port import LiveBus
from libs.contracts.errors import InvalidRequest, StartupError
from libs.keys.gate import follow_keys, start_keys
from libs.keys.store import IN_REDIS, open_keys
from libs.observe.leases import FileLease
from libs.observe.pods import NO_EXTRA
from libs.observe.roles import ActingLease, FleetRoles
from libs.observe.router_roles import RouterRoles
from libs.runtime import status
from libs.runtime.http import bind
from libs.runtime.linux import give_memory_back
from libs.runtime.paths import cache_dir
from libs.runtime.service import Service
from libs.telemetry.rollups import TIERS
from services.metrics.demand.keeping import DemandFile
from services.metrics.history import HistoryFile
from services.metrics.observed.run import ObservedFleet, observe
from services.metrics.run import MetricsPorts, open_metrics
from services.metrics.settings import MetricsSettings

if TYPE_CHECKING:
    from libs.observe.pod_watch import PodFollower


async def main(service: Service[MetricsSettings]) -> None:
    settings, tasks = service.settings, service.tasks
    async with AsyncExitStack() as stack:
        sock = bind(settings.host, settings.port, "FULCRUM_METRICS_PORT")
        stack.callback(sock.close)
        if settings.keys == IN_REDIS:
            from libs.runtime.redis import refuse_cluster  # noqa: PLC0415 (19 MiB, which keys in a file do not need)

            await refuse_cluster(settings.redis)
        bus = _open_bus(service)
        stack.push_async_callback(bus.close)
        store = open_keys(settings.keys, redis=settings.redis, cluster=settings.cluster)
        stack.push_async_callback(store.close)
        table = await start_keys(settings, store, service.clock)
        tasks.spawn("keys", follow_keys(store, table, service.clock))
        tasks.spawn("memory", give_memory_back())
        history, demand = _open_history(settings), _open_demand(settings)
        pods = await _open_pods(settings)
        if pods is not None:
            stack.push_async_callback(pods.close)
        observed = observe(settings, bus, service.clock, pods) if settings.observes else None
        roles = None if observed is None else _open_roles(settings, observed)
        lease = None if roles is None else _open_lease(settings)
        for each in (roles, lease):
            if each is not None:
                stack.push_async_callback(each.close)
        ports = MetricsPorts(bus, history, demand, httpx.AsyncClient, table, observed, roles, lease)
        opening = open_metrics(settings=settings, ports=ports, sock=sock, clock=service.clock, tasks=tasks)
        metrics = await stack.enter_async_context(opening)
        status.emit("ready", http=metrics.url)
        await service.stopping.wait()


async def _open_pods(settings: MetricsSettings) -> "PodFollower | None":
    """List the pods to observe, if there are any. Raise StartupError."""
    query = settings.observed_pods()
    if query is None:
        return None
    try:
        from libs.observe.pod_watch import PodFollower  # noqa: PLC0415 (needs the extra)
    except ImportError:
        raise StartupError(NO_EXTRA) from None
    pods = PodFollower(query, settings.observe_kubeconfig)
    try:
        await pods.begin()
    except InvalidRequest as error:
        await pods.close()
        raise StartupError(error.message) from None
    return pods


def _open_roles(settings: MetricsSettings, observed: ObservedFleet) -> FleetRoles | None:
    """Return the port that changes roles of observed servers; None unless acting is on."""
    query = settings.observed_pods()
    if not settings.observe_act:
        return None
    if query is None:
        return RouterRoles(settings.observe_router, observed.names)
    from libs.observe.pod_roles import PodRoles  # noqa: PLC0415 (needs the extra)

    return PodRoles(query, settings.observe_kubeconfig)


def _open_lease(settings: MetricsSettings) -> ActingLease:
    """Return the lease of the process that acts: a Kubernetes object, or a file for servers behind a router."""
    identity = f"observe-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    query = settings.observed_pods()
    if query is None:
        return FileLease(cache_dir() / "observe", settings.observe_router.rstrip("/"), identity)
    from libs.observe.pod_lease import PodLease  # noqa: PLC0415 (needs the extra)

    return PodLease(query, settings.observe_kubeconfig, identity)


def _open_bus(service: Service[MetricsSettings]) -> LiveBus:
    """Return the suite's bus, or an in-process bus if servers are observed, since these have none."""
    settings = service.settings
    if settings.observes:
        return LocalBus()
    # 3 MiB that observed servers do not need.
    from libs.bus.broker import Copies  # noqa: PLC0415
    from libs.bus.clients import brokers_of  # noqa: PLC0415
    from libs.bus.kafka import KafkaLiveBus  # noqa: PLC0415

    return KafkaLiveBus(
        brokers_of(settings),
        settings.cluster,
        "metrics",
        on_failure=service.tasks.fail,
        buffer_records=settings.kafka_buffer_records,
        copies=Copies(settings.kafka_copies, settings.kafka_in_sync),
        node=settings.node,
    )


def _open_history(settings: MetricsSettings) -> HistoryFile | None:
    """Open the history file if one is set. Raise StartupError if it cannot be used."""
    if not settings.history_file:
        return None
    return HistoryFile(Path(settings.history_file).expanduser(), settings.cluster, TIERS[1:])


def _open_demand(settings: MetricsSettings) -> DemandFile | None:
    """Open the demand file beside the history, if one is set. Raise StartupError if it cannot be used."""
    if not settings.history_file:
        return None
    path = Path(settings.history_file).expanduser()
    return DemandFile(str(path.with_name(f"{path.name}.demand")), settings.cluster)
