from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Request

from libs.runtime.web import JsonRoute
from services.planner.http.admin import Admin
from services.planner.kept import MODES, ModeWord, mode_word


@dataclass(frozen=True, slots=True)
class ModeRequest:
    """The mode to set. `actor` names a caller that shows the suite's token; a key names its holder itself."""

    mode: ModeWord
    actor: str = ""


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """The mode, and whether it survives a restart."""

    mode: str
    kept: bool


class ModeApi:
    """The routes GET and PUT /v1/mode; PUT is an admin verb."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._remembered = admin.remembered()

    async def keep_again(self) -> bool:
        """Retry a failed write of the mode and return whether the store has it."""
        return await self._remembered.again()

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)

        @router.get("/v1/mode")
        async def mode() -> ModeAnswer:
            """Return the planner's mode and whether it survives a restart."""
            return self._answer()

        @router.put("/v1/mode", responses={401: {"description": "the token is missing or wrong"}})
        async def set_mode(
            wanted: ModeRequest, request: Request, authorization: Annotated[str, Header()] = ""
        ) -> ModeAnswer:
            """Set the mode. Requires the suite's token as `authorization: Bearer TOKEN`."""
            actor = self._admin.allow(request, authorization, "setting the mode", said=wanted.actor)
            mode = MODES[wanted.mode]
            self._admin.tell(lambda now_ns: self._admin.state.set_mode(mode, actor, now_ns))
            await self._remembered.keep(lambda store: store.keep(mode))
            return self._answer()

        return router

    def _answer(self) -> ModeAnswer:
        return ModeAnswer(mode_word(self._admin.state.identity.mode), self._remembered.kept)
