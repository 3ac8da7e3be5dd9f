"""The routes that tell and set the limits of decisions; setting them is an admin verb."""

from typing import Annotated

import structlog
from fastapi import APIRouter, Header, Query
from pydantic import BaseModel, ValidationError

from libs.bus.port import Bus
from libs.contracts.errors import Conflict
from libs.contracts.topics import DECISIONS
from libs.runtime.clock import Clock
from libs.runtime.web import JsonRoute
from services.planner.http.admin import check_leads, check_token
from services.planner.http.limits_body import MAX_NAME_CHARS, LimitsBody
from services.planner.kept import PlannerStore
from services.planner.state import PlannerState

log = structlog.get_logger()

Actor = Annotated[str, Query(max_length=MAX_NAME_CHARS, description="Who sets them, for the record.")]


class LimitsAnswer(BaseModel):
    """The limits, and whether they outlive a restart."""

    limits: LimitsBody
    kept: bool


class LimitsApi:
    """GET and PUT /v1/limits."""

    def __init__(self, state: PlannerState, store: PlannerStore | None, bus: Bus, clock: Clock, *, token: str) -> None:
        self._state = state
        self._store = store
        self._bus = bus
        self._clock = clock
        self._token = token
        self._held = LimitsBody()
        self._kept = True

    async def keep_again(self) -> bool:
        """Keep limits that were set while the store was away; whether it has them now."""
        if not self._kept and self._store is not None:
            self._kept = await self._store.keep_limits(self._held.model_dump_json())
        return self._kept

    def take(self, kept: LimitsBody) -> None:
        """Hold to those that were kept by whoever led before."""
        self._held, self._kept = kept, True
        self._state.limits = kept.limits()

    def router(self) -> APIRouter:
        """The routes, for the planner's app."""
        router = APIRouter(route_class=JsonRoute)

        @router.get("/v1/limits")
        async def limits() -> LimitsAnswer:
            """What decisions hold to."""
            return LimitsAnswer(limits=self._held, kept=self._kept)

        @router.put(
            "/v1/limits",
            responses={
                401: {"description": "the token is missing or wrong"},
                409: {"description": "somebody else has set them since they were read"},
            },
        )
        async def set_limits(
            wanted: LimitsBody, actor: Actor = "somebody", authorization: Annotated[str, Header()] = ""
        ) -> LimitsAnswer:
            """Set all of them; needs the suite's token as `authorization: Bearer TOKEN`."""
            check_token(self._token, authorization, "setting limits")
            check_leads(self._state)
            if wanted.revision != self._held.revision:
                raise Conflict(
                    f"limits are at revision {self._held.revision} by now: read them again", param="revision"
                )
            before, self._held = self._held, wanted.model_copy(update={"revision": wanted.revision + 1})
            said = wanted.changed_from(before)
            self._bus.publish(DECISIONS, self._state.set_limits(wanted.limits(), actor, said, self._clock.now_ns()))
            self._kept = self._store is not None and await self._store.keep_limits(self._held.model_dump_json())
            return LimitsAnswer(limits=self._held, kept=self._kept)

        return router


def read_limits(written: str | None) -> LimitsBody:
    """Those that were kept; none where nothing was, or what was is not understood."""
    if written is None:
        return LimitsBody()
    try:
        return LimitsBody.model_validate_json(written)
    except ValidationError as error:
        log.warning("the limits that were kept are not understood: there are none", error=str(error))
        return LimitsBody()
