"""Routes of alerts, silences and acknowledgements. Changing them needs an operator's key."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field

from libs.keys.audit import named_actor
from libs.keys.gate import ChangeGuard
from libs.keys.table import MAX_SAID_CHARS
from libs.policy.alerts.silences import MAX_ALERT_ID_CHARS, MAX_LABELS, MAX_TEXT_CHARS, Silence
from libs.policy.alerts.store import MAX_RECENT, MS_NS, Alert, AlertStore
from libs.runtime.web import JsonRoute
from services.metrics.alerts.silencer import Silencer

AlertLimit = Annotated[int, Query(ge=0, le=MAX_RECENT, description="How many of the last changes, the newest first.")]
Authorization = Annotated[str, Header()]
REFUSED: dict[int | str, dict[str, Any]] = {401: {"description": "the token is missing or wrong"}}


@dataclass(frozen=True, slots=True)
class SilenceAnswer:
    """A silence, or with `alert_id` an acknowledgement of one alert. `alerts`: ids of those that fire and that it is
    of."""

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
    """What fires now, the longest first, and the last changes, the newest first."""

    firing: list[Alert]
    recent: list[Alert]
    held_back: list[str]
    """Names of alerts that neither fire nor end now, since the telemetry that they stand on is old."""
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
            """Acknowledge an alert until it is over. Needs what silencing needs."""
            actor = self._allow(request, authorization, wanted.actor)
            made = self._silencer.acknowledge(wanted.alert_id, actor=actor, reason=wanted.reason)
            return self._answer(made)

        @router.delete("/alerts/silences/{silence_id}", responses=REFUSED | {404: {"description": "none holds"}})
        async def end(silence_id: str, request: Request, authorization: Authorization = "") -> SilenceAnswer:
            """End a silence or an acknowledgement before its time. Needs what silencing needs."""
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
