from typing import Annotated

import structlog
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, ValidationError

from libs.contracts.errors import Conflict
from libs.runtime.web import JsonRoute
from services.planner.http.admin import Admin
from services.planner.http.limits_body import MAX_NAME_CHARS, LimitsBody

log = structlog.get_logger()

Actor = Annotated[str, Query(max_length=MAX_NAME_CHARS, description="A name beside the suite's token, for the record.")]


class LimitsAnswer(BaseModel):
    """The limits, and whether they survive a restart."""

    limits: LimitsBody
    kept: bool


class LimitsApi:
    """The routes GET and PUT /v1/limits; PUT is an admin verb."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._remembered = admin.remembered()
        self._held = LimitsBody()

    async def keep_again(self) -> bool:
        """Retry a failed write of the limits and return whether the store has them."""
        return await self._remembered.again()

    def take(self, kept: LimitsBody) -> None:
        """Adopt the limits that the previous leader stored."""
        self._held = kept
        self._remembered.taken()
        self._admin.state.limits = kept.limits()

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)

        @router.get("/v1/limits")
        async def limits() -> LimitsAnswer:
            """Return the limits that decisions keep to."""
            return LimitsAnswer(limits=self._held, kept=self._remembered.kept)

        @router.put(
            "/v1/limits",
            responses={
                401: {"description": "the token is missing or wrong"},
                409: {"description": "somebody else has set them since they were read"},
            },
        )
        async def set_limits(
            wanted: LimitsBody, request: Request, actor: Actor = "", authorization: Annotated[str, Header()] = ""
        ) -> LimitsAnswer:
            """Set all limits. Requires the suite's token as `authorization: Bearer TOKEN`."""
            by = self._admin.allow(request, authorization, "setting limits", said=actor)
            if wanted.revision != self._held.revision:
                raise Conflict(
                    f"limits are at revision {self._held.revision} by now: read them again", param="revision"
                )
            before, self._held = self._held, wanted.model_copy(update={"revision": wanted.revision + 1})
            said = wanted.changed_from(before)
            limits, written = wanted.limits(), self._held.model_dump_json()
            self._admin.tell(lambda now_ns: self._admin.state.set_limits(limits, by, said, now_ns))
            await self._remembered.keep(lambda store: store.keep_limits(written))
            return LimitsAnswer(limits=self._held, kept=self._remembered.kept)

        return router


def read_limits(written: str | None) -> LimitsBody:
    """Parse stored limits; return the defaults if there are none or they cannot be parsed."""
    if written is None:
        return LimitsBody()
    try:
        return LimitsBody.model_validate_json(written)
    except ValidationError as error:
        log.warning("the limits that were kept are not understood: there are none", error=str(error))
        return LimitsBody()
