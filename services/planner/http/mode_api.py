"""The routes that tell and set the planner's mode; setting it is an admin verb."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header

from libs.bus.port import Bus
from libs.contracts.topics import DECISIONS
from libs.runtime.clock import Clock
from libs.runtime.web import JsonRoute
from services.planner.http.admin import check_leads, check_token
from services.planner.kept import MODES, ModeWord, PlannerStore, mode_word
from services.planner.state import PlannerState


@dataclass(frozen=True, slots=True)
class ModeRequest:
    """The mode to take, and who asks."""

    mode: ModeWord
    actor: str = "somebody"


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """The mode, and whether it outlives a restart."""

    mode: str
    kept: bool


class ModeApi:
    """GET and PUT /v1/mode."""

    def __init__(self, state: PlannerState, store: PlannerStore | None, bus: Bus, clock: Clock, *, token: str) -> None:
        self._state = state
        self._store = store
        self._bus = bus
        self._clock = clock
        self._token = token
        self._kept = True

    async def keep_again(self) -> bool:
        """Keep a mode that was set while the store was away; whether it has the mode now."""
        if not self._kept and self._store is not None:
            self._kept = await self._store.keep(self._state.identity.mode)
        return self._kept

    def router(self) -> APIRouter:
        """The routes, for the planner's app."""
        router = APIRouter(route_class=JsonRoute)

        @router.get("/v1/mode")
        async def mode() -> ModeAnswer:
            """The planner's mode."""
            return self._answer()

        @router.put("/v1/mode", responses={401: {"description": "the token is missing or wrong"}})
        async def set_mode(request: ModeRequest, authorization: Annotated[str, Header()] = "") -> ModeAnswer:
            """Set the mode; needs the suite's token as `authorization: Bearer TOKEN`."""
            check_token(self._token, authorization, "setting the mode")
            check_leads(self._state)
            wanted = MODES[request.mode]
            self._bus.publish(DECISIONS, self._state.set_mode(wanted, request.actor, self._clock.now_ns()))
            self._kept = self._store is not None and await self._store.keep(wanted)
            return self._answer()

        return router

    def _answer(self) -> ModeAnswer:
        return ModeAnswer(mode_word(self._state.identity.mode), self._kept)
