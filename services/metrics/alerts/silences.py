"""Silences and acknowledgements, kept on the bus, and the routes of alerts. Changing them needs an operator's key."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field

from libs.bus.port import Bus
from libs.contracts.errors import Conflict, InvalidRequest, SilenceNotFound, quoted
from libs.contracts.pb.fulcrum.alerts.v1.alerts_pb2 import AlertSilence
from libs.contracts.topics import SILENCES
from libs.keys.audit import named_actor
from libs.keys.gate import ChangeGuard
from libs.keys.table import MAX_SAID_CHARS
from libs.policy.alerts.store import (
    MAX_ALERT_ID_CHARS,
    MAX_LABELS,
    MAX_RECENT,
    MAX_SILENCES,
    MAX_TEXT_CHARS,
    MOST_NS,
    MS_NS,
    Alert,
    AlertStore,
    Silence,
    SilenceRegistry,
    ended,
    fault_of,
)
from libs.runtime.clock import Clock
from libs.runtime.web import JsonRoute

log = structlog.get_logger()

SINCE_NS: Final = MOST_NS + 3_600_000_000_000
"""The age from which the topic is read at a start."""


class Silencer:
    """The silences and acknowledgements as one metrics service holds them."""

    def __init__(self, alerts: AlertStore, bus: Bus, clock: Clock) -> None:
        self._alerts = alerts
        self._bus = bus
        self._clock = clock
        self.book = SilenceRegistry()
        self.changed: list[Callable[[], None]] = []
        """Callbacks that run after each change of a silence."""

    async def follow(self) -> None:
        """Read the topic, from before this start on, until the bus ends."""
        since_ns = max(self._clock.now_ns() - SINCE_NS, 0)
        async for record in self._bus.subscribe((SILENCES,), since_unix_ns=since_ns):
            if isinstance(record.value, AlertSilence):
                self._take(silence_of(record.value))

    def silence(self, name: str, labels: dict[str, str], for_s: float, *, actor: str, reason: str) -> Silence:
        """Silence alerts from now on. Raise InvalidRequest, or Conflict if there are too many silences."""
        now_ns = self._clock.now_ns()
        matched = tuple(sorted(labels.items()))
        return self._make(
            Silence(self._id(now_ns), now_ns, now_ns + round(for_s * 1e9), now_ns, actor, reason, name, matched)
        )

    def acknowledge(self, alert_id: str, *, actor: str, reason: str) -> Silence:
        """Acknowledge a firing alert. Raise InvalidRequest if no alert with this id fires."""
        if alert_id not in {alert.id for alert in self._alerts.firing()}:
            raise InvalidRequest(
                f"no alert {quoted(alert_id)} fires: GET /v1/alerts lists those that do", param="alert_id"
            )
        now_ns = self._clock.now_ns()
        for each in self.book.holding(now_ns):
            if each.alert_id == alert_id:
                self._publish(ended(each, now_ns))
        made = Silence(self._id(now_ns), now_ns, now_ns + MOST_NS, now_ns, actor, reason, alert_id=alert_id)
        return self._make(made)

    def end(self, silence_id: str) -> Silence:
        """End a silence before its time. Raise SilenceNotFound."""
        now_ns = self._clock.now_ns()
        found = self.book.get(silence_id, now_ns)
        if found is None:
            raise SilenceNotFound(f"there is no silence {quoted(silence_id)}: GET /v1/alerts lists those that hold")
        self._publish(ended(found, now_ns))
        return found

    def enter(self, changed: Iterable[Alert]) -> None:
        """End the acknowledgements of alerts that are over."""
        for each in self.book.over(changed, self._clock.now_ns()):
            self._publish(each)

    def loud(self, alerts: Iterable[Alert]) -> list[Alert]:
        """Return the alerts that nothing silences now."""
        return self.book.loud(alerts, self._clock.now_ns())

    def holding(self) -> list[Silence]:
        return self.book.holding(self._clock.now_ns())

    def _make(self, silence: Silence) -> Silence:
        if fault := fault_of(silence):
            raise InvalidRequest(fault)
        if not self.book.has_room(self._clock.now_ns()):
            raise Conflict(f"{MAX_SILENCES} silences are the most: end one first")
        self._publish(silence)
        return silence

    def _publish(self, silence: Silence) -> None:
        self._take(silence)
        self._bus.publish(SILENCES, silence_message(silence))

    def _take(self, silence: Silence) -> None:
        if self.book.take(silence, self._clock.now_ns()):
            for each in self.changed:
                each()

    def _id(self, now_ns: int) -> str:
        # Two services hardly ever create silences in the same nanosecond; one service takes the next free number.
        number = now_ns
        while self.book.knows(f"{number:x}"):
            number += 1
        return f"{number:x}"


def silence_message(silence: Silence) -> AlertSilence:
    return AlertSilence(
        silence_id=silence.id,
        alert_name=silence.name,
        labels=dict(silence.labels),
        alert_id=silence.alert_id,
        made_unix_ns=silence.made_ns,
        until_unix_ns=silence.until_ns,
        changed_unix_ns=silence.changed_ns,
        actor=silence.actor,
        reason=silence.reason,
        ended=silence.ended,
    )


def silence_of(message: AlertSilence) -> Silence:
    """Convert a record of the topic without checking it; the silence book validates it."""
    return Silence(
        id=message.silence_id,
        made_ns=message.made_unix_ns,
        until_ns=message.until_unix_ns,
        changed_ns=message.changed_unix_ns,
        actor=message.actor,
        reason=message.reason,
        name=message.alert_name,
        labels=tuple(sorted(message.labels.items())),
        alert_id=message.alert_id,
        ended=message.ended,
    )


AlertLimit = Annotated[int, Query(ge=0, le=MAX_RECENT, description="The number of changes to list, newest first.")]
Authorization = Annotated[str, Header()]
REFUSED: dict[int | str, dict[str, Any]] = {401: {"description": "the token is missing or wrong"}}


@dataclass(frozen=True, slots=True)
class SilenceAnswer:
    """A silence, or with `alert_id` an acknowledgement of one alert. `alerts` has the ids of the firing alerts that it
    covers."""

    id: str
    alert_name: str
    labels: dict[str, str]
    alert_id: str
    actor: str
    reason: str
    made_unix_ms: int
    until_unix_ms: int
    alerts: list[str]


@dataclass(frozen=True, slots=True)
class Alerts:
    """The firing alerts, longest first, and the latest changes, newest first."""

    firing: list[Alert]
    recent: list[Alert]
    held_back: list[str]
    """The names of alerts that neither fire nor end now, since the telemetry that they depend on is old."""
    silences: list[SilenceAnswer]


class WantedSilence(BaseModel):
    """A request to silence alerts with a name, with certain labels, or both."""

    alert_name: str = Field("", max_length=MAX_TEXT_CHARS)
    labels: dict[str, str] = Field(default_factory=dict, max_length=MAX_LABELS)
    for_s: float = Field(gt=0, le=1e9)
    actor: str = Field("", max_length=MAX_SAID_CHARS)
    reason: str = Field("", max_length=MAX_TEXT_CHARS)


class WantedAck(BaseModel):
    """A request to acknowledge one firing alert."""

    alert_id: str = Field(min_length=1, max_length=MAX_ALERT_ID_CHARS)
    actor: str = Field("", max_length=MAX_SAID_CHARS)
    reason: str = Field("", max_length=MAX_TEXT_CHARS)


class AlertRoutes:
    def __init__(self, book: AlertStore, silencer: Silencer, guard: ChangeGuard) -> None:
        self._book = book
        self._silencer = silencer
        self._guard = guard

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", route_class=JsonRoute)

        @router.get("/alerts")
        async def alerts(limit: AlertLimit = 100) -> Alerts:
            """List the firing alerts and the last changes; the stream carries further ones."""
            book = self._book
            silences = [self._answer(each) for each in self._silencer.holding()]
            return Alerts(book.firing(), book.newest(limit), list(book.held_back), silences)

        @router.post("/alerts/silences", responses=REFUSED)
        async def silence(wanted: WantedSilence, request: Request, authorization: Authorization = "") -> SilenceAnswer:
            """Silence alerts for a while: they still fire, but are not posted. Needs the suite's token, or an
            operator's key, as `authorization: Bearer TOKEN`.
            """
            actor = self._allow(request, authorization, wanted.actor)
            made = self._silencer.silence(
                wanted.alert_name, wanted.labels, wanted.for_s, actor=actor, reason=wanted.reason
            )
            return self._answer(made)

        @router.post("/alerts/acks", responses=REFUSED)
        async def acknowledge(wanted: WantedAck, request: Request, authorization: Authorization = "") -> SilenceAnswer:
            """Acknowledge an alert until it is over. Needs the same permission as silencing."""
            actor = self._allow(request, authorization, wanted.actor)
            made = self._silencer.acknowledge(wanted.alert_id, actor=actor, reason=wanted.reason)
            return self._answer(made)

        @router.delete("/alerts/silences/{silence_id}", responses=REFUSED | {404: {"description": "none holds"}})
        async def end(silence_id: str, request: Request, authorization: Authorization = "") -> SilenceAnswer:
            """End a silence or an acknowledgement before its time. Needs the same permission as silencing."""
            self._allow(request, authorization)
            return self._answer(self._silencer.end(silence_id))

        return router

    def _allow(self, request: Request, authorization: str, said: str = "") -> str:
        """Return the actor as every record of the change names it."""
        return named_actor(request.scope, self._guard.admit(authorization, "silencing alerts"), said)

    def _answer(self, each: Silence) -> SilenceAnswer:
        return SilenceAnswer(
            id=each.id,
            alert_name=each.name,
            labels=dict(each.labels),
            alert_id=each.alert_id,
            actor=each.actor,
            reason=each.reason,
            made_unix_ms=each.made_ns // MS_NS,
            until_unix_ms=each.until_ns // MS_NS,
            alerts=[alert.id for alert in self._book.firing() if each.matches(alert)],
        )
