"""The route of alerts."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query

from libs.policy.alerts.store import MAX_RECENT, Alert, AlertStore

Limit = Annotated[int, Query(ge=0, le=MAX_RECENT, description="How many of the last changes, the newest first.")]


@dataclass(frozen=True, slots=True)
class Alerts:
    """What fires now, the longest first, and the last changes, the newest first."""

    firing: list[Alert]
    recent: list[Alert]
    held_back: list[str]
    """Names of alerts that neither fire nor end now, since the telemetry that they stand on is old."""


def alerts_router(book: AlertStore) -> APIRouter:
    """`/v1/alerts`."""
    router = APIRouter(prefix="/v1")

    @router.get("/alerts")
    async def alerts(limit: Limit = 100) -> Alerts:
        """What fires, and the last changes; the stream brings further ones."""
        return Alerts(book.firing(), book.newest(limit), list(book.held_back))

    return router
