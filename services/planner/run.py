"""The planner, built on its ports. `app.py` supplies the adapters."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from libs.actuators.port import Actuator
from libs.bus.port import Bus, BusCollector
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads, GatewayQueues
from libs.contracts.topics import AUDIT, CAPACITY, DECISIONS, LOADS, QUEUES
from libs.keys.audit import AuditMiddleware, changes
from libs.keys.book import Role
from libs.keys.gate import KeyGate, is_public, own_hosts
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport, guarded_transport
from libs.stores.catalogue import ModelCatalogue
from libs.stores.collectors import RegistryCollector
from libs.stores.registry import Registry
from services.planner.executor import OrderExecutor
from services.planner.fleet_view import ReceivedPlans
from services.planner.http.admin import Admin, ModeApi
from services.planner.http.api import PlannerCollector, make_api
from services.planner.http.limits_api import LimitsApi, read_limits
from services.planner.http.roles_api import RolesApi
from services.planner.kept import LEASE_MS, MODES, Lead, LeaderLease, PlannerStore
from services.planner.models.api import no_catalogue
from services.planner.models.run import open_models
from services.planner.scaler import Scaler, ScalerCollector, ScalerSettings
from services.planner.settings import PlannerSettings
from services.planner.state import Identity, PlannerState, decide_forever

log = structlog.get_logger()

REGISTRY_POLL_MS: Final = 1_000
LEAD_EVERY_S: Final = LEASE_MS / 4000
# The minimum time between two new leads. While Redis is partitioned, two planners may both lead. Each would otherwise
# raise its number above the other's several times a second.
OUTRUN_S: Final = 5.0

MS_NS: Final = 1_000_000
# The maximum time for open responses to end at shutdown.
CLOSE_S: Final = 5


@dataclass(frozen=True, slots=True)
class PlannerPorts:
    """The adapters that a planner uses."""

    bus: Bus
    registry: Registry
    store: PlannerStore | None = None
    """The store of mode, limits and lead. Without one, mode and limits last until a restart, and this planner leads."""
    actuators: Sequence[Actuator] = ()
    """The actuators that start and end workers, at most one per model. Without any, the planner only recommends."""
    models: ModelCatalogue | None = None
    """The catalogue of a pool of workers; None if there is no pool."""
    keys: KeyTable | None = None
    """The API keys by which callers are identified; None accepts every caller."""


@dataclass(frozen=True, slots=True)
class RunningPlanner:
    url: str
    state: PlannerState


@asynccontextmanager
async def open_planner(
    *,
    settings: PlannerSettings,
    ports: PlannerPorts,
    sock: socket.socket,
    clock: Clock,
    tasks: TaskOwner,
    transport: Transport | None = None,
) -> AsyncIterator[RunningPlanner]:
    """Serve on a bound socket while the context is open. Afterwards the caller closes `tasks` and then the ports."""
    metrics = CollectorRegistry()
    transport = transport or guarded_transport(settings, metrics)
    state = _state(settings, clock)
    token = settings.token.get_secret_value()
    lease = LeaderLease(Lead.UNKNOWN if ports.store else Lead.OURS)
    actor = OrderExecutor(transport, tasks, planner_id=settings.id, token=token, outrun=lease.was_outrun)
    state.may_ask = actor.may_ask
    if not state.may_ask and state.identity.mode == MODE_AUTO:
        log.warning("no token: the planner recommends and changes nothing; set FULCRUM_TOKEN or FULCRUM_TOKEN_FILE")
    for collector in (
        PlannerCollector(state, clock, actor),
        BusCollector(ports.bus),
        RegistryCollector(ports.registry),
    ):
        metrics.register(collector)
    news = asyncio.Event()
    tasks.spawn("follow workers", follow_workers(ports.registry, ports.bus, state, clock))
    plans = ReceivedPlans(clock)
    tasks.spawn("follow telemetry", follow_telemetry(ports.bus, state, clock, news, plans))
    await ports.bus.start()
    admin = Admin(state, ports.store, ports.bus, clock, token=token, keys=ports.keys)
    modes, limits = ModeApi(admin), LimitsApi(admin)
    if ports.store is not None:
        settling = partial(settle, ports.store, state, modes, limits)
        await settling()
        tasks.spawn("lead", lead_forever(ports.store, state, lease, settling))
    tasks.spawn(
        "decide",
        decide_forever(
            ports.bus, state, clock, period_s=settings.period_ms / 1000, lease=lease, news=news, actor=actor
        ),
    )
    scaler = _scaler(settings, ports, state, plans, clock)
    tasks.spawn("scale", scaler.run())
    metrics.register(ScalerCollector(scaler, state, plans))
    app = make_api(state, clock, metrics, modes, limits)
    app.include_router(RolesApi(admin, actor).router())
    if ports.models is not None:
        app.include_router(
            open_models(
                store=ports.models,
                registry=ports.registry,
                settings=settings,
                state=state,
                admin=admin,
                transport=transport,
                tasks=tasks,
                clock=clock,
                metrics=metrics,
                leads=partial(_leads, lease),
                term=lambda: state.lead_term,
                outrun=lease.was_outrun,
            )
        )
    else:
        app.include_router(no_catalogue())
    served = _behind_keys(app, settings, ports, clock, metrics)
    async with transport.http(served, sock, tasks=tasks, drain_s=CLOSE_S) as url:
        yield RunningPlanner(url, state)


def _state(settings: PlannerSettings, clock: Clock) -> PlannerState:
    return PlannerState(
        Identity(settings.id, clock.now_ns(), MODES[settings.mode]),
        lag_ns=settings.lag_ms * MS_NS,
        window_ns=settings.window_ms * MS_NS,
        kept_decisions=settings.kept_decisions,
        tpot_ns=round(settings.tpot_target_ms * MS_NS),
    )


def _scaler(
    settings: PlannerSettings, ports: PlannerPorts, state: PlannerState, plans: ReceivedPlans, clock: Clock
) -> Scaler:
    return Scaler(
        state,
        ports.bus,
        clock,
        actuators=ports.actuators,
        settings=ScalerSettings(
            start_up_ns=round(settings.start_up_s * 1e9),
            machine_ns=round(settings.machine_start_up_s * 1e9),
            calm_ns=round(settings.scale_calm_s * 1e9),
            linger_ns=round(settings.scale_linger_s * 1e9),
        ),
        store=ports.store,
        plans=plans,
    )


def _behind_keys(
    app: ASGIApp, settings: PlannerSettings, ports: PlannerPorts, clock: Clock, metrics: CollectorRegistry
) -> ASGIApp:
    """Wrap the app in the key check and the audit of changes. Without keys, return the app unchanged."""
    if ports.keys is None:
        return app
    gate = KeyGate(app, ports.keys, clock, need=need, hosts=own_hosts(settings))
    record = partial(ports.bus.publish, AUDIT)
    return AuditMiddleware(gate, ports.keys, clock, service="planner", audited=changes, publish=record, metrics=metrics)


def need(_method: str, path: str) -> Role | None:
    """Return the lowest role that may request a path, or None if everybody may.

    Routes that need a higher role check it themselves.
    """
    return None if is_public(path) else "operator"


def _leads(lease: LeaderLease) -> bool:
    return lease.at(asyncio.get_running_loop().time()) is Lead.OURS


async def settle(store: PlannerStore, state: PlannerState, modes: ModeApi, limits: LimitsApi) -> bool:
    """Store settings that could not be stored before, and adopt all other stored settings.

    Return whether the store answered.
    """
    if not (await modes.keep_again() and await limits.keep_again()):
        return False
    kept = await store.load()
    if kept is None:
        return False
    if kept.mode is not None and kept.mode != state.identity.mode:
        state.take_mode(kept.mode)
    limits.take(read_limits(kept.limits))
    return True


async def lead_forever(
    store: PlannerStore, state: PlannerState, lease: LeaderLease, settle: Callable[[], Awaitable[bool]]
) -> None:
    """Acquire the lead when it is free, renew it, and release it on cancellation.

    `settle` reconciles the stored settings with those in force. It runs when this planner gains the lead, and
    repeatedly while another planner leads. Nothing is decided until it has succeeded.
    """
    loop = asyncio.get_running_loop()
    renewed_s = -math.inf
    who = f"{state.identity.planner_id} {state.identity.incarnation}"
    try:
        while True:
            requested_s, before = loop.time(), lease.at(loop.time())
            if lease.outrun and requested_s >= renewed_s + OUTRUN_S:
                lease.outrun, renewed_s = False, requested_s
                log.warning("a worker has seen a later leader: acquiring the lead again")
                await store.follow(who)
            found = await store.lead(who)
            state.lead_term = store.term
            settled = found is Lead.UNKNOWN or found is before is Lead.OURS or await settle()
            fault = store.lead_fault if settled else "what the planners keep in Redis cannot be read"
            lease.take(found if settled else Lead.UNKNOWN, requested_s, fault)
            await asyncio.sleep(LEAD_EVERY_S)
    finally:
        await store.follow(who)


async def follow_workers(registry: Registry, bus: Bus, state: PlannerState, clock: Clock) -> None:
    """Follow the list of workers and publish their changes of role.

    During an outage of the registry, the last list is used.
    """
    async for workers in registry.watch(poll_ms=REGISTRY_POLL_MS):
        for moved in state.take_workers(workers, clock.now_ns()):
            bus.publish(DECISIONS, moved)


async def follow_telemetry(
    bus: Bus, state: PlannerState, clock: Clock, news: asyncio.Event, plans: ReceivedPlans
) -> None:
    """Record the worker loads, gateway queues and capacity plans that are published from now on.

    The function returns when the bus closes. It sets `news` when more prompts wait at gateways or workers than before.
    """
    async for record in bus.subscribe((LOADS, QUEUES, CAPACITY)):
        if isinstance(record.value, FleetLoads):
            # A burst of a few long prompts waits at workers, because their credits allow it.
            if state.take_loads(record.value, clock.now_ns()):
                news.set()
        elif isinstance(record.value, GatewayQueues) and state.take_queues(record.value, clock.now_ns()):
            news.set()
        elif isinstance(record.value, CapacityPlan):
            plans.take(record.value)
