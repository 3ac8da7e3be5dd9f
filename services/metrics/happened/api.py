"""The route of the planner's decisions, for those who reach this service and not the planner."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from services.metrics.happened.decisions import MAX_DECISIONS, DecisionLog

Limit = Annotated[int, Query(ge=1, le=MAX_DECISIONS, description="How many, the newest first.")]
Keeps = Annotated[bool, Query(description="The newest too that leaves all workers as they are.")]


def decisions_router(log: DecisionLog) -> APIRouter:
    """`/v1/decisions`."""
    router = APIRouter(prefix="/v1")

    @router.get("/decisions")
    async def decisions(limit: Limit = 20, *, keeps: Keeps = False) -> Response:
        """The planner's last decisions, as the topic brought them, the newest first."""
        return Response(msgspec.json.encode(log.newest(limit, keeps=keeps)), media_type="application/json")

    return router
