"""A planner over its ports: what it hears, decides and answers. `app.py` gives it its adapters."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.port import Bus
from libs.registry.collector import RegistryCollector
from libs.registry.port import Registry
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport, guarded_transport
from libs.telemetry.split import prefill_shares
from services.planner.actions import Actor
from services.planner.http.api import PlannerCollector, make_api
from services.planner.http.limits_api import LimitsApi, load_limits
from services.planner.http.mode_api import ModeApi
from services.planner.kept import MODES, Lead, PlannerStore
from services.planner.loop import Lease, decide_forever, follow_telemetry, follow_workers, lead_forever
from services.planner.settings import PlannerSettings
from services.planner.state import Identity, PlannerState

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
    mode = await ports.store.load() if ports.store else None
    held = await load_limits(ports.store)
    state = PlannerState(
        Identity(settings.id, clock.now_ns(), mode or MODES[settings.mode]),
        prefill_shares,
        lag_ns=settings.lag_ms * MS_NS,
        window_ns=settings.window_ms * MS_NS,
        kept_decisions=settings.kept_decisions,
        tpot_ns=round(settings.tpot_target_ms * MS_NS),
        limits=held.limits(),
    )
    token = settings.token.get_secret_value()
    actor = Actor(transport, tasks, planner_id=settings.id, token=token)
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
    lease = Lease(Lead.UNKNOWN if ports.store else Lead.OURS)
    if ports.store is not None:
        tasks.spawn("lead", lead_forever(ports.store, state, lease))
    tasks.spawn(
        "decide",
        decide_forever(
            ports.bus, state, clock, period_s=settings.period_ms / 1000, lease=lease, news=news, actor=actor
        ),
    )
    modes = ModeApi(state, ports.store, ports.bus, clock, token=token)
    limits = LimitsApi(state, ports.store, ports.bus, clock, token=token, held=held)
    app = make_api(state, clock, metrics, modes, limits)
    async with transport.http(app, sock, tasks=tasks, drain_s=CLOSE_S) as url:
        yield RunningPlanner(url, state)
