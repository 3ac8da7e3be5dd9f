"""The audit trail: its last events from the topic, the changes of keys that are published to it, and the route that
lists them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query

from libs.bus.clients import CONNECTION_ERRORS
from libs.bus.port import LiveBus
from libs.contracts.errors import QueueFull, StoreUnavailable
from libs.contracts.foreign_text import masked
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.topics import AUDIT
from libs.keys.audit import changed_nothing
from libs.keys.book import KeyChange
from libs.keys.table import SUITE_TOKEN, KeyTable
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

Group = Literal["operators", "users", "planner"]
"""The kind of actor: operators of the suite, tenants at gateways, or a planner at workers."""
MAX_CHANGES: Final[Mapping[Group, int]] = {"operators": 4_500, "users": 2_500, "planner": 2_000}
"""The maximum number of changes held in memory per group; the topic holds more. No group displaces another's events."""
MAX_REFUSED: Final[Mapping[Group, int]] = {"operators": 400, "users": 400, "planner": 200}
"""The maximum number of refused requests held in memory per group."""
MAX_TENANTS: Final = 10_000
"""The maximum number of tenants whose dropped events are tracked individually."""
MAX_ANSWERED: Final = 1_000
READ_RECORDS: Final = 2_000
"""Records read from the topic at a time, newest first."""
MAX_READ_RECORDS: Final = 50_000
"""The maximum number of records read for one answer; the next page continues from there."""
MAX_READERS: Final = 2
"""The maximum number of readers of the topic at once; each has a connection of its own."""
READ_S: Final = 10.0
LOOK_S: Final = 1.0
"""The interval between two checks for changes of keys."""
_KEY_ID: Final = "key_"
Limit = Annotated[int, Query(ge=1, le=MAX_ANSWERED, description="The number of events to list, newest first.")]
Named = Annotated[str, Query(max_length=200, description="Only these; all if empty.")]
Since = Annotated[int | None, Query(ge=0, le=2**53, description="Read the topic back to this time, Unix ms.")]
Before = Annotated[int | None, Query(ge=0, le=2**62, description="With since: `next` of the previous page.")]


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """A change with its actor and outcome.

    `repeats` counts further requests of the actor that were refused with the same status in the minute before.
    """

    id: str
    unix_ms: int
    service: str
    actor: str
    tenant: str
    role: str
    action: str
    detail: str
    status: int
    repeats: int


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Events, the newest first.

    `older` says whether others may exist that were not read or are not shown. No event after `complete_since_unix_ms`
    is missing. `next` is where the next page begins if this one was read from the topic; null at the end.
    """

    events: list[AuditAnswer]
    older: bool
    complete_since_unix_ms: int
    next: int | None = None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    actor: str = ""
    tenant: str = ""
    refused: bool = False

    def has(self, event: AuditEvent) -> bool:
        """Return whether the event matches. An actor matches regardless of the name given with it."""
        return (
            changed_nothing(event.status) == self.refused
            and self.actor in ("", event.actor, event.actor.partition(" ")[0])
            and self.tenant in ("", event.tenant)
        )


class RecentEvents:
    """The newest events of one group. When there are too many, the tenant with the most loses its oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_tenant: dict[str, dict[str, AuditEvent]] = {}
        self._count = 0
        self._given_up_ns: dict[str, int] = {}
        """The time of the newest dropped event, by tenant."""
        self._others_given_up_ns = 0

    def take(self, event: AuditEvent) -> None:
        """Add an event; duplicates are ignored."""
        own = self._by_tenant.setdefault(event.tenant, {})
        if event.event_id in own:
            return
        own[event.event_id] = event
        self._count += 1
        if self._count > self._most:
            self._give_up()

    def _give_up(self) -> None:
        tenant, own = max(self._by_tenant.items(), key=lambda each: len(each[1]))
        oldest = own.pop(next(iter(own)))
        self._count -= 1
        if not own:
            del self._by_tenant[tenant]
        if len(self._given_up_ns) >= MAX_TENANTS and tenant not in self._given_up_ns:
            other = next(iter(self._given_up_ns))
            self._others_given_up_ns = max(self._others_given_up_ns, self._given_up_ns.pop(other))
        self._given_up_ns[tenant] = max(self._given_up_ns.get(tenant, 0), oldest.at_unix_ns)

    def found(self, wanted: AuditFilter) -> list[AuditEvent]:
        """Return the matching events in no particular order."""
        return [each for own in self._by_tenant.values() for each in own.values() if wanted.has(each)]

    def has(self, event: AuditEvent) -> bool:
        return event.event_id in self._by_tenant.get(event.tenant, ())

    def given_up_ns(self, tenant: str) -> int:
        """Return the time of the newest dropped event of a tenant, or of any if `tenant` is empty; 0 if none was
        dropped.
        """
        known = [self._given_up_ns.get(tenant, 0)] if tenant else list(self._given_up_ns.values())
        return max(self._others_given_up_ns, *known, 0)


class AuditLog:
    """The audit trail as one metrics service holds it."""

    def __init__(self, bus: LiveBus, clock: Clock, keys: KeyTable | None) -> None:
        self._bus = bus
        self._clock = clock
        self._keys = keys
        self._changes = {group: RecentEvents(most) for group, most in MAX_CHANGES.items()}
        self._refused = {group: RecentEvents(most) for group, most in MAX_REFUSED.items()}
        self._readers = 0

    def publish(self, event: AuditEvent) -> None:
        """Publish an event of this service, which is listed at once, even while the broker is unreachable."""
        self.take(event)
        self._bus.publish(AUDIT, event)

    async def follow(self) -> None:
        """Read every service's events, from before this start on, until the bus ends."""
        since_ns = max(self._clock.now_ns() - AUDIT.retention_ms * 1_000_000, 0)
        async for record in self._bus.subscribe((AUDIT,), since_unix_ns=since_ns):
            if isinstance(record.value, AuditEvent):
                self.take(record.value)

    async def bring_keys(self) -> None:
        """Publish changes of keys until cancelled.

        They are made in the key store, by a command that need not reach the broker.
        """
        brought: tuple[KeyChange, ...] = ()
        while self._keys is not None:
            if self._keys.changes != brought:
                before, brought = frozenset(brought), self._keys.changes
                for event in (key_event(each) for each in brought if each not in before):
                    if not self._kept(event).has(event):
                        self.publish(event)
            await asyncio.sleep(LOOK_S)

    def take(self, event: AuditEvent) -> None:
        """Add an event; duplicates are ignored."""
        self._kept(event).take(event)

    def _kept(self, event: AuditEvent) -> RecentEvents:
        return (self._refused if changed_nothing(event.status) else self._changes)[group_of(event)]

    def newest(self, limit: int, wanted: AuditFilter = AuditFilter()) -> AuditPage:
        """Return a page of the events in memory."""
        groups = (self._refused if wanted.refused else self._changes).values()
        found = [event for group in groups for event in group.found(wanted)]
        found.sort(key=lambda each: each.at_unix_ns, reverse=True)
        given_up_ns = max(group.given_up_ns(wanted.tenant) for group in groups)
        if len(found) > limit:
            given_up_ns = max(given_up_ns, found[limit].at_unix_ns)
        since_ms = given_up_ns // 1_000_000 + 1 if given_up_ns else 0
        return AuditPage([_answer(each) for each in found[:limit]], bool(given_up_ns), since_ms)

    async def read_back(self, limit: int, wanted: AuditFilter, since_ms: int, before: int | None) -> AuditPage:
        """Return the matching events of the topic, from the newest back to a time.

        Raise QueueFull if too many readers do so now, and StoreUnavailable if the broker does not answer.
        """
        if self._readers >= MAX_READERS:
            raise QueueFull("too many readers of the audit trail: try again", retry_after_s=READ_S)
        self._readers += 1
        try:
            async with asyncio.timeout(READ_S):
                return await self._read_back(limit, wanted, since_ms * 1_000_000, before)
        except CONNECTION_ERRORS:
            raise StoreUnavailable("the broker, which has older records, does not answer", retry_after_s=2.0) from None
        finally:
            self._readers -= 1

    async def _read_back(self, limit: int, wanted: AuditFilter, since_ns: int, before: int | None) -> AuditPage:
        found: list[tuple[int, AuditEvent]] = []
        oldest_ns = self._clock.now_ns()
        async with self._bus.back_reader() as reader:
            held = await reader.held(AUDIT, 0)
            end = held.end if before is None else min(before, held.end)
            stop = max(held.start, end - MAX_READ_RECORDS)
            while end > stop and len(found) <= limit and oldest_ns >= since_ns:
                start = max(stop, end - READ_RECORDS)
                read = [each async for each in reader.between(AUDIT, 0, start, end)]
                for record in reversed(read):
                    if isinstance(record.value, AuditEvent):
                        oldest_ns = min(oldest_ns, record.value.at_unix_ns)
                        if record.value.at_unix_ns >= since_ns and wanted.has(record.value):
                            found.append((record.offset, record.value))
                end = start
        if len(found) > limit:
            after: int | None = found[limit][0] + 1
            oldest_ns = found[limit - 1][1].at_unix_ns
        else:
            after = end if end > held.start and oldest_ns >= since_ns else None
        complete_ms = since_ns // 1_000_000 if after is None else oldest_ns // 1_000_000
        return AuditPage([_answer(each) for _, each in found[:limit]], after is not None, complete_ms, after)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")

        @router.get("/audit", responses={503: {"description": "with since: the broker does not answer"}})
        async def audit(
            *,
            limit: Limit = 100,
            actor: Named = "",
            tenant: Named = "",
            refused: bool = False,
            since: Since = None,
            before: Before = None,
        ) -> AuditPage:
            """List changes of keys, limits, roles, models, modes and silences, and deletions, the newest first. With
            `refused` list refused requests instead.
            """
            wanted = AuditFilter(actor, tenant, refused)
            if since is None:
                return self.newest(limit, wanted)
            return await self.read_back(limit, wanted, since, before)

        return router


def group_of(event: AuditEvent) -> Group:
    """Return the group to whose memory bound the event counts. Records of older versions name no role."""
    if event.service == "worker" and not event.actor.startswith((_KEY_ID, SUITE_TOKEN.name)):
        return "planner"
    if event.role:
        return "users" if event.role == "user" else "operators"
    return "users" if event.service == "gateway" else "operators"


def open_audit(bus: LiveBus, clock: Clock, keys: KeyTable | None, tasks: TaskOwner) -> AuditLog:
    """Open a trail and spawn the tasks that follow it."""
    found = AuditLog(bus, clock, keys)
    tasks.spawn("audit", found.follow())
    if keys is not None:
        tasks.spawn("audit of keys", found.bring_keys())
    return found


def key_event(change: KeyChange) -> AuditEvent:
    """Build the event of a change in the key store; its id is the same at each instance that records it."""
    return AuditEvent(
        event_id=f"keys-{change.at_unix_ns}-{change.subject}",
        at_unix_ns=change.at_unix_ns,
        service="keys",
        actor=change.actor,
        tenant=change.tenant,
        action=f"{change.action} {change.subject}",
        detail=masked(change.detail),
        status=200,
        role="admin",
    )


def _answer(event: AuditEvent) -> AuditAnswer:
    return AuditAnswer(
        id=event.event_id,
        unix_ms=event.at_unix_ns // 1_000_000,
        service=event.service,
        actor=event.actor,
        tenant=event.tenant,
        role=event.role,
        action=masked(event.action),  # older versions recorded paths unchanged
        detail=masked(event.detail),
        status=event.status,
        repeats=event.repeats,
    )
