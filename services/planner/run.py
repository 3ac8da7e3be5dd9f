"""A planner over its ports: what it hears, decides and answers. `app.py` gives it its adapters."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from libs.bus.collector import BusCollector
from libs.bus.port import Bus
from libs.policy.planner.moves import MoveLimits
from libs.registry.collector import RegistryCollector
from libs.registry.port import Registry
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport, guarded_transport
from libs.telemetry.split import prefill_shares
from services.planner.actions import Actor
from services.planner.api import PlannerCollector, make_api
from services.planner.loop import decide_forever, follow_telemetry, follow_workers
from services.planner.mode import MODES, ModeStore
from services.planner.mode_api import ModeApi
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
    modes: ModeStore | None = None
    """Where its mode outlives a restart; None: nowhere."""


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
    mode = await ports.modes.load() if ports.modes else None
    state = PlannerState(
        Identity(settings.id, clock.now_ns(), mode or MODES[settings.mode]),
        MoveLimits(),
        prefill_shares,
        lag_ns=settings.lag_ms * MS_NS,
        window_ns=settings.window_ms * MS_NS,
        kept_decisions=settings.kept_decisions,
        tpot_ns=round(settings.tpot_target_ms * MS_NS),
    )
    token = settings.token.get_secret_value()
    actor = Actor(transport, tasks, planner_id=settings.id, token=token)
    for collector in (
        PlannerCollector(state, clock, actor),
        BusCollector(ports.bus),
        RegistryCollector(ports.registry),
    ):
        metrics.register(collector)
    tasks.spawn("follow workers", follow_workers(ports.registry, ports.bus, state, clock))
    tasks.spawn("follow telemetry", follow_telemetry(ports.bus, state, clock))
    await ports.bus.start()
    tasks.spawn("decide", decide_forever(ports.bus, state, clock, period_s=settings.period_ms / 1000, actor=actor))
    modes = ModeApi(state, ports.modes, ports.bus, clock, token=token)
    async with transport.http(make_api(state, clock, metrics, modes), sock, tasks=tasks, drain_s=CLOSE_S) as url:
        yield RunningPlanner(url, state)
