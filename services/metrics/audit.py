"""The audit trail: its last events from the topic, changes of keys brought there, and the route that shows them."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.topics import AUDIT
from libs.keys.book import KeyChange
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

MAX_EVENTS: Final = 10_000
"""In memory; the topic has more."""
MAX_WORKER_EVENTS: Final = 2_000
"""Of those, changes made at workers: a planner makes them all day, and is not to push out what people did."""
MAX_ANSWERED: Final = 1_000
LOOK_S: Final = 1.0
"""Between two looks for changes of keys."""
Limit = Annotated[int, Query(ge=1, le=MAX_ANSWERED, description="How many events, the newest.")]
Named = Annotated[str, Query(max_length=80, description="Of these alone; empty: of all.")]


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """Who changed what, and what came of it."""

    id: str
    unix_ms: int
    service: str
    actor: str
    tenant: str
    action: str
    detail: str
    status: int


class AuditLog:
    """What one metrics service knows of the trail."""

    def __init__(self, bus: Bus, clock: Clock, keys: KeyTable | None) -> None:
        self._bus = bus
        self._clock = clock
        self._keys = keys
        self._events: dict[str, AuditEvent] = {}
        self._at_workers: deque[str] = deque()

    def publish(self, event: AuditEvent) -> None:
        """Of this service's own door: shown at once, also while the broker is away."""
        self.take(event)
        self._bus.publish(AUDIT, event)

    async def follow(self) -> None:
        """Take what any service records, and what was recorded before this start; ends with the bus."""
        since_ns = max(self._clock.now_ns() - AUDIT.retention_ms * 1_000_000, 0)
        async for record in self._bus.subscribe((AUDIT,), since_unix_ns=since_ns):
            if isinstance(record.value, AuditEvent):
                self.take(record.value)

    async def bring_keys(self) -> None:
        """Changes of keys are made in their store, by a command that need not reach the broker. Until cancelled."""
        brought: tuple[KeyChange, ...] = ()
        while self._keys is not None:
            if self._keys.changes != brought:
                brought = self._keys.changes
                for event in map(key_event, brought):
                    if event.event_id not in self._events:
                        self.publish(event)
            await asyncio.sleep(LOOK_S)

    def take(self, event: AuditEvent) -> None:
        """One event; again what is known changes nothing."""
        if event.event_id in self._events:
            return
        self._events[event.event_id] = event
        if event.service == "worker":
            self._at_workers.append(event.event_id)
            if len(self._at_workers) > MAX_WORKER_EVENTS:
                self._events.pop(self._at_workers.popleft(), None)
        if len(self._events) > MAX_EVENTS:
            del self._events[next(iter(self._events))]

    def newest(self, limit: int, actor: str = "", tenant: str = "") -> list[AuditAnswer]:
        """The newest first."""
        wanted = [
            each
            for each in self._events.values()
            if (not actor or each.actor == actor) and (not tenant or each.tenant == tenant)
        ]
        wanted.sort(key=lambda each: each.at_unix_ns, reverse=True)
        return [_answer(each) for each in wanted[:limit]]

    def router(self) -> APIRouter:
        """`/v1/audit`."""
        router = APIRouter(prefix="/v1")

        @router.get("/audit")
        async def audit(limit: Limit = 100, actor: Named = "", tenant: Named = "") -> list[AuditAnswer]:
            """Changes of keys, limits, roles, models, modes and silences, and what was deleted: the newest first."""
            return self.newest(limit, actor, tenant)

        return router


def open_audit(bus: Bus, clock: Clock, keys: KeyTable | None, tasks: TaskOwner) -> AuditLog:
    """A trail that is followed from now on."""
    found = AuditLog(bus, clock, keys)
    tasks.spawn("audit", found.follow())
    if keys is not None:
        tasks.spawn("audit of keys", found.bring_keys())
    return found


def key_event(change: KeyChange) -> AuditEvent:
    """The event of a change in the book of keys: each instance that records it gives it the same id."""
    return AuditEvent(
        event_id=f"keys-{change.at_unix_ns}-{change.subject}",
        at_unix_ns=change.at_unix_ns,
        service="keys",
        actor=change.actor,
        tenant=change.tenant,
        action=f"{change.action} {change.subject}",
        detail=change.detail,
        status=200,
    )


def _answer(event: AuditEvent) -> AuditAnswer:
    at_ms = event.at_unix_ns // 1_000_000
    return AuditAnswer(
        event.event_id, at_ms, event.service, event.actor, event.tenant, event.action, event.detail, event.status
    )
