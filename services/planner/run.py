"""A planner over its ports: what it hears, decides and answers. `app.py` gives it its adapters."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.registry.collector import RegistryCollector
from libs.registry.port import Registry
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport, guarded_transport
from libs.telemetry.split import prefill_shares
from services.planner.actions import Actor
from services.planner.http.api import PlannerCollector, make_api
from services.planner.http.limits_api import LimitsApi, read_limits
from services.planner.http.mode_api import ModeApi
from services.planner.kept import MODES, Lead, PlannerStore
from services.planner.loop import Lease, decide_forever, follow_telemetry, follow_workers, lead_forever
from services.planner.settings import PlannerSettings
from services.planner.state import Identity, PlannerState

log = structlog.get_logger()

MS_NS: Final = 1_000_000
CLOSE_S: Final = 5
"""How long answers may take to end."""


@dataclass(frozen=True, slots=True)
class PlannerPorts:
    """What a planner needs from outside."""

    bus: Bus
    registry: Registry
    store: PlannerStore | None = None
    """Where its mode and limits outlive a restart, and who leads; None: nowhere, and it leads."""


@dataclass(frozen=True, slots=True)
class RunningPlanner:
    """A planner that serves."""

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
    """Serve on a bound socket while the context is open; then `tasks` are to be closed, and after them the ports."""
    metrics = CollectorRegistry()
    transport = transport or guarded_transport(settings, metrics)
    state = PlannerState(
        Identity(settings.id, clock.now_ns(), MODES[settings.mode]),
        prefill_shares,
        lag_ns=settings.lag_ms * MS_NS,
        window_ns=settings.window_ms * MS_NS,
        kept_decisions=settings.kept_decisions,
        tpot_ns=round(settings.tpot_target_ms * MS_NS),
    )
    token = settings.token.get_secret_value()
    actor = Actor(transport, tasks, planner_id=settings.id, token=token)
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
    tasks.spawn("follow telemetry", follow_telemetry(ports.bus, state, clock, news))
    await ports.bus.start()
    modes = ModeApi(state, ports.store, ports.bus, clock, token=token)
    limits = LimitsApi(state, ports.store, ports.bus, clock, token=token)
    lease = Lease(Lead.UNKNOWN if ports.store else Lead.OURS)
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
    app = make_api(state, clock, metrics, modes, limits)
    async with transport.http(app, sock, tasks=tasks, drain_s=CLOSE_S) as url:
        yield RunningPlanner(url, state)


async def settle(store: PlannerStore, state: PlannerState, modes: ModeApi, limits: LimitsApi) -> bool:
    """Keep what was set while the store was away, and take what is kept for the rest; whether the store answered."""
    if not (await modes.keep_again() and await limits.keep_again()):
        return False
    kept = await store.load()
    if kept is None:
        return False
    if kept.mode is not None and kept.mode != state.identity.mode:
        state.take_mode(kept.mode)
    limits.take(read_limits(kept.limits))
    return True
