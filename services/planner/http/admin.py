"""The permissions, publication and storage that all admin requests share, and the routes of the planner's mode."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Request

from libs.bus.port import Bus
from libs.contracts.errors import Conflict
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.topics import DECISIONS
from libs.keys.audit import named_actor
from libs.keys.book import Role
from libs.keys.gate import ChangeGuard
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.web import JsonRoute
from services.planner.kept import MODES, Lead, ModeWord, PlannerStore, mode_word
from services.planner.state import PlannerState

Write = Callable[[PlannerStore], Awaitable[bool]]
"""A function that writes a value to a store and returns whether it succeeded."""


class Admin:
    """The common part of admin requests: it checks callers and publishes changes of settings."""

    def __init__(
        self,
        state: PlannerState,
        store: PlannerStore | None,
        bus: Bus,
        clock: Clock,
        *,
        token: str,
        keys: KeyTable | None = None,
    ) -> None:
        """Create the common part. With `keys`, an API key with a sufficient role is accepted as well as the token."""
        self._guard = ChangeGuard(keys, clock, token=token)
        self.state = state
        self._store = store
        self._bus = bus
        self._clock = clock

    def allow(
        self, request: Request, authorization: str, what: str, *, said: str = "", least: Role = "operator"
    ) -> str:
        """Check the caller and return its name for all records of the change. `said` is the name that the caller gives.

        Raise the errors of ChangeGuard if the caller lacks permission. Raise Conflict if another planner leads, because
        a change here would have no effect.
        """
        caller = self._guard.admit(authorization, what, least)
        if self.state.lead is Lead.ANOTHERS:
            raise Conflict("another planner of this cluster leads: ask that one")
        return named_actor(request.scope, caller, said)

    def publish(self, decide: Callable[[int], Decision]) -> None:
        """Publish a decision. `decide` returns it, given the current time in ns."""
        self._bus.publish(DECISIONS, decide(self._clock.now_ns()))

    def remembered(self) -> "Remembered":
        """Return a slot that stores one setting, and tries again while the store is unreachable."""
        return Remembered(self._store)


class Remembered:
    """The last value of one setting, which is kept in memory until it has been stored."""

    def __init__(self, store: PlannerStore | None) -> None:
        self._store = store
        self._unkept: Write | None = None
        self.kept = True

    async def keep(self, write: Write) -> None:
        """Store a value. If that fails, `again` repeats it."""
        self._unkept = write
        self.kept = self._store is not None and await write(self._store)

    async def again(self) -> bool:
        """Repeat a failed write. Return whether the last value is stored."""
        if not self.kept and self._store is not None and self._unkept is not None:
            self.kept = await self._unkept(self._store)
        return self.kept

    def taken(self) -> None:
        """Forget a failed write, because a stored value has replaced its value."""
        self.kept = True


@dataclass(frozen=True, slots=True)
class ModeRequest:
    """The mode to set. `actor` names a caller that shows the suite's token; with an API key, the key's holder is
    recorded.
    """

    mode: ModeWord
    actor: str = ""


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """The mode, and whether it survives a restart."""

    mode: str
    kept: bool


class ModeApi:
    """The routes GET and PUT /v1/mode. PUT is an admin request."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._remembered = admin.remembered()

    async def keep_again(self) -> bool:
        """Repeat a failed write of the mode. Return whether the mode is stored."""
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
            self._admin.publish(lambda now_ns: self._admin.state.set_mode(mode, actor, now_ns))
            await self._remembered.keep(lambda store: store.keep(mode))
            return self._answer()

        return router

    def _answer(self) -> ModeAnswer:
        return ModeAnswer(mode_word(self._admin.state.identity.mode), self._remembered.kept)
