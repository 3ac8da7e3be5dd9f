"""The metrics service assembled over its ports; `app.py` supplies the adapters."""

import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from libs.bus.port import Bus, BusCollector, LiveBus, Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import CAPACITY, LOADS, WINDOWS
from libs.keys.table import KeyTable
from libs.observe.roles import ActingLease, FleetRoles
from libs.policy.reading import Gaps, Shares
from libs.policy.verdict.state import VerdictLimits
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport, guarded_transport
from libs.runtime.web import MakeClient
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet_loads import LoadMessageBuilder
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.run import open_alerts
from services.metrics.demand.keeping import DemandFile
from services.metrics.demand.run import DemandService, open_demand
from services.metrics.history import HistoryFile, HistoryKeeper
from services.metrics.http.audit import open_audit
from services.metrics.http.login import AccessControl
from services.metrics.http.planner_routes import PlannerRoutes
from services.metrics.http.routes import make_api
from services.metrics.observed.acting import RoleActor
from services.metrics.observed.routes import reports_router
from services.metrics.observed.run import ObservedFleet
from services.metrics.prometheus import (
    GapCollector,
    LiveCollector,
    OccupancyCollector,
    QueueCollector,
    SharingCollector,
    VerdictCollector,
)
from services.metrics.refill import Partition, Refill
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.sharing import Sharing
from services.metrics.state import MetricsState, Take, ingest, read_from_ns
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.past import StatusRecorder, record_status
from services.metrics.status.report import measured_status
from services.metrics.stream import TICK_NS, Hub, LoadPublisher, TickWriter, tick_forever

if TYPE_CHECKING:
    from services.metrics.traces import TraceExporter

MS_NS: Final = 1_000_000
GATHER_MS, UNREAD_GATHER_MS = 30, 90
"""The milliseconds for which a fetch gathers records: with readers or work, and without. A step is shown within 200 ms.
Every fetch costs this process and the broker half a millisecond.
"""
CLOSE_S: Final = 5
"""The seconds for which open answers may continue at shutdown."""


@dataclass(frozen=True, slots=True)
class MetricsPorts:
    """The ports through which the metrics service reaches the outside."""

    bus: LiveBus
    history: HistoryFile | None = None
    """The history file, closed with the service; None keeps history in memory."""
    demand: DemandFile | None = None
    """The demand file, closed with the service; None keeps demand in memory."""
    make_client: MakeClient | None = None
    """Constructor of clients for webhooks and traces; None disables both, regardless of the settings."""
    keys: KeyTable | None = None
    """API keys of callers; None admits everybody."""
    observed: ObservedFleet | None = None
    """Observed servers, which take the place of a suite."""
    roles: FleetRoles | None = None
    """The port that changes workers' roles; None if the fleet is only observed."""
    lease: ActingLease | None = None
    """The lease of the process that may change roles; set if `roles` is."""
    thread_s: Callable[[], float] = time.thread_time
    """CPU time of the event loop's thread, which paces the filling of gaps. In virtual time it stands still."""


@dataclass(frozen=True, slots=True)
class RunningMetrics:
    url: str
    state: MetricsState
    desk: AlertEvaluator
    gaps: Gaps[Partition]
    hub: Hub
    verdicts: VerdictEvaluator


@asynccontextmanager
async def open_metrics(
    *,
    settings: MetricsSettings,
    ports: MetricsPorts,
    sock: socket.socket,
    clock: Clock,
    tasks: TaskOwner,
    transport: Transport | None = None,
) -> AsyncIterator[RunningMetrics]:
    """Serve on a bound socket while the context is open; at its end `tasks` are closed, then history is written."""
    began_ns, bus = clock.now_ns(), ports.bus
    lag_ns, live_lag_ns = settings.lag_ms * MS_NS, settings.live_lag_ms * MS_NS
    registry = CollectorRegistry()
    access = AccessControl(ports.keys, settings, clock, token=settings.token.get_secret_value())
    transport = transport or guarded_transport(settings, registry)
    sharing, observed = _sharing(settings, bus, began_ns), ports.observed
    state = MetricsState(prefill_shares, RequestMetrics(registry), sharing, observes=observed is not None)
    gaps, hub = Gaps[Partition](), Hub()
    desk = AlertEvaluator(state, settings.alert_limits(), lag_ns=live_lag_ns)
    desk.lost_copies, desk.unreachable_brokers = bus.lost_copies, bus.unreachable_brokers
    verdicts = _verdicts(settings, state, desk, observed)
    refill = Refill(state, gaps, prefill_shares, clock, ports.thread_s)
    alerts = open_alerts(
        settings, bus, desk, clock, began_ns=began_ns, make_client=ports.make_client, guard=access.guard
    )
    demand = open_demand(
        ports.demand, settings, state, desk, clock, guard=access.guard, publish=partial(bus.publish, CAPACITY)
    )
    for collector in (
        *_state_collectors(settings, state, hub, clock, observed),
        BusCollector(bus),
        GapCollector(gaps),
        alerts.collector,
        VerdictCollector(verdicts),
        *demand.collectors,
    ):
        registry.register(collector)
    exporter = _trace_exporter(settings, ports, clock)
    keeper = None if ports.history is None else HistoryKeeper(state, ports.history)
    try:
        takers: list[Take] = [state.take, verdicts.take, *demand.takers]
        if exporter is not None:
            takers.append(_trace(exporter, state, registry, tasks))
        demand.start(tasks)
        kept_from_ns = None if keeper is None else await _resume(keeper, registry, tasks)
        since_ns = read_from_ns(kept_from_ns, began_ns, shared=settings.shared)
        state.requests.begin(since_ns)
        loads = _load_publisher(settings, bus, verdicts, began_ns)
        tasks.spawn("ingest", _reading(state, bus, hub, loads, refill, takers=takers, clock=clock, since_ns=since_ns))
        tasks.spawn("silences", alerts.silencer.follow())
        audit = open_audit(bus, clock, ports.keys, tasks)
        tasks.spawn("refill", refill.run(bus.back_reader))
        writer, recorder = TickWriter(window_ns=TICK_NS, settled_ns=lag_ns), StatusRecorder()
        tasks.spawn("past status", record_status(recorder, partial(measured_status, state, verdicts, desk.book), clock))
        live = tick_forever(state, hub, writer, desk, clock, lag_ns=live_lag_ns, loads=loads, verdicts=verdicts)
        tasks.spawn("live", live)
        await bus.start()
        own = (alerts.router, *demand.routers(), _planner_routes(settings, ports), *access.routers(), audit.router())
        more = (*own, *await _start_observing(ports, settings, access, tasks, demand, verdicts=verdicts, clock=clock))
        make_app = partial(make_api, lag_ns=lag_ns, live_lag_ns=live_lag_ns, verdicts=verdicts, recorder=recorder)
        served = access.before(make_app(state, hub, desk.book, clock, registry, more=more), audit.publish, registry)
        async with transport.http(served, sock, tasks=tasks, drain_s=CLOSE_S) as url:
            alerts.start(settings.public_url or reachable(url), tasks)
            yield RunningMetrics(url, state, desk, gaps, hub, verdicts)
            hub.close()  # open readers would delay shutdown
    finally:
        await tasks.close()
        await demand.close()
        if keeper is not None:
            await keeper.close()


async def _start_observing(
    ports: MetricsPorts,
    settings: MetricsSettings,
    access: AccessControl,
    tasks: TaskOwner,
    demand: DemandService,
    *,
    verdicts: VerdictEvaluator,
    clock: Clock,
) -> Iterable[APIRouter]:
    """Start observing servers if any are set, and return the routes by which they report steps.

    Raise StartupError if their roles are to be changed but cannot be read.
    """
    observed = ports.observed
    if observed is None:
        return ()
    observed.demand.begin(demand.keeper.bin_ns)
    demand.count_also(lambda: observed.demand.take_deltas(observed.models()), tasks)
    await _start_acting(ports, settings, verdicts, clock, tasks)  # first, because a router reports the roles of servers
    observed.start(tasks, settings.observed_file(), settings.dynamo_folder())
    return (reports_router(observed, access.admit_report),)


async def _start_acting(
    ports: MetricsPorts, settings: MetricsSettings, verdicts: VerdictEvaluator, clock: Clock, tasks: TaskOwner
) -> None:
    """Start moving observed servers between roles if that is enabled. Raise StartupError if roles cannot be read."""
    if ports.roles is None or ports.lease is None or ports.observed is None:
        return
    actor = RoleActor(
        ports.roles,
        lambda: verdicts.seen,
        ports.bus.publish,
        clock,
        lease=ports.lease,
        limits=settings.observed_limits(),
        rest_ns=round(settings.observe_rest_s * 1e9),
        on_read=ports.observed.take_roles if settings.observe_router else lambda _: None,
    )
    await actor.begin()
    tasks.spawn("observed roles", actor.run())


async def _resume(keeper: HistoryKeeper, registry: CollectorRegistry, tasks: TaskOwner) -> int | None:
    """Restore the stored history, start keeping it, and return the time that it reaches."""
    registry.register(keeper)
    kept_from_ns = await keeper.restore()
    tasks.spawn("history", keeper.run())
    return kept_from_ns


def reachable(url: str) -> str:
    """Return the URL with this host's name if the service listens on all addresses, since a link to 0.0.0.0 leads
    nowhere.
    """
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):  # noqa: S104 - it is read, not bound
        return url
    return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"


def _planner_routes(settings: MetricsSettings, ports: MetricsPorts) -> APIRouter:
    return PlannerRoutes(
        settings.planner_url,
        ports.make_client,
        token=settings.token.get_secret_value(),
        plaintext=settings.allow_plaintext_token,
    ).router()


def _verdicts(
    settings: MetricsSettings, state: MetricsState, desk: AlertEvaluator, observed: ObservedFleet | None
) -> VerdictEvaluator:
    found = VerdictEvaluator(
        state,
        VerdictLimits(),
        ttft_limit_ns=settings.ttft_deadline_ms * MS_NS,
        tpot_ns=round(settings.tpot_target_ms * MS_NS),
        lag_ns=settings.live_lag_ms * MS_NS,
        observed=observed,
    )
    desk.judged = found.judged
    return found


def _load_publisher(settings: MetricsSettings, bus: Bus, verdicts: VerdictEvaluator, began_ns: int) -> LoadPublisher:
    return LoadPublisher(
        LoadMessageBuilder(settings.id, began_ns),
        partial(bus.publish, LOADS),
        unsent=lambda: bus.stats().buffered,
        targets_ns=verdicts.traffic.requested_targets_ns,
        assessments=verdicts.assessments,
    )


def _reading(
    state: MetricsState,
    bus: LiveBus,
    hub: Hub,
    loads: LoadPublisher,
    refill: Refill,
    *,
    takers: list[Take],
    clock: Clock,
    since_ns: int,
) -> Coroutine[Any, Any, None]:
    """Return the coroutine that reads the topics until it is cancelled."""
    return ingest(
        bus,
        takers,
        clock,
        on_gap=refill.note,
        since_unix_ns=since_ns,
        shares=None if state.sharing is None else state.sharing.shares,
        gather_ms=partial(_gather_ms, hub, loads),
    )


def _gather_ms(hub: Hub, loads: LoadPublisher) -> int:
    return GATHER_MS if hub.readers or loads.works else UNREAD_GATHER_MS


def _state_collectors(
    settings: MetricsSettings, state: MetricsState, hub: Hub, clock: Clock, observed: ObservedFleet | None
) -> list[Collector]:
    occupancy = OccupancyCollector(
        state.fleet,
        state.rollups,
        state.members,
        decisions=state.decisions,
        end_ns=lambda: clock.now_ns() - settings.lag_ms * MS_NS,
        window_ns=settings.gauge_window_ms * MS_NS,
    )
    live = LiveCollector(hub, state.history, lambda: state.age_ns(clock.now_ns()))
    sharing = [] if state.sharing is None else [SharingCollector(state.sharing)]
    servers = [] if observed is None else [observed]
    return [occupancy, QueueCollector(state, clock), live, *sharing, *servers]


def _sharing(settings: MetricsSettings, bus: Bus, began_ns: int) -> Sharing | None:
    if not settings.shared:
        return None
    publish = partial(bus.publish, WINDOWS)
    return Sharing(Shares(settings.id), publish, began_ns=began_ns, unsent=lambda: bus.stats().buffered)


def _trace_exporter(settings: MetricsSettings, ports: MetricsPorts, clock: Clock) -> "TraceExporter | None":
    """Return an exporter if traces are configured."""
    if not settings.traces_url or ports.make_client is None:
        return None
    from services.metrics.traces import TraceBuffer, TraceExporter  # noqa: PLC0415 (OpenTelemetry, 2 MiB)

    return TraceExporter(TraceBuffer(settings.traces_share), settings.traces_url, clock, ports.make_client)


def _trace(exporter: "TraceExporter", state: MetricsState, registry: CollectorRegistry, tasks: TaskOwner) -> Take:
    """Start exporting traces, and return the function that receives requests."""
    registry.register(exporter)
    tasks.spawn("traces", exporter.run())
    book = exporter.book

    def enter(record: Record, now_ns: int) -> None:
        value, sharing = record.value, state.sharing
        if sharing is None or not isinstance(value, RequestEvent) or sharing.makes_trace(value, state.fleet, now_ns):
            book.enter(record, now_ns)

    return enter
